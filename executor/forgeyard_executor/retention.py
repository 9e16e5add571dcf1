"""What is kept for later, and for how long: images, caches, workspaces of failed jobs, output of ended ones.

Acted on when an executor opens, every hour while it is open, and by `forgeyard gc`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from forgeyard_executor.caches import CacheStore
from forgeyard_executor.kept_failures import remove_oldest, sweep_kept
from forgeyard_executor.pressure import Collector
from forgeyard_executor.state import StatePaths
from forgeyard_host.files import remove_tree
from forgeyard_host.ledger import ExecutorLock
from forgeyard_model.config import Retention
from forgeyard_model.errors import ForgeyardError

log: Final = logging.getLogger("forgeyard.executor")

INTERVAL: Final = 3600.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Keepers:
    """The stores. Each is opened only when something is to be removed from it.

    :param prune_images: removes the images that no job used for so many seconds (first), or, longest unused first,
        until about so many bytes are free (second); what it removed is its own affair.
    """

    paths: StatePaths
    caches: Callable[[], CacheStore]
    prune_images: Callable[[float | None, int | None], object]

    def collectors(self) -> Sequence[Collector]:
        """For pressure.relieve: what is cheapest to get back comes first. A store that is not there is not made."""
        kinds = (
            Collector("outputs", self.paths.spools, lambda _: remove_outputs(self.paths, older_than=None)),
            Collector("kept workspaces", self.paths.kept, lambda size: remove_oldest(self.paths.kept, size)),
            Collector("caches", self.paths.caches, lambda size: self.caches().prune(free_bytes=size)),
            Collector("images", self.paths.images, lambda size: self.prune_images(None, size)),
        )
        return tuple(kind for kind in kinds if kind.path.exists())


def apply_retention(retention: Retention, keepers: Keepers) -> tuple[str, ...]:
    """Remove what nobody used for as long as `retention` says. Blocking; returns what went wrong, a line each."""
    errors: list[str] = []

    def past_errors(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ForgeyardError) as error:
            errors.append(f"{name}: {error}")

    # Tuples of locals: each limit is looked at once, and None never reaches a store.
    images, caches, outputs = retention.images, retention.caches, retention.outputs
    if images is not None and keepers.paths.images.exists():
        past_errors("images", lambda: keepers.prune_images(images, None))
    if keepers.paths.caches.exists():
        past_errors("caches", lambda: _caches(keepers.caches(), caches))
    if keepers.paths.kept.exists():
        past_errors("kept workspaces", lambda: sweep_kept(keepers.paths.kept, partial(_running, keepers.paths)))
    if outputs is not None:
        past_errors("outputs", lambda: remove_outputs(keepers.paths, older_than=time.time() - outputs))
    return tuple(errors)


def _caches(store: CacheStore, unused_for: float | None) -> None:
    store.sweep()
    store.prune(unused_for=unused_for, keep_bytes=store.total_cap)


def remove_outputs(paths: StatePaths, *, older_than: float | None) -> int:
    """Remove the spooled output of attempts that have ended; how many there were.

    :param older_than: seconds since the epoch: only what was last written before, and then also where the executor
        lives, whose caller has not asked for it since. None: only where the executor is dead.
    """
    removed = 0
    for executor in _children(paths.spools):
        alive = ExecutorLock.held(str(paths.root), executor.name)
        if alive and older_than is None:
            continue
        for spool in _children(executor):
            if not _running(paths, spool.name) and (older_than is None or _last_written(spool) < older_than):
                remove_tree(str(spool))
                removed += 1
        if not alive:
            with suppress(OSError):
                executor.rmdir()  # what is not empty stays
    return removed


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _running(paths: StatePaths, sandbox: str) -> bool:
    return (paths.root / "ledger" / f"{sandbox}.jsonl").exists()


def _last_written(spool: Path) -> float:
    times = [spool.stat().st_mtime]
    with suppress(FileNotFoundError):
        times.extend(path.lstat().st_mtime for path in spool.iterdir())
    return max(times)


async def keep_retention(apply: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
    """Apply retention now and every hour, until cancelled. What goes wrong is logged."""
    while True:
        for error in await apply():
            log.warning("retention: %s", error)
        await asyncio.sleep(INTERVAL)
