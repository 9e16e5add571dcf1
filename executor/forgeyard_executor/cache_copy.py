"""Copies what a job left in a cache into a new snapshot. Whatever lies there was arranged by the job: hostile.

Everything is reached by descriptor, no symlink is followed, no mount is crossed. Symlinks are kept as symlinks, with
any target: they mean something only inside the next sandbox. What a file system could use against a reader is left
behind: devices, FIFOs and sockets, setuid and setgid bits, extended attributes, owners beyond the job's own range.
"""

# ruff: noqa: PTH208  # plain os calls: they take dir_fd and run for every file

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from forgeyard_host.files import open_beneath

STORED: Final = 1000
"""Owner and group on disk of what belongs to the job. Fixed, so that snapshots of jobs with different users can share
files: shown by OWNER maps, which let the top directory's owner and the job's user change places."""
MOST_ENTRIES: Final = 1_000_000
_MOST_PATH: Final = 3800
"""Bytes below the top: PATH_MAX less some room."""
_MOST_NOTES: Final = 20
_CHUNK: Final = 1 << 30
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ELSEWHERE: Final = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_MODE: Final = 0o1777


class TooLarge(Exception):  # noqa: N818  it says what the tree is
    """What the job left is more than the cache may hold."""


@dataclass(frozen=True, slots=True)
class Owners:
    """How host ids become ids on disk. `base` and `count`: the attempt's range; `uid` and `gid`: the job's user."""

    base: int
    count: int
    uid: int
    gid: int

    def stored(self, info: os.stat_result) -> tuple[int, int]:
        """Owner and group on disk of what a job sees as `info`."""
        return self._one(info.st_uid, self.uid), self._one(info.st_gid, self.gid)

    def _one(self, host: int, job: int) -> int:
        inside = host - self.base
        if inside == job or not 0 <= inside < self.count:
            return STORED
        return job if inside == STORED else inside


@dataclass(frozen=True, slots=True)
class Copied:
    """`bytes`: data, without holes. `entries`: all of them. `notes`: what was changed or left out."""

    bytes: int
    entries: int
    notes: tuple[str, ...]


def copy_cache(view: int, target: int, owners: Owners, *, previous: int | None, most: int) -> Copied:
    """Copy the tree at the descriptor `view` into the empty directory at `target`.

    :param previous: the snapshot that the job was shown. Files that it did not touch are linked from there, since
        no snapshot is ever written to: keeping a large cache after a small change costs little.
    :param most: bytes that it may be.
    :raises TooLarge: with more bytes, or more than MOST_ENTRIES.
    :raises OSError: when it can't be read or written; what was made so far is left.
    """
    copy = _Copy(view, target, owners, previous, most)
    copy.tree()
    more = (f"and {copy.unnamed} more",) if copy.unnamed else ()
    return Copied(copy.bytes, copy.entries, (*copy.notes, *more))


