"""Every adapter's sweep: kind by kind, what has ended before what runs, and on past what can't be removed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from forgeyard_host.processes import boot_id
from forgeyard_model.errors import ForgeyardError
from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.labels import BOOT, EXECUTOR, SANDBOX

_AT_ONCE: Final = 4
"""Removals under way: one that hangs until its deadline holds up none of the others of its kind."""
Fate = Literal["removed", "kept"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """An object of one state directory at an engine.

    :param name: for people, without its kind.
    :param remove: gone already is fine; raises ForgeyardError when it is still there.
    :param running: it may hold what others of its kind need, so it goes after those that don't.
    """

    name: str
    labels: Mapping[str, str]
    remove: Callable[[], Awaitable[object]]
    running: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object, and how an engine lists those of the state directory."""

    name: str
    listing: Callable[[], Awaitable[Sequence[Leftover]]]


async def sweep_kinds(kinds: Sequence[Kind], alive: Callable[[str], bool]) -> SweepReport:
    """Remove every leftover whose sandbox is not alive, in the order of `kinds`: what holds others comes first.

    :param alive: whether the sandbox of that id is; of what belongs to no sandbox, whether its executor is.
    :raises ForgeyardError: not even the first kind could be listed, so nothing can be said of what is left.
    """
    removed: list[str] = []
    kept: list[str] = []
    failed: list[tuple[str, str]] = []
    for kind in kinds:
        try:
            found = await kind.listing()
        except ForgeyardError as error:
            if kind is kinds[0]:
                raise
            failed.append((f"every {kind.name}", str(error)))
            continue
        for running in (False, True):
            some = [leftover for leftover in found if leftover.running is running]
            for leftover, fate in zip(some, await _end_all(some, alive), strict=True):
                what = f"{kind.name} {leftover.name}"
                if isinstance(fate, ForgeyardError):
                    failed.append((what, str(fate)))
                else:
                    (removed if fate == "removed" else kept).append(what)
    return SweepReport(tuple(removed), tuple(kept), tuple(failed))


async def _end_all(found: Sequence[Leftover], alive: Callable[[str], bool]) -> list[Fate | ForgeyardError]:
    room = asyncio.Semaphore(_AT_ONCE)

    async def end(leftover: Leftover) -> Fate | ForgeyardError:
        async with room:
            if _lives(leftover.labels, alive):
                return "kept"
            try:
                await leftover.remove()
            except ForgeyardError as error:
                return error
            return "removed"

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(end(leftover)) for leftover in found]
    return [task.result() for task in tasks]


def _lives(labels: Mapping[str, str], alive: Callable[[str], bool]) -> bool:
    """None does over a boot of this host."""
    return labels.get(BOOT) == boot_id() and alive(labels.get(SANDBOX) or labels.get(EXECUTOR, ""))
