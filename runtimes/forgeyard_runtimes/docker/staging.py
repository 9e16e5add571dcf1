"""Mounts of one container as Docker can bind them.

Docker's binds know "ro" and no other flag: nosuid, nodev and noexec would be lost, and its remount for "ro" drops those
that a source has. A bind without "ro" keeps all flags of its source. So each source is mounted here first with exactly
the flags of the bundle, on a private tmpfs that one detach drops with all on it. The gate reads what came of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_host import mounts, syscalls
from forgeyard_host.failures import bad_plan, mount_failed
from forgeyard_runtimes.docker.skeleton import Skeleton
from forgeyard_runtimes.root_parts import FOLLOW_INSIDE, make_mount_points, open_root, parts_of, top_entries

HOSTNAME: Final = "/etc/hostname"
_ROOT: Final = "root"


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


def stage(spec: Mapping[str, Any], directory: Path, volumes: Sequence[str] = ()) -> Staged:
    """Mount every bind source of `spec`, and its root, below `directory`. Blocking; `unstage` undoes it.

    :param volumes: directories of the root that are bound once more at their own place, where Docker would put others.
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
        return _staged(spec, directory, volumes)
    except BaseException:
        unstage(directory)
        raise


def unstage(directory: Path) -> None:
    """Drop everything that `stage` mounted. Repeating it is no error.

    :raises OSError: the kernel refuses.
    """
    mounts.unmount_all(str(directory))


def _staged(spec: Mapping[str, Any], directory: Path, volumes: Sequence[str]) -> Staged:
    mnt = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        root = open_root(str(spec["root"]["path"]))
        try:
            make_mount_points(root, spec, (HOSTNAME,))
            binds = _stage_root(mnt, root, directory, spec)
            for number, path in enumerate(volumes):
                binds.append(_stage_volume(mnt, root, directory / f"volume-{number}", path, spec))
            for number, mount in enumerate(spec["mounts"]):
                if mount["type"] == "bind":
                    _stage_bind(mnt, f"bind-{number}", mount["source"], mount["options"])
                    binds.append(Bind(f"{directory}/bind-{number}", mount["destination"]))
            return Staged(tuple(binds), _skeleton(root, spec))
        finally:
            os.close(root)
    finally:
        os.close(mnt)


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
    binds = [Bind(f"{directory}/{_ROOT}/{name}", f"/{name}") for name in parts_of(root, spec)]
    if HOSTNAME not in covered and (host := _stage_hostname(mnt, root, directory)) is not None:
        binds.append(host)
    return binds


def _stage_hostname(mnt: int, root: int, directory: Path) -> Bind | None:
    """The root's own file, where Docker would put one of its own over it."""
    try:
        found = syscalls.openat2(root, HOSTNAME, os.O_PATH, FOLLOW_INSIDE)
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


def _stage_volume(mnt: int, root: int, place: Path, path: str, spec: Mapping[str, Any]) -> Bind:
    """A directory of the root's, found without leaving it: links in an image lead where their author wants."""
    try:
        found = syscalls.openat2(root, path, os.O_PATH | os.O_DIRECTORY, FOLLOW_INSIDE)
    except OSError as error:
        raise bad_plan("volume", f"the root has no directory {path}", details=str(error)) from error
    try:
        mounts.attach_bind(
            found,
            path,
            mnt,
            place.name,
            directory=True,
            read_only=bool(spec["root"].get("readonly")),
            executable=True,
            idmap=None,
        )
    finally:
        os.close(found)
    return Bind(str(place), path)


def _skeleton(root: int, spec: Mapping[str, Any]) -> Skeleton:
    """Links at the top, and a place for each bind there. Deeper mount points are in the root, or the runtime's work."""
    links: dict[str, str] = {}
    places: dict[str, bool] = {}
    for name, kind in top_entries(root):
        if kind == stat.S_IFLNK:
            links[name] = os.readlink(name, dir_fd=root)
        elif kind in (stat.S_IFDIR, stat.S_IFREG):
            places[name] = kind == stat.S_IFDIR
    for mount in spec["mounts"]:
        top, _, below = mount["destination"].strip("/").partition("/")
        if below:
            places.setdefault(top, True)
    return Skeleton.of(links, {name: kind for name, kind in places.items() if name not in links})
