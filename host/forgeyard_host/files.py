"""Opening and removing files that a hostile job may have arranged."""

# ruff: noqa: PTH108  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Final, Protocol

from forgeyard_host.syscalls import (
    AT_FDCWD,
    RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    RESOLVE_NO_XDEV,
    openat2,
)

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_LINKS: Final = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_DEPTH: Final = 64
"""Directories held open at once while removing; deeper ones are first moved up."""


def open_beneath(dirfd: int, path: str, flags: int, mode: int = 0, *, cross_mounts: bool = True) -> int:
    """Open `path` below `dirfd`; no symlink in it is followed and nothing leads out of `dirfd`.

    :raises OSError: ELOOP for a symlink, EXDEV for a way out (or into another mount, unless `cross_mounts`).
    """
    resolve = RESOLVE_BENEATH | _NO_LINKS | (0 if cross_mounts else RESOLVE_NO_XDEV)
    return openat2(dirfd, path, flags, resolve, mode)


def open_inside(directory: str, path: str) -> int:
    """An O_PATH fd of `path` below `directory`; links are followed as long as they stay inside it.

    :raises OSError: EXDEV for a way out of `directory`.
    """
    top = openat2(AT_FDCWD, directory, os.O_PATH | os.O_DIRECTORY, _NO_LINKS)
    try:
        return openat2(top, path, os.O_PATH, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    finally:
        os.close(top)


def open_canonical(path: str, flags: int) -> int:
    """Open an absolute path in which no component is a symlink.

    :raises OSError: ELOOP when one is.
    """
    return openat2(AT_FDCWD, path, flags, _NO_LINKS)


def remove_tree(path: str) -> None:
    """Remove `path` and all below it: no symlink followed, no mount crossed, any depth, any mode.

    Nothing there is fine. `path` itself comes from us; what lies below may be hostile.

    :raises ExceptionGroup: of OSErrors, after everything that could be removed is gone.
    """
    try:
        top = os.open(path, _DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    try:
        removal = _Removal(top)
        removal.empty(top, 0)
    finally:
        os.close(top)
    if not removal.errors:
        removal.attempt(os.rmdir, path, None)
    if removal.errors:
        raise ExceptionGroup(f"cannot remove {path} whole", removal.errors)


def empty_directory(dirfd: int) -> list[OSError]:
    """Remove what `dirfd` holds, as `remove_tree` does; returns what could not be removed."""
    removal = _Removal(dirfd)
    removal.empty(dirfd, 0)
    return removal.errors


class _Remover(Protocol):
    def __call__(self, path: str, *, dir_fd: int | None) -> None: ...


@dataclass(slots=True)
class _Removal:
    top: int
    errors: list[OSError] = field(default_factory=list)
    moved: int = 0

    def empty(self, dirfd: int, depth: int) -> None:
        """Remove what `dirfd` holds. Recursion ends at _DEPTH, where directories move up to the top."""
        again = True
        while again:
            # The top is listed again while directories arrive in it from below.
            before = self.moved
            with os.scandir(dirfd) as entries:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, is_directory in names:
                if is_directory:
                    self._remove_directory(dirfd, name, depth)
                else:
                    self.attempt(os.unlink, name, dirfd)
            again = depth == 0 and self.moved > before

    def attempt(self, act: _Remover, name: str, dirfd: int | None) -> None:
        try:
            act(name, dir_fd=dirfd)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._keep(error, name)

    def _remove_directory(self, parent: int, name: str, depth: int) -> None:
        if depth == _DEPTH:
            self._move_up(parent, name)
            return
        if self._was_empty(parent, name):
            return
        try:
            dirfd = self._open(parent, name)
        except OSError as error:
            self._keep(error, name)
            return
        try:
            self.empty(dirfd, depth + 1)
        finally:
            os.close(dirfd)
        self.attempt(os.rmdir, name, parent)

    @staticmethod
    def _was_empty(parent: int, name: str) -> bool:
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError:
            return False  # not empty, most likely; the second rmdir reports what else it may be
        return True

    def _open(self, parent: int, name: str) -> int:
        try:
            return open_beneath(parent, name, _DIRECTORY, cross_mounts=False)
        except PermissionError:
            # Only without CAP_DAC_OVERRIDE; a directory of ours that was locked with chmod 000.
            os.chmod(name, stat.S_IRWXU, dir_fd=parent, follow_symlinks=True)
            return open_beneath(parent, name, _DIRECTORY, cross_mounts=False)

    def _move_up(self, parent: int, name: str) -> None:
        self.moved += 1
        try:
            os.rename(name, f".forgeyard-removing-{self.moved}-{os.getpid()}", src_dir_fd=parent, dst_dir_fd=self.top)
        except OSError as error:
            self._keep(error, name)

    def _keep(self, error: OSError, name: str) -> None:
        if len(self.errors) < 20:
            self.errors.append(OSError(error.errno, error.strerror or "", name))
