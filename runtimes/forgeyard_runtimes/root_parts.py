"""The parts of our root, for engines that take no root of ours: each entry at its top is bound on one of theirs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forgeyard_host import mounts, syscalls
from forgeyard_host.failures import bad_plan, mount_failed
from forgeyard_host.operations import RootDirectory
from forgeyard_host.rootdirs import make_in_root

KERNEL: Final = ("dev", "proc", "sys")
"""Names at the top of every sandbox that are the kernel's, whatever a root has there."""
FOLLOW_INSIDE: Final = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
"""Links lead where they would lead inside."""


def open_root(path: str) -> int:
    """A descriptor of a root.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN or MOUNT_FAILED.
    """
    root, _ = mounts.open_source(path, directory=True)
    return root


def parts_of(root: int, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Names at the top of a root that have to be bound: not links, and nothing that `spec` mounts over itself."""
    covered = {mount["destination"] for mount in spec["mounts"]}
    return tuple(
        name
        for name, kind in top_entries(root)
        if kind in (stat.S_IFDIR, stat.S_IFREG) and name not in KERNEL and f"/{name}" not in covered
    )


def top_entries(root: int) -> list[tuple[str, int]]:
    """Names at the top of a root with their kinds (S_IFDIR and the like), in order."""
    entries = []
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        for name in sorted(os.listdir(listing)):  # noqa: PTH208  of a descriptor
            mode = os.stat(name, dir_fd=listing, follow_symlinks=False).st_mode
            entries.append((name, stat.S_IFMT(mode)))
    finally:
        os.close(listing)
    return entries


def make_mount_points(root: int, spec: Mapping[str, Any], files: Sequence[str]) -> None:
    """What a runtime would make in the root before that becomes read-only; bound read-only it can't.

    :param files: that the engine mounts of its own accord.
    :raises SandboxError: INVALID_FILESYSTEM_PLAN or MOUNT_FAILED.
    """
    if not spec["root"].get("readonly"):
        return
    tops = {name for name, kind in top_entries(root) if kind == stat.S_IFDIR and name not in KERNEL}
    others = tuple(f"{mount['destination']}/" for mount in spec["mounts"])
    for mount in (*spec["mounts"], *({"destination": path, "type": "file"} for path in files)):
        path = mount["destination"]
        in_root = path.split("/")[1] in tops and path.count("/") > 1 and not path.startswith(others)
        if in_root:
            _make_mount_point(root, path, directory=_is_directory(mount))


def _is_directory(mount: Mapping[str, Any]) -> bool:
    if mount["type"] == "file":
        return False
    return mount["type"] != "bind" or Path(mount["source"]).is_dir()


def _make_mount_point(root: int, path: str, *, directory: bool) -> None:
    try:
        os.close(syscalls.openat2(root, path, os.O_PATH, FOLLOW_INSIDE))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise bad_plan("mount_point", f"{path} can't be a mount point of this root", details=str(error)) from error
    else:
        return
    parent, _, name = path.rpartition("/")
    try:
        made = make_in_root(root, RootDirectory(path if directory else parent, "a mount point"), (0, 0))
        try:
            if not directory:
                here = f"/proc/self/fd/{made}/{name}"  # an O_PATH fd is no dir_fd for O_CREAT
                os.close(os.open(here, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_WRONLY, 0o644))
        finally:
            os.close(made)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise bad_plan(
                "mount_point", f"the read-only root has no {path}, and none can be made", details=str(error)
            ) from error
        raise mount_failed(f"make the mount point {path}", error) from error
