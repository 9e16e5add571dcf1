"""Free space of the file systems that the state lies on: whether a job may be taken, and what makes room.

    check_pressure(paths, marks)            one statvfs per file system; raises disk_pressure
    short = short_of_space(paths, marks)    where it is time to collect
    relieve(short, collectors)              blocking; the longest unused first, until the mark is passed by half

The store, the spool and the writable layers may lie on different file systems, so each is asked once, by its device.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_model.config import Watermarks
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError

log: Final = logging.getLogger("forgeyard.executor")

AGAIN: Final = 30.0
"""Seconds before a collection that found too little is tried again while jobs are still taken."""
_FILES_COLLECT: Final = 0.05
_FILES_REFUSE: Final = 0.01
"""Shares of a file system's inodes, which may run out while it has bytes left. No setting: nobody plans in inodes."""


@dataclass(frozen=True, slots=True)
class Filesystem:
    """One file system and what of ours lies on it. Bytes, and inodes (`files` 0: it has no fixed number of them)."""

    device: int
    names: tuple[str, ...]
    path: Path
    total: int
    free: int
    files: int
    files_free: int

    def again(self) -> Filesystem:
        """As it is now."""
        return _measure(self.device, self.names, self.path)

    def missing(self, marks: Watermarks) -> int:
        """Bytes to free until collecting may stop; 0 when it need not begin."""
        mark = _collect_mark(self, marks)
        few_files = self.files and self.files_free < self.files * _FILES_COLLECT
        if self.free >= mark and not few_files:
            return 0
        return max(mark + mark // 2 - self.free, 1)

    def too_full(self, marks: Watermarks) -> bool:
        """Whether no job may be taken."""
        few_files = self.files and self.files_free < self.files * _FILES_REFUSE
        return self.free < marks.refuse_below.of(self.total) or bool(few_files)


@dataclass(frozen=True, slots=True)
class Collector:
    """One kind of things that are kept for later. `collect` frees about that many bytes, or what it can."""

    name: str
    path: Path
    collect: Callable[[int], object]


def filesystems(paths: Sequence[tuple[str, Path]]) -> tuple[Filesystem, ...]:
    """The file systems of `paths`, each once. What is not there yet will be made on that of its parent.

    :raises OSError: for a path of which not even a parent can be looked at.
    """
    found: dict[int, tuple[list[str], Path]] = {}
    for name, path in paths:
        there, device = _nearest(path)
        found.setdefault(device, ([], there))[0].append(name)
    return tuple(_measure(device, tuple(names), path) for device, (names, path) in found.items())


def short_of_space(paths: Sequence[tuple[str, Path]], marks: Watermarks) -> tuple[Filesystem, ...]:
    """The file systems below `gc_below`."""
    return tuple(found for found in filesystems(paths) if found.missing(marks))


def check_pressure(paths: Sequence[tuple[str, Path]], marks: Watermarks) -> None:
    """Refuse to go on where less than `refuse_below` is free.

    :raises ExecutorError: PREPARE, reason disk_pressure.
    """
    for found in filesystems(paths):
        if found.too_full(marks):
            raise _disk_pressure(found, marks)


def relieve(short: Sequence[Filesystem], marks: Watermarks, collectors: Sequence[Collector]) -> int:
    """Collect on each file system of `short` until half as much again as `gc_below` is free; the bytes freed.

    Blocking. A collector that fails is logged, and the next one is tried.
    """
    freed = 0
    for before in short:
        now = before
        for collector in collectors:
            missing = now.missing(marks)
            if not missing:
                break
            if _nearest(collector.path)[1] == before.device:
                _collect(collector, missing)
                now = now.again()
        freed += max(now.free - before.free, 0)
    return freed


class DiskPressure:
    """What an executor asks before each job."""

    def __init__(
        self, paths: Sequence[tuple[str, Path]], marks: Watermarks, collectors: Callable[[], Sequence[Collector]]
    ) -> None:
        """
        :param collectors: called when there is something to collect, since stores are slow to open.
        """
        self.paths = tuple(paths)
        self.marks = marks
        self._collectors = collectors
        self._lock = threading.Lock()
        self._last = -AGAIN

    def ample(self) -> bool:
        """Whether there is nothing to do. Takes microseconds."""
        return not short_of_space(self.paths, self.marks)

    def admit(self) -> None:
        """Make room where it is short, then check. Blocking; one thread collects, the others wait for it.

        :raises ExecutorError: PREPARE, reason disk_pressure.
        """
        with self._lock:
            found = filesystems(self.paths)
            short = tuple(one for one in found if one.missing(self.marks))
            full = any(one.too_full(self.marks) for one in found)
            if short and (full or time.monotonic() - self._last >= AGAIN):
                freed = relieve(short, self.marks, self._collectors())
                self._last = time.monotonic()
                log.info("collected for space", extra={"bytes": freed, "filesystems": [one.names for one in short]})
        check_pressure(self.paths, self.marks)


def _collect(collector: Collector, missing: int) -> None:
    try:
        collector.collect(missing)
    except (OSError, ForgeyardError) as error:
        log.warning("collecting %s: %s", collector.name, error)


def _collect_mark(found: Filesystem, marks: Watermarks) -> int:
    return max(marks.gc_below.of(found.total), marks.refuse_below.of(found.total))


def _nearest(path: Path) -> tuple[Path, int]:
    while True:
        try:
            return path, os.stat(path).st_dev  # noqa: PTH116  asked before each job
        except FileNotFoundError:
            path = path.parent


def _measure(device: int, names: tuple[str, ...], path: Path) -> Filesystem:
    space = os.statvfs(path)
    return Filesystem(
        device=device,
        names=names,
        path=path,
        total=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        files=space.f_files,
        files_free=space.f_favail,
    )


def _disk_pressure(found: Filesystem, marks: Watermarks) -> ExecutorError:
    needed = marks.refuse_below.of(found.total)
    if found.free < needed:
        what = f"{_mib(found.free)} free of {_mib(found.total)}, and a job is taken with {_mib(needed)}"
    else:
        what = f"{found.files_free} of {found.files} inodes free, and a job is taken with {_FILES_REFUSE:.0%}"
    return ExecutorError(
        ExecutorErrorKind.PREPARE,
        "disk_pressure",
        f"no room for a job on the file system of {found.path} ({', '.join(found.names)})",
        details=what,
        resolution="free space there, remove images and caches that are in use, or lower watermarks.refuse_below",
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
