"""Which mounts and which files does this host give? Each kind is made on the state directory's own filesystem.

Every mount is a detached one, known only by a descriptor: even a killed prober leaves no mount behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from forgeyard_host import disks, syscalls
from forgeyard_host.failures import describe
from forgeyard_host.idmaps import IdMap, NamespaceCache
from forgeyard_model.capabilities import Feature, Probe
from forgeyard_model.errors import SandboxError

_SHIFT: Final = 2_000_000_000
_DISK: Final = 4 << 20
_TMPFS: Final = 64 << 10
_FICLONE: Final = 0x40049409
_SAFE: Final = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MOUNTS_CURE: Final = "the executor needs CAP_SYS_ADMIN and Linux 5.12 or newer"


def file_probes(directory: str) -> tuple[Probe, ...]:
    """Make each kind of mount and file in `directory`: an empty one of the caller's, on the filesystem to be judged."""
    return tuple(probe(directory) for probe in (*_PROBES, idmap_probe))


def read_only_bind(directory: str) -> str:
    """What a write through a read-only bind met."""
    with _bound(directory, syscalls.MOUNT_ATTR_RDONLY) as tree:
        return _refusal(lambda: os.close(os.open("written", _NEW, 0o600, dir_fd=tree)), errno.EROFS)


def tmpfs(directory: str) -> str:
    """What a tmpfs of 64 KiB did with twice as much. `directory` plays no part in it."""
    del directory
    with _made("tmpfs", {"size": str(_TMPFS)}) as tree:
        return _overfill(tree, 2 * _TMPFS)


def overlay(directory: str) -> str:
    """Whether what is written to an overlay goes to its upper layer, and the lower one stays as it was."""
    for name in ("lower", "upper", "work"):
        os.mkdir(f"{directory}/{name}")  # noqa: PTH102  descriptors and plain paths throughout
    _write(f"{directory}/lower/file", b"below")
    layers = {f"{name}dir": f"{directory}/{name}" for name in ("lower", "upper", "work")}
    # As jobs have it: without it, letting go of the overlay writes the whole filesystem to disk.
    with _made("overlay", layers | {"volatile": ""}) as tree:
        fd = os.open("file", os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, dir_fd=tree)
        os.write(fd, b"above")
        os.close(fd)
    if (_read(f"{directory}/lower/file"), _read(f"{directory}/upper/file")) != (b"below", b"above"):
        raise OSError(errno.EIO, "the lower layer was changed")
    return "a write went to the upper layer only"


def disk_limit(directory: str) -> str:
    """What a disk of 4 MiB in a file, as jobs with a disk limit get one, did with more than that."""
    with disks.DiskMaker().detached(f"{directory}/disk.img", _DISK) as tree:
        return _overfill(tree, 2 * _DISK)


def reflink(directory: str) -> str:
    """Whether a file can share its blocks with another one."""
    _write(f"{directory}/original", b"data" * 1024)
    with ExitStack() as stack:
        source = _opened(stack, f"{directory}/original", os.O_RDONLY)
        target = _opened(stack, f"{directory}/clone", _NEW)
        fcntl.ioctl(target, _FICLONE, source)
    if _read(f"{directory}/clone") != b"data" * 1024:
        raise OSError(errno.EIO, "the clone differs from its original")
    return "a file was cloned without copying it"


def quota(directory: str) -> str:
    """Whether the filesystem accounts for projects. Jobs do not use that: their disks are bounded in another way."""
    fd = os.open(directory, _DIRECTORY)
    try:
        syscalls.project_quota_format(fd, "")
    finally:
        os.close(fd)
    return "project quota is on (jobs use disks of their own instead)"


