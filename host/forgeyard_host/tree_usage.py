"""How much a job has written, counted from outside: for a writable layer that no filesystem bounds.

The job writes on while it is counted, and may do so to hide: so nothing is followed, memory does not grow with the
tree, and what could not be counted in bounds of depth and time is said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forgeyard_host.files import open_beneath

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DEPTH: Final = 200
"""Directories open at once. A path that a program can name has rarely more; one that hides has."""
_BLOCK: Final = 512
_LOOK_AT_CLOCK: Final = 1024

if TYPE_CHECKING:
    _Level = tuple[int, os._ScandirIterator[str]]


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """Bytes and files found. `whole` is False when there was more than could be counted."""

    bytes: int
    files: int
    whole: bool


@dataclass(frozen=True, slots=True)
class FilesystemUsage:
    """Bytes and files in use on the filesystem of a tree, whoever they belong to."""

    bytes: int
    files: int


def filesystem_usage(path: str) -> FilesystemUsage:
    """Cheap beside a count: the filesystem keeps these two numbers.

    :raises OSError: when `path` is gone.
    """
    facts = os.statvfs(path)
    return FilesystemUsage((facts.f_blocks - facts.f_bfree) * facts.f_frsize, facts.f_files - facts.f_ffree)


def tree_usage(path: str, *, most_bytes: int, most_files: int, seconds: float) -> TreeUsage:
    """Count below `path`, until there is more than `most_bytes` or `most_files`, or `seconds` are over.

    Blocking. A file with several names counts once, in shares.

    :raises OSError: when `path` itself can't be read.
    """
    count = _Count(time.monotonic() + seconds)
    with ExitStack() as stack:
        top = os.open(path, _DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, top)
        for _ in count.walk(top, stack):
            if count.bytes > most_bytes or count.files > most_files:
                break
    return TreeUsage(int(count.bytes), count.files, count.whole)


class _Count:
    def __init__(self, deadline: float) -> None:
        self.bytes = 0.0
        self.files = 0
        self.whole = True
        self._deadline = deadline

    def walk(self, top: int, cleanup: ExitStack) -> Iterator[None]:
        """Counts an entry at each turn. One directory per level is open, and listed as it is read."""
        levels: list[_Level] = [(top, cleanup.enter_context(os.scandir(top)))]
        cleanup.callback(_close_below, levels)
        while levels:
            directory, entries = levels[-1]
            try:
                entry = next(entries, None)
            except OSError:  # removed while it was read
                entry = None
            if entry is None:
                level = levels.pop()
                if levels:
                    _close(level)
                continue
            self._add(entry)
            if self.files % _LOOK_AT_CLOCK == 0 and time.monotonic() > self._deadline:
                self.whole = False
                return
            if entry.is_dir(follow_symlinks=False):
                if len(levels) < _DEPTH:
                    levels.extend(_opened(directory, entry.name))
                else:
                    self.whole = False
            yield

    def _add(self, entry: os.DirEntry[str]) -> None:
        self.files += 1
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:  # removed since it was listed
            return
        shared = 1 if entry.is_dir(follow_symlinks=False) else max(1, info.st_nlink)
        self.bytes += info.st_blocks * _BLOCK / shared


def _opened(parent: int, name: str) -> list[_Level]:
    try:
        fd = open_beneath(parent, name, _DIRECTORY, cross_mounts=False)
    except OSError:  # removed, or another thing by now
        return []
    try:
        return [(fd, os.scandir(fd))]
    except OSError:
        os.close(fd)
        return []


def _close_below(levels: list[_Level]) -> None:
    for level in levels[1:]:
        _close(level)


def _close(level: _Level) -> None:
    level[1].close()
    os.close(level[0])