@dataclass(slots=True)
class _Copy:
    view: int
    target: int
    owners: Owners
    previous: int | None
    most: int
    bytes: int = 0
    entries: int = 0
    notes: list[str] = field(default_factory=list)
    unnamed: int = 0
    links: dict[tuple[int, int], str] = field(default_factory=dict)

    def tree(self) -> None:
        """Breadth first, each directory opened anew from the top: depth costs no descriptors and no recursion."""
        waiting, made = deque([""]), []
        while waiting:
            below = waiting.popleft()
            made.append((below, self._directory(below, waiting)))
        for below, info in reversed(made):
            # Last, since every entry made in a directory changes its time.
            fd = open_beneath(self.target, below or ".", _DIRECTORY, cross_mounts=False)
            try:
                owner = self.owners.stored(info) if below else (STORED, STORED)
                _finish(fd, info, owner)
            finally:
                os.close(fd)

    def _directory(self, below: str, waiting: deque[str]) -> os.stat_result:
        source = open_beneath(self.view, below or ".", _DIRECTORY, cross_mounts=False)
        target = previous = -1
        try:
            target = open_beneath(self.target, below or ".", _DIRECTORY, cross_mounts=False)
            previous = self._previous(below)
            for name in os.listdir(source):
                path = f"{below}/{name}" if below else name
                info = os.stat(name, dir_fd=source, follow_symlinks=False)
                if len(os.fsencode(path)) > _MOST_PATH:
                    self._note(path, "left out: too deep")
                elif stat.S_ISDIR(info.st_mode):
                    self._count()
                    os.mkdir(name, 0o700, dir_fd=target)
                    waiting.append(path)
                else:
                    self._one(path, name, info, (source, target, previous))
            return os.fstat(source)
        finally:
            for fd in (source, target, previous):
                if fd >= 0:
                    os.close(fd)

    def _previous(self, below: str) -> int:
        if self.previous is None:
            return -1
        try:
            return open_beneath(self.previous, below or ".", _DIRECTORY, cross_mounts=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # new, or it was something else before
                return -1
            raise

    def _one(self, path: str, name: str, info: os.stat_result, where: tuple[int, int, int]) -> None:
        source, target, previous = where
        if stat.S_ISREG(info.st_mode):
            self._count()
            if not self._link(name, info, target, previous):
                self._file(path, name, source, target)
        elif stat.S_ISLNK(info.st_mode):
            self._count()
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            os.chown(name, *self.owners.stored(info), dir_fd=target, follow_symlinks=False)
            os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        else:
            self._note(path, "left out: no file, directory or symlink")

    def _link(self, name: str, info: os.stat_result, target: int, previous: int) -> bool:
        """Take the earlier snapshot's file when the job did not touch it. A job can set any time but the ctime."""
        if previous < 0:
            return False
        try:
            old = os.stat(name, dir_fd=previous, follow_symlinks=False)
        except FileNotFoundError:
            return False
        facts = ((i.st_size, i.st_mtime_ns, i.st_ctime_ns, i.st_mode) for i in (info, old))
        if next(facts) != next(facts) or (old.st_uid, old.st_gid) != self.owners.stored(info):
            return False
        size = _data_size(info)
        self._grow(size)
        try:
            os.link(name, name, src_dir_fd=previous, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            self.bytes -= size
            return False
        return True

    def _file(self, path: str, name: str, source: int, target: int) -> None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        fd = open_beneath(source, name, flags, cross_mounts=False)
        try:
            info = os.fstat(fd)
            first = self.links.get((info.st_dev, info.st_ino))
            if first is not None:
                os.link(first, name, src_dir_fd=self.target, dst_dir_fd=target, follow_symlinks=False)
                return
            if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
                self._note(path, "kept without its setuid and setgid bits")
            self._grow(_data_size(info))
            new = os.open(name, _NEW, 0o600, dir_fd=target)
            try:
                _copy_data(fd, new, info.st_size)
                os.ftruncate(new, info.st_size)
                _finish(new, info, self.owners.stored(info))
            finally:
                os.close(new)
            if info.st_nlink > 1:
                self.links[info.st_dev, info.st_ino] = path
        finally:
            os.close(fd)

    def _count(self) -> None:
        self.entries += 1
        if self.entries > MOST_ENTRIES:
            raise TooLarge(f"it has more than {MOST_ENTRIES} entries")

    def _grow(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.most:
            raise TooLarge(f"it holds more than the {self.most / (1 << 20):.10g} MiB there is room for")

    def _note(self, path: str, what: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(f"{path}: {what}")
        else:
            self.unnamed += 1


def _data_size(info: os.stat_result) -> int:
    """Bytes without holes."""
    return min(info.st_size, info.st_blocks * 512)


def _finish(fd: int, info: os.stat_result, owner: tuple[int, int]) -> None:
    """Owner, mode, times, in the only order in which the later ones survive."""
    os.fchown(fd, *owner)
    os.fchmod(fd, stat.S_IMODE(info.st_mode) & _MODE)
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_data(source: int, target: int, size: int) -> None:
    """Copy the parts that hold data; where both lie on one file system that can, blocks are shared (reflink)."""
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            raise
        position = min(os.lseek(source, start, os.SEEK_HOLE), size)
        _copy_range(source, target, start, position)


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    in_kernel = True
    while start < end:
        length = min(end - start, _CHUNK)
        if in_kernel:
            try:
                count = os.copy_file_range(source, target, length, start, start)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
                in_kernel = False
                os.lseek(target, start, os.SEEK_SET)
                continue
        else:
            count = os.sendfile(target, source, start, length)
        if count == 0:
            return  # shrunk meanwhile
        start += count