def idmap_probe(directory: str) -> Probe:
    """ID-maps a bind of `directory`, and looks at who owns it then."""
    namespaces = NamespaceCache()
    extent = ((0, _SHIFT, 65536),)
    try:
        userns = namespaces.get(IdMap(extent, extent))
        with _bound(directory, syscalls.MOUNT_ATTR_IDMAP, userns.fd) as tree:
            owner, real = os.fstat(tree).st_uid, Path(directory).stat().st_uid
    except (OSError, SandboxError) as error:
        cure = "use Linux 5.12 or newer and a filesystem with ID maps (ext4, xfs, btrfs), not NFS, for the state"
        return Probe(Feature.IDMAPPED_MOUNT, works=False, details=_shown(error), cure=cure)
    works = owner == _SHIFT + real
    return Probe(Feature.IDMAPPED_MOUNT, works, "mount_setattr(2)", f"uid {real} appeared as {owner}")


@contextmanager
def _bound(directory: str, attributes: int, userns: int = 0) -> Iterator[int]:
    """A real fd of a detached bind of `directory`."""
    with ExitStack() as stack:
        source = _opened(stack, directory, _DIRECTORY)
        tree = syscalls.clone_tree(source, directory)
        stack.callback(os.close, tree)
        syscalls.mount_setattr(tree, "", attr_set=attributes | _SAFE, userns_fd=userns, shown=directory)
        yield _opened(stack, ".", _DIRECTORY, tree)


@contextmanager
def _made(filesystem: str, options: dict[str, str]) -> Iterator[int]:
    """A real fd of a new, detached filesystem. An option without a value is a flag."""
    with ExitStack() as stack:
        context = syscalls.fsopen(filesystem)
        stack.callback(os.close, context)
        syscalls.fsconfig_string(context, "source", "forgeyard")
        for key, value in options.items():
            if value:
                syscalls.fsconfig_string(context, key, value)
            else:
                syscalls.fsconfig_flag(context, key)
        tree = syscalls.fsmount(context, _SAFE, filesystem)
        stack.callback(os.close, tree)
        yield _opened(stack, ".", _DIRECTORY, tree)


def _opened(stack: ExitStack, path: str, flags: int, dir_fd: int | None = None) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    stack.callback(os.close, fd)
    return fd


def _overfill(tree: int, size: int) -> str:
    fd = os.open("filler", _NEW, 0o600, dir_fd=tree)
    try:
        return _refusal(lambda: _write_all(fd, size), errno.ENOSPC)
    finally:
        os.close(fd)


def _write_all(fd: int, size: int) -> None:
    block = bytes(1 << 16)
    while size > 0:
        size -= os.write(fd, block)


def _refusal(act: Callable[[], None], expected: int) -> str:
    """`act` has to fail with `expected`; what it met."""
    try:
        act()
    except OSError as error:
        if error.errno == expected:
            return f"a write was refused: {error.strerror}"
        raise
    raise OSError(errno.EIO, "a write that had to be refused was not")


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, _NEW, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _shown(error: Exception) -> str:
    return describe(error) if isinstance(error, OSError) else str(error)


def _probe(feature: Feature, act: Callable[[str], str], by: str, cure: str) -> Callable[[str], Probe]:
    def probe(directory: str) -> Probe:
        try:
            return Probe(feature, works=True, by=by, details=act(directory))
        except (OSError, SandboxError) as error:
            return Probe(feature, works=False, details=_shown(error), cure=cure)

    return probe


_PROBES: Final = (
    _probe(Feature.READ_ONLY_BIND, read_only_bind, "mount_setattr(2)", _MOUNTS_CURE),
    _probe(Feature.TMPFS, tmpfs, "tmpfs size limit", _MOUNTS_CURE),
    _probe(
        Feature.OVERLAY,
        overlay,
        "overlayfs",
        "load the module overlay, and keep the state on a filesystem that can be an upper layer (ext4, xfs, btrfs)",
    ),
    _probe(Feature.DISK_LIMIT, disk_limit, "ext4 in a file", "install e2fsprogs and make /dev/loop-control available"),
    _probe(Feature.REFLINK, reflink, "FICLONE", "optional: xfs or btrfs for the state directory saves copies"),
    _probe(Feature.QUOTA, quota, "project quota", "optional: nothing of ours needs it"),
)
