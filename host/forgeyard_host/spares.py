"""Emptied attempt directories, kept for the attempts to come.

Making and removing some twenty directories per attempt is what costs most on a disk (a rename is free beside it).
A directory is kept only if nothing of its last attempt is in it or on it; everything doubtful is removed instead.
"""

# ruff: noqa: PTH104, PTH106, PTH208  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_host.files import empty_directory, open_beneath, remove_tree
from forgeyard_host.processes import own_start_time, start_time

FIXED: Final = ("mnt", "scratch")
"""Directories that every attempt has; all but scratch are out of the job's reach."""

_KEPT: Final = 32
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FS_IOC_GETFLAGS: Final = 0x80086601
_ONE_BLOCK: Final = 4096
_serial: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class Layout:
    """Directories in an attempt's scratch: plain ones, and those that hold an overlay's `upper` and `work`."""

    plain: frozenset[str] = frozenset()
    uppers: frozenset[str] = frozenset()


def fitted(directory: str, layout: Layout, plain: set[str], uppers: set[str]) -> Layout:
    """`layout` without names that the coming attempt uses in the other way; their directories are removed."""
    for name in (layout.plain & uppers) | (layout.uppers & plain):
        remove_tree(f"{directory}/scratch/{name}")
    return Layout(layout.plain - uppers, layout.uppers - plain)


class Spares:
    """The spare directories of one Host, below <state>/spare, where nobody but root can go."""

    def __init__(self, state_root: str) -> None:
        self._parent = f"{state_root}/spare"
        self._home = f"{self._parent}/{os.getpid()}-{own_start_time()}-{next(_serial)}"
        self._lock = threading.Lock()
        self._free: list[tuple[str, Layout]] = []
        self._made = 0

    def take(self, directory: str) -> Layout | None:
        """Put a spare at the path `directory`; its layout, or None when there is none.

        :raises OSError: when it cannot be moved there.
        """
        with self._lock:
            if not self._free:
                return None
            spare, layout = self._free.pop()
        os.rename(spare, directory)
        return layout

    def keep(self, directory: str, layout: Layout) -> bool:
        """Empty `directory` and keep it. False, with the directory still there, when it can't be or need not be kept.

        No process of the attempt may be alive: one that had a directory open would share it with the next attempt.
        """
        with self._lock:
            if len(self._free) >= _KEPT:
                return False
            self._made += 1
            spare = f"{self._home}/{self._made}"
        try:
            left = _scrubbed(directory, layout)
            if left is None:
                return False
            try:
                os.rename(directory, spare)
            except FileNotFoundError:
                Path(self._home).mkdir(mode=0o700, parents=True, exist_ok=True)
                os.rename(directory, spare)
        except OSError:
            return False  # the caller removes it, and that names what is wrong with it
        with self._lock:
            self._free.append((spare, left))
        return True

    def close(self) -> None:
        """Remove the spares, and those of executors that are gone."""
        with self._lock:
            self._free.clear()
        remove_tree(self._home)
        self.sweep()

    def sweep(self) -> None:
        """Remove the spares of executors that are gone."""
        try:
            names = os.listdir(self._parent)
        except FileNotFoundError:
            return
        for name in names:
            if not _owner_lives(name):
                remove_tree(f"{self._parent}/{name}")
        try:
            os.rmdir(self._parent)
        except OSError:
            return  # another executor's are in it


def _owner_lives(name: str) -> bool:
    pid, _, rest = name.partition("-")
    try:
        return start_time(int(pid)) == int(rest.partition("-")[0])
    except (ValueError, ProcessLookupError):
        return False


def _scrubbed(directory: str, layout: Layout) -> Layout | None:
    """Empty all that is in `directory`; what of `layout` is left and clean. None: not to be kept at all."""
    top = os.open(directory, _DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(top):
            if name not in FIXED:
                os.unlink(name, dir_fd=top)
        for name in FIXED[:-1]:
            if not _emptied(top, name):
                return None
        scratch = open_beneath(top, "scratch", _DIRECTORY, cross_mounts=False)
        try:
            return _scrubbed_scratch(scratch, layout, _flags(top))
        finally:
            os.close(scratch)
    finally:
        os.close(top)


def _scrubbed_scratch(scratch: int, layout: Layout, flags: int) -> Layout | None:
    if not layout.plain | layout.uppers >= set(os.listdir(scratch)):
        return None
    plain = frozenset(name for name in layout.plain if _clean(scratch, name, flags))
    uppers = frozenset(
        name
        for name in layout.uppers
        if _clean(scratch, f"{name}/upper", flags) and _clean(scratch, f"{name}/work", flags)
    )
    # One that the last job left its mark on goes; whoever wants the name gets a new one.
    for name in (layout.plain | layout.uppers) - plain - uppers:
        dirfd = open_beneath(scratch, name, _DIRECTORY, cross_mounts=False)
        try:
            if empty_directory(dirfd):
                return None
        finally:
            os.close(dirfd)
        os.rmdir(name, dir_fd=scratch)
    return Layout(plain, uppers)


def _emptied(parent: int, name: str) -> bool:
    dirfd = open_beneath(parent, name, _DIRECTORY, cross_mounts=False)
    try:
        return not empty_directory(dirfd)
    finally:
        os.close(dirfd)


def _clean(parent: int, name: str, flags: int) -> bool:
    """Empty the directory; whether a new owner and mode make it as good as new.

    Its owner, a job, may have given it attributes, an ACL or inode flags, or have made it grow.
    """
    dirfd = open_beneath(parent, name, _DIRECTORY, cross_mounts=False)
    try:
        if empty_directory(dirfd):
            return False
        for attribute in os.listxattr(dirfd):
            if not attribute.startswith("trusted.overlay."):  # overlayfs's own, which no job can set
                return False
            os.removexattr(dirfd, attribute)
        return _flags(dirfd) == flags and os.fstat(dirfd).st_size <= _ONE_BLOCK
    finally:
        os.close(dirfd)


def _flags(fd: int) -> int:
    raw = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
    return int(struct.unpack("=Q", raw)[0] & 0xFFFFFFFF)
