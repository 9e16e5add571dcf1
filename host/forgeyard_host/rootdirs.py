"""Directories that a root file system has to have, such as an image's WORKDIR and VOLUMEs.

The tree is an image's, so every link in it is resolved inside it by the kernel.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from forgeyard_host.failures import bad_plan, describe
from forgeyard_host.operations import RootDirectory
from forgeyard_host.syscalls import RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, openat2
from forgeyard_model.errors import SandboxError

_FLAGS: Final = os.O_PATH | os.O_DIRECTORY
_MODE: Final = 0o755
_MOST_LINKS: Final = 40
"""Links followed for one path, as many as the kernel follows."""
_IMAGE_FAULTS: Final = frozenset({errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV})


def make_in_root(root: int, wanted: RootDirectory, owner: tuple[int, int]) -> int:
    """An O_PATH fd of `wanted` below `root`; what is missing of it is made, 0755 and of `owner`. The caller closes it.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN, when something else than a directory is there.
    :raises OSError: when the host can't make it.
    """
    try:
        return _made(root, wanted.path, owner)
    except OSError as error:
        if error.errno in _IMAGE_FAULTS:
            raise _not_a_directory(wanted, error) from error
        raise


def _made(root: int, path: str, owner: tuple[int, int]) -> int:
    try:
        return _open(root, path)
    except FileNotFoundError:
        pass
    done: list[str] = []
    left = _parts(path)
    links = 0
    while left:
        name = left.pop(0)
        parent = _open(root, "/".join(done))
        try:
            if _is_there(root, [*done, name]) or _make(parent, name, owner):
                done.append(name)
            else:
                # A link whose target is missing: that is what gets made.
                links += 1
                target = os.readlink(name, dir_fd=parent)
                done = [] if target.startswith("/") else done
                left = _parts(target) + left
        finally:
            os.close(parent)
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return _open(root, "/".join(done))


def _open(root: int, path: str) -> int:
    return openat2(root, path or "/", _FLAGS, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)


def _is_there(root: int, parts: list[str]) -> bool:
    try:
        os.close(_open(root, "/".join(parts)))
    except FileNotFoundError:
        return False
    return True


def _make(parent: int, name: str, owner: tuple[int, int]) -> bool:
    """False when the name is taken."""
    here = f"/proc/self/fd/{parent}"  # an O_PATH fd is no dir_fd for chmod(2)
    try:
        os.mkdir(f"{here}/{name}", _MODE)  # noqa: PTH102  the parent is a descriptor
    except FileExistsError:
        return False
    os.chown(f"{here}/{name}", *owner, follow_symlinks=False)
    os.chmod(f"{here}/{name}", _MODE)  # noqa: PTH101  whatever the umask is
    return True


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _not_a_directory(wanted: RootDirectory, error: OSError) -> SandboxError:
    return bad_plan(
        "not_a_directory",
        f"{wanted.field} {wanted.path!r} can't be a directory of this image",
        details=describe(error),
        resolution="rebuild the image, or name another directory",
    )
