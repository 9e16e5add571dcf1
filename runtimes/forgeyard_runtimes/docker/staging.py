"""Mounts of one container as Docker can bind them.

Docker's binds know "ro" and no other flag: nosuid, nodev and noexec would be lost, and its remount for "ro" drops those
that a source has. A bind without "ro" keeps all flags of its source. So each source is mounted here first with exactly
the flags of the bundle, on a private tmpfs that one detach drops with all on it. The gate reads what came of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_host import mounts, syscalls
from forgeyard_host.failures import bad_plan, mount_failed
from forgeyard_host.operations import RootDirectory
from forgeyard_host.rootdirs import make_in_root
from forgeyard_runtimes.docker.skeleton import Skeleton

HOSTNAME: Final = "/etc/hostname"
_KERNEL: Final = ("dev", "proc", "sys")
_ROOT: Final = "root"
_FOLLOW_INSIDE: Final = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


@dataclass(frozen=True, slots=True)
class Bind:
    """A staged source, and where the container shows it.

    :param single: a file of the root's, bound beside its directory: read-only and not executable.
    """

    source: str
    destination: str
    single: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """All binds of a container, parents first, and the skeleton that its own root is."""

    binds: tuple[Bind, ...]
    skeleton: Skeleton


def stage(spec: Mapping[str, Any], directory: Path) -> Staged:
    """Mount every bind source of `spec`, and its root, below `directory`. Blocking; `unstage` undoes it.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN or MOUNT_FAILED; nothing is mounted then.
    """
    try:
        directory.mkdir(mode=0o711, exist_ok=True)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("forgeyard", str(directory), "tmpfs", flags, "mode=0711,size=64k")
        syscalls.mount("none", str(directory), "none", syscalls.MS_PRIVATE)
    except OSError as error:
        raise mount_failed("mount a tmpfs for Docker's sources", error) from error
    try:
        return _staged(spec, directory)
    except BaseException:
        unstage(directory)
        raise


def unstage(directory: Path) -> None:
    """Drop everything that `stage` mounted. Repeating it is no error.

    :raises OSError: the kernel refuses.
    """
    mounts.unmount_all(str(directory))


def _staged(spec: Mapping[str, Any], directory: Path) -> Staged:
    mnt = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        root = _open_root(str(spec["root"]["path"]))
        try:
            _make_mount_points(root, spec)
            binds = _stage_root(mnt, root, directory, spec)
            for number, mount in enumerate(spec["mounts"]):
                if mount["type"] == "bind":
                    _stage_bind(mnt, f"bind-{number}", mount["source"], mount["options"])
                    binds.append(Bind(f"{directory}/bind-{number}", mount["destination"]))
            return Staged(tuple(binds), _skeleton(root, spec))
        finally:
            os.close(root)
    finally:
        os.close(mnt)


def _open_root(path: str) -> int:
    root, _ = mounts.open_source(path, directory=True)
    return root


def _stage_bind(mnt: int, name: str, path: str, options: Sequence[str]) -> None:
    source, info = mounts.open_source(path)
    try:
        mounts.attach_bind(
            source,
            path,
            mnt,
            name,
            directory=stat.S_ISDIR(info.st_mode),
            read_only="ro" in options,
            executable="noexec" not in options,
            idmap=None,
        )
    finally:
        os.close(source)


def _stage_root(mnt: int, root: int, directory: Path, spec: Mapping[str, Any]) -> list[Bind]:
    """The root once, with its flags; each of its top entries is then bound from there."""
    mounts.attach_bind(
        root,
        spec["root"]["path"],
        mnt,
        _ROOT,
        directory=True,
        read_only=bool(spec["root"].get("readonly")),
        executable=True,
        idmap=None,
    )
    covered = {mount["destination"] for mount in spec["mounts"]}
    binds = [
        Bind(f"{directory}/{_ROOT}/{name}", f"/{name}")
        for name, kind in _top_entries(root)
        if kind in (stat.S_IFDIR, stat.S_IFREG) and name not in _KERNEL and f"/{name}" not in covered
    ]
    if HOSTNAME not in covered and (host := _stage_hostname(mnt, root, directory)) is not None:
        binds.append(host)
    return binds


def _stage_hostname(mnt: int, root: int, directory: Path) -> Bind | None:
    """The root's own file, where Docker would put one of its own over it."""
    try:
        found = syscalls.openat2(root, HOSTNAME, os.O_PATH, _FOLLOW_INSIDE)
    except OSError:
        return None  # Docker makes it where the root has none, or has it lead nowhere
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return None
        mounts.attach_bind(
            found, HOSTNAME, mnt, "hostname", directory=False, read_only=True, executable=False, idmap=None
        )
    finally:
        os.close(found)
    return Bind(f"{directory}/hostname", HOSTNAME, single=True)


def _top_entries(root: int) -> list[tuple[str, int]]:
    entries = []
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        for name in sorted(os.listdir(listing)):  # noqa: PTH208  of a descriptor
            mode = os.stat(name, dir_fd=listing, follow_symlinks=False).st_mode
            entries.append((name, stat.S_IFMT(mode)))
    finally:
        os.close(listing)
    return entries


def _skeleton(root: int, spec: Mapping[str, Any]) -> Skeleton:
    """Links at the top, and a place for each bind there. Deeper mount points are in the root, or the runtime's work."""
    links: dict[str, str] = {}
    places: dict[str, bool] = {}
    for name, kind in _top_entries(root):
        if kind == stat.S_IFLNK:
            links[name] = os.readlink(name, dir_fd=root)
        elif kind in (stat.S_IFDIR, stat.S_IFREG):
            places[name] = kind == stat.S_IFDIR
    for mount in spec["mounts"]:
        top, _, below = mount["destination"].strip("/").partition("/")
        if below:
            places.setdefault(top, True)
    return Skeleton.of(links, {name: kind for name, kind in places.items() if name not in links})


def _make_mount_points(root: int, spec: Mapping[str, Any]) -> None:
    """What a runtime would make in the root before that becomes read-only; bound read-only it can't."""
    if not spec["root"].get("readonly"):
        return
    tops = {name for name, kind in _top_entries(root) if kind == stat.S_IFDIR and name not in _KERNEL}
    others = tuple(f"{mount['destination']}/" for mount in spec["mounts"])
    for mount in (*spec["mounts"], {"destination": HOSTNAME, "type": "file"}):
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
        os.close(syscalls.openat2(root, path, os.O_PATH, _FOLLOW_INSIDE))
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
