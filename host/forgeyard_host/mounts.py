"""Mounts of one attempt: detached, given their attributes, and only then attached below its `mnt`."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from forgeyard_host import syscalls
from forgeyard_host.failures import bad_plan, describe, mount_failed
from forgeyard_host.files import open_canonical
from forgeyard_host.idmaps import UserNamespace
from forgeyard_model.errors import SandboxError, SandboxErrorKind

_SAFE: Final = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_MOST_LAYERS: Final = 500
_OVERLAY_OPTIONS: Final = (
    # A job's rename(2) of a directory from a lower layer works as on any disk; EXDEV breaks package managers.
    ("redirect_dir", "on"),
    ("metacopy", "off"),
    ("index", "off"),
)


def open_source(path: str, *, directory: bool | None = None) -> tuple[int, os.stat_result]:
    """An O_PATH fd of a mount source, and its facts. The mount is made from the fd, so a later swap changes nothing.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN; reasons symlink_in_path, source_missing, wrong_kind_of_source.
    """
    if not path.startswith("/") or ".." in path.split("/"):
        raise bad_plan("relative_path", f"{path!r} is not an absolute path without '..'")
    if "\0" in path:
        # A C string ends there: the kernel would be shown another path than the one that was checked.
        raise bad_plan("nul_in_path", f"{path!r} holds a NUL")
    try:
        fd = open_canonical(path, os.O_PATH)
    except UnicodeEncodeError as error:
        raise bad_plan("source_not_usable", f"{path!r} stands for no bytes") from error
    except OSError as error:
        raise _cannot_open(path, error) from error
    info = os.fstat(fd)
    if directory is not None and stat.S_ISDIR(info.st_mode) is not directory:
        os.close(fd)
        wanted = "a directory" if directory else "no directory"
        raise bad_plan("wrong_kind_of_source", f"{path} has to be {wanted}")
    return fd, info


def _cannot_open(path: str, error: OSError) -> SandboxError:
    if error.errno == errno.ELOOP:
        return bad_plan(
            "symlink_in_path",
            f"a part of {path} is a symlink",
            resolution="name the real path, and keep it from changing while the job is set up",
        )
    reason = "source_missing" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "source_not_usable"
    return bad_plan(reason, f"cannot open {path}", details=describe(error))


def mounts_below(paths: Iterable[str]) -> tuple[str, ...]:
    """Mount points below one of `paths`, which a bind of that path does not bring along."""
    tops = tuple(path.rstrip("/") + "/" for path in paths)
    if not tops:
        return ()
    text = Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    points = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split(" ", 5)[4]) for line in text.splitlines())
    return tuple(sorted({point for point in points if point.startswith(tops)}))


_OCTAL: Final = re.compile(r"\\([0-7]{3})")
"""How the kernel writes a blank, a tab, a newline and a backslash in a path."""

FILES: Final = "files"
"""Below the tmpfs: what the runtime and the shim need on disk for as long as the attempt lives."""
_FILE_DIRECTORIES: Final = (("ctl", 0o711), ("bundle", 0o700), ("runtime", 0o700))


def make_mount_root(path: str, size: int) -> None:
    """A small private tmpfs of `size` bytes at `path` that holds the mountpoints and the attempt's own small files.

    Private, so that nothing spreads to other mount namespaces; one detach of it drops all that is below. Executable,
    since the init of the job is one of those files.
    """
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    try:
        syscalls.mount("forgeyard", path, "tmpfs", flags, f"mode=0711,size={size},nr_inodes=65536")
        syscalls.mount("none", path, "none", syscalls.MS_PRIVATE)
        # The place for files comes first, so that no slot can have its name.
        for name, mode in ((FILES, 0o711), *((f"{FILES}/{name}", mode) for name, mode in _FILE_DIRECTORIES)):
            os.mkdir(f"{path}/{name}", mode)  # noqa: PTH102  many times per job
            os.chmod(f"{path}/{name}", mode)  # noqa: PTH101  whatever the umask is
    except OSError as error:
        raise mount_failed("mount a tmpfs for the mountpoints", error) from error


def attach_bind(
    source: int,
    shown: str,
    mnt: int,
    name: str,
    *,
    directory: bool,
    read_only: bool,
    executable: bool,
    idmap: UserNamespace | None,
) -> bool:
    """Bind `source` at `name` below `mnt`. Returns False when its filesystem cannot be ID-mapped.

    It is then mounted without a map, and the caller says so.

    :raises SandboxError: MOUNT_FAILED.
    """
    attributes = _SAFE
    attributes |= syscalls.MOUNT_ATTR_RDONLY if read_only else 0
    attributes |= 0 if executable else syscalls.MOUNT_ATTR_NOEXEC
    try:
        tree = syscalls.clone_tree(source, shown)
        try:
            mapped = _set_attributes(tree, attributes, idmap, shown)
            _make_mountpoint(mnt, name, directory=directory)
            syscalls.move_mount(tree, mnt, name)
        finally:
            os.close(tree)
    except OSError as error:
        raise mount_failed(f"bind {shown}", error) from error
    return mapped


def _set_attributes(tree: int, attributes: int, idmap: UserNamespace | None, shown: str) -> bool:
    if idmap is None:
        syscalls.mount_setattr(tree, "", attr_set=attributes, shown=shown)
        return True
    mapped = attributes | syscalls.MOUNT_ATTR_IDMAP
    try:
        syscalls.mount_setattr(tree, "", attr_set=mapped, userns_fd=idmap.fd, shown=shown)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what a filesystem without ID maps answers
            raise
        syscalls.mount_setattr(tree, "", attr_set=attributes, shown=shown)
        return False
    return True


def _make_mountpoint(mnt: int, name: str, *, directory: bool) -> None:
    if directory:
        os.mkdir(name, 0o755, dir_fd=mnt)
    else:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=mnt))


def attach_overlay(mnt: int, name: str, lowers: list[str], scratch: int, upper: str) -> None:
    """Mount an overlay at `name` below `mnt`.

    :param lowers: names in `mnt`, topmost first.
    :param scratch: fd of the directory in which `upper` holds the directories `upper` and `work`.
    :raises SandboxError: MOUNT_FAILED; reason too_many_layers when the kernel cannot take as many.
    """
    try:
        os.mkdir(name, 0o755, dir_fd=mnt)
        try:
            _overlay_by_steps(mnt, name, lowers, f"/proc/self/fd/{scratch}/{upper}")
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            # Before Linux 6.5 there is no `lowerdir+`, and all layers have to fit in one string.
            overlay_in_one_string(mnt, name, lowers, f"/proc/self/fd/{scratch}/{upper}")
    except OSError as error:
        if error.errno == errno.E2BIG or len(lowers) > _MOST_LAYERS:
            raise SandboxError(
                SandboxErrorKind.MOUNT_FAILED,
                "too_many_layers",
                f"{len(lowers)} layers are more than this kernel can stack",
                details=describe(error),
                resolution=f"use an image with fewer layers, or Linux 6.5 or newer ({_MOST_LAYERS} layers)",
            ) from error
        raise mount_failed(f"mount an overlay of {len(lowers)} layers", error) from error


def _overlay_by_steps(mnt: int, name: str, lowers: list[str], scratch: str) -> None:
    # Paths through our own fds are short (the kernel takes 255 bytes) and hold no ':' ',' or '\\' to be escaped.
    context = syscalls.fsopen("overlay")
    try:
        syscalls.fsconfig_string(context, "source", "forgeyard")
        for lower in lowers:
            syscalls.fsconfig_string(context, "lowerdir+", f"/proc/self/fd/{mnt}/{lower}")
        syscalls.fsconfig_string(context, "upperdir", f"{scratch}/upper")
        syscalls.fsconfig_string(context, "workdir", f"{scratch}/work")
        # The upper layer ends with the attempt: without this an fsync in the job and our unmount write it to disk.
        syscalls.fsconfig_flag(context, "volatile")
        for key, value in _OVERLAY_OPTIONS:
            syscalls.fsconfig_string(context, key, value)
        tree = syscalls.fsmount(context, _SAFE, name)
        try:
            syscalls.move_mount(tree, mnt, name)
        finally:
            os.close(tree)
    finally:
        os.close(context)


def overlay_in_one_string(mnt: int, name: str, lowers: list[str], scratch: str) -> None:
    """The way of kernels before 6.5. Raises OSError E2BIG when the options exceed a page."""
    here = f"/proc/self/fd/{mnt}"
    layers = ":".join(f"{here}/{lower}" for lower in lowers)
    more = "".join(f",{key}={value}" for key, value in _OVERLAY_OPTIONS)
    options = f"lowerdir={layers},upperdir={scratch}/upper,workdir={scratch}/work,volatile{more}"
    syscalls.mount("forgeyard", f"{here}/{name}", "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)


def unmount_all(path: str) -> None:
    """Drop every mount stacked at `path`, with what is below. Nothing mounted, or nothing there, is fine.

    :raises OSError: for anything else.
    """
    for _ in range(16):
        try:
            syscalls.umount(path)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return
            raise
