"""Copying a finished job's outputs out of its sandbox. Whatever lies there was arranged by the job."""

# ruff: noqa: PTH101, PTH102, PTH108, PTH211  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from forgeyard_host.failures import describe
from forgeyard_host.files import open_beneath

_MOST_NAMED: Final = 100
_CHUNK: Final = 1 << 30
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was copied. `bytes`: data, without holes. `skipped`: "path: why", the first hundred."""

    files: int
    directories: int
    symlinks: int
    bytes: int
    skipped: tuple[str, ...]


def copy_tree_beneath(source_dirfd: int, relative: str, destination: str) -> CopyReport:
    """Copy the file or directory `relative` below `source_dirfd` to the new path `destination`.

    Files, directories and relative symlinks that cannot lead out are copied; FIFOs, sockets, devices and other
    symlinks are skipped and named. The copies belong to the caller, with mode & 0o777; holes stay holes and hard
    links stay links. No symlink is followed and no mount is crossed.

    :raises OSError: when `relative` itself cannot be opened, or `destination` not be written (ENOSPC).
    """
    copy = _Copy(source_dirfd, relative, destination)
    info = _stat(source_dirfd, relative)
    if stat.S_ISDIR(info.st_mode):
        copy.directory_tree()
    else:
        copy.one(relative, destination, info, depth=0)
    return copy.report()


def _stat(dirfd: int, relative: str) -> os.stat_result:
    parent, _, name = relative.rstrip("/").rpartition("/")
    if not parent:
        return os.stat(name or ".", dir_fd=dirfd, follow_symlinks=False)
    parent_fd = open_beneath(dirfd, parent, os.O_PATH | os.O_DIRECTORY, cross_mounts=False)
    try:
        return os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    finally:
        os.close(parent_fd)


@dataclass(slots=True)
class _Copy:
    source: int
    relative: str
    destination: str
    files: int = 0
    directories: int = 0
    symlinks: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)
    unnamed: int = 0
    links: dict[tuple[int, int], str] = field(default_factory=dict)

    def report(self) -> CopyReport:
        more = (f"and {self.unnamed} more",) if self.unnamed else ()
        return CopyReport(self.files, self.directories, self.symlinks, self.bytes, (*self.skipped, *more))

    def directory_tree(self) -> None:
        """Breadth first, each directory opened anew from the top: depth costs no fds and no recursion."""
        waiting = deque([("", 0)])
        modes: list[tuple[str, int]] = []
        while waiting:
            below, depth = waiting.popleft()
            path = f"{self.relative}/{below}" if below else self.relative
            try:
                dirfd = open_beneath(self.source, path, os.O_RDONLY | os.O_DIRECTORY, cross_mounts=False)
            except OSError as error:
                if not below:
                    raise
                self._skip(path, describe(error))
                continue
            try:
                modes.append((f"{self.destination}/{below}", os.fstat(dirfd).st_mode))
                waiting.extend(self._directory(dirfd, below, depth))
            finally:
                os.close(dirfd)
        for path, mode in reversed(modes):
            # Always open to its owner, or the caller could not remove what it was given.
            os.chmod(path, (mode & 0o777) | stat.S_IRWXU)

    def _directory(self, dirfd: int, below: str, depth: int) -> list[tuple[str, int]]:
        os.mkdir(f"{self.destination}/{below}", 0o700)
        self.directories += 1
        deeper = []
        for name in sorted(os.listdir(dirfd)):
            inner = f"{below}/{name}" if below else name
            path = f"{self.relative}/{inner}"
            try:
                info = os.stat(name, dir_fd=dirfd, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    if len(os.fsencode(f"{self.destination}/{inner}")) > 4000:  # PATH_MAX less some room
                        self._skip(path, "too deep")
                    else:
                        deeper.append((inner, depth + 1))
                else:
                    self.one(path, f"{self.destination}/{inner}", info, depth, dirfd=dirfd, name=name)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._skip(path, describe(error))
        return deeper

    def one(
        self,
        path: str,
        destination: str,
        info: os.stat_result,
        depth: int,
        *,
        dirfd: int | None = None,
        name: str | None = None,
    ) -> None:
        where, what = (self.source, path) if dirfd is None or name is None else (dirfd, name)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFREG:
            self._file(where, what, path, destination)
        elif kind == stat.S_IFLNK:
            self._symlink(where, what, path, destination, depth)
        else:
            self._skip(path, _KINDS.get(kind, "neither file nor directory"))

    def _file(self, dirfd: int, name: str, path: str, destination: str) -> None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
        source = open_beneath(dirfd, name, flags, cross_mounts=False)
        try:
            info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):
                self._skip(path, "changed while it was copied")
                return
            first = self.links.get((info.st_dev, info.st_ino))
            if first is not None:
                # Copied once only: a thousand links to a large file must not fill the disk outside.
                os.link(first, destination, follow_symlinks=False)
            else:
                self.bytes += _copy_file(source, info, destination)
                if info.st_nlink > 1:
                    self.links[info.st_dev, info.st_ino] = destination
            self.files += 1
        finally:
            os.close(source)

    def _symlink(self, dirfd: int, name: str, path: str, destination: str, depth: int) -> None:
        target = os.readlink(name, dir_fd=dirfd) if "/" not in name else ""
        if not stays_beneath(target, depth):
            self._skip(path, "a symlink that leads out")
            return
        os.symlink(target, destination)
        self.symlinks += 1

    def _skip(self, path: str, why: str) -> None:
        if len(self.skipped) < _MOST_NAMED:
            self.skipped.append(f"{path}: {why}")
        else:
            self.unnamed += 1


def stays_beneath(target: str, depth: int) -> bool:
    """Whether a symlink `depth` directories below the top can only lead to something below the top.

    ".." is taken only in front, where its meaning is certain: after a name it could pass through another symlink.
    """
    if not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return ups <= depth and ".." not in parts[ups:]


def _copy_file(source: int, info: os.stat_result, destination: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(destination, flags, 0o600)
    try:
        copied = _copy_data(source, target, info.st_size)
        os.ftruncate(target, info.st_size)
        os.fchmod(target, info.st_mode & 0o777)
    except OSError:
        os.unlink(destination)  # half a file is worse than none
        raise
    finally:
        os.close(target)
    return copied


def _copy_data(source: int, target: int, size: int) -> int:
    """Copy the parts that hold data; returns their length."""
    copied = position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                break
            raise
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        _copy_range(source, target, start, end)
        copied += end - start
        position = end
    return copied


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    os.lseek(target, start, os.SEEK_SET)
    while start < end:
        count = os.sendfile(target, source, start, min(end - start, _CHUNK))
        if count == 0:
            return  # shrunk meanwhile
        start += count
