"""Several layer trees seen as one, topmost first, as an overlay would show them. Read-only, and beneath its roots.

The trees hold whatever an image put there, so every component is opened on its own and links are read, not followed:
an absolute link means a path from the image's root, and ``..`` stops at that root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

DIR_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPAQUE: Final = "trusted.overlay.opaque"
MAX_LINKS: Final = 40
"""Symbolic links followed for one path, the kernel's own limit."""
_MAX_STEPS: Final = 1024
_Folder = tuple[int, int]  # a tree's place in the list, and a directory of it
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


def is_whiteout(status: os.stat_result) -> bool:
    """Whether a node says "nothing here, whatever lies below" (overlayfs: character device 0:0)."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(fd: int) -> bool:
    """Whether a directory hides those of lower layers."""
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


@dataclass(slots=True)
class Found:
    """One node of the merged view. `parent` is a directory's descriptor, the node's own: close it, or use ``with``."""

    parent: int
    name: str
    status: os.stat_result

    def link_target(self) -> str:
        """Where a symbolic link points."""
        return os.readlink(self.name, dir_fd=self.parent)

    def open(self) -> int:
        """Open a regular file or directory for reading; never follows, never blocks. The caller closes it."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self.name, flags, dir_fd=self.parent)

    def close(self) -> None:
        """Close the parent's descriptor."""
        os.close(self.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


IsOpaque = Callable[[int, int, Sequence[str]], bool]
"""Of a tree's place in the list, an open directory and its path in the tree: does it hide those of lower layers?"""


class MergedTree:
    """The view of `trees`, topmost first. Holds no descriptor of its own between calls.

    :param trees: paths, or descriptors that stay the caller's.
    :param opaque: who is asked about a directory's mark, for a process that may not read it.
    """

    def __init__(self, trees: Sequence[str] | Sequence[int], opaque: IsOpaque | None = None) -> None:
        self.trees: tuple[str | int, ...] = tuple(trees)
        self._opaque = opaque or (lambda _tree, fd, _parts: is_opaque(fd))

    def lookup(self, parts: Sequence[str]) -> Found | None:
        """The node at `parts`, with no link followed anywhere: a link in the middle means nothing is there."""
        if not self.trees:
            return None
        folders = _open_all(self.trees)
        try:
            for depth, name in enumerate(parts[:-1]):
                # One level is open at a time: deep trees in 500 layers must not use up the process's descriptors.
                above, folders = folders, self._enter(folders, name, parts[: depth + 1])
                _close_all(above)
            return _find(folders, parts[-1])
        finally:
            _close_all(folders)

    def _enter(self, folders: Sequence[_Folder], name: str, parts: Sequence[str]) -> list[_Folder]:
        """The directories that make up `name` in a merged directory, topmost first."""
        inner: list[_Folder] = []
        try:
            for tree, folder in folders:
                status = _status(folder, name)
                if status is None:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    break
                fd = os.open(name, DIR_FLAGS, dir_fd=folder)
                inner.append((tree, fd))
                # Below the last one there is nothing to hide.
                if tree != folders[-1][0] and self._opaque(tree, fd, parts):
                    break
        except BaseException:
            _close_all(inner)
            raise
        return inner

    def read_file(self, path: str, limit: int) -> bytes | None:
        """Up to `limit` bytes of a regular file, links followed inside the view; None where there is none."""
        found = self._resolve(path)
        if found is None:
            return None
        with found:
            if not stat.S_ISREG(found.status.st_mode):
                return None
            with os.fdopen(found.open(), "rb") as file:
                return file.read(limit)

    def _resolve(self, path: str) -> Found | None:
        pending = path.split("/")[::-1]
        place: list[str] = []
        links = steps = 0
        while pending:
            name = pending.pop()
            steps += 1
            if name == "..":
                place = place[:-1]
            if name in ("", ".", ".."):
                continue
            found = self.lookup([*place, name])
            if found is None or not stat.S_ISLNK(found.status.st_mode):
                place.append(name)
                if found is None or not pending:
                    return found
                found.close()
                continue
            with found:
                target = found.link_target()
            links += 1
            if links > MAX_LINKS or steps > _MAX_STEPS:
                return None
            place = [] if target.startswith("/") else place
            pending.extend(target.split("/")[::-1])
        return None


def _find(folders: Sequence[_Folder], name: str) -> Found | None:
    for _, folder in folders:
        status = _status(folder, name)
        if status is not None:
            return None if is_whiteout(status) else Found(os.dup(folder), name, status)
    return None


def _status(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def _open_all(trees: Sequence[str | int]) -> list[_Folder]:
    opened: list[_Folder] = []
    try:
        for number, tree in enumerate(trees):
            fd = os.open(tree, DIR_FLAGS) if isinstance(tree, str) else os.open(".", DIR_FLAGS, dir_fd=tree)
            opened.append((number, fd))
    except OSError:
        _close_all(opened)
        raise
    return opened


def _close_all(folders: Sequence[_Folder]) -> None:
    for _, fd in folders:
        os.close(fd)
