"""A process that gives up what it does not need, for good, before it reads hostile bytes.

What is left: the descriptors it holds, a handful of capabilities over files, an empty root, no network, bounded memory.
Directories are handed to it as detached mounts, so that ``..`` ends at their own roots.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from forgeyard_host import syscalls
from forgeyard_host.failures import describe
from forgeyard_host.seccomp_filter import install_filter
from forgeyard_model.errors import SandboxError, SandboxErrorKind

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWIPC: Final = 0x08000000
_CLONE_NEWNET: Final = 0x40000000

_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
# Root gains nothing by being root, a change of uid changes no capability, none is raised again; all locked.
_SECUREBITS: Final = 0b1110_1111
_CAPABILITY_VERSION: Final = 0x20080522
_NOBODYS: Final = (0x7FFF_FFF0, 65534)
"""Uids that own nothing: the first one no distribution hands out, the other for user namespaces that lack it."""
_MOST_THREADS: Final = 256


class Capability(IntEnum):
    """The capabilities that a confined process may keep (capabilities(7))."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    FOWNER = 3
    FSETID = 4
    SETFCAP = 31


@dataclass(frozen=True, slots=True)
class Confinement:
    """What is left to the process.

    memory: bytes of address space. file_size: bytes of the largest file it can write. descriptors: open at once.
    """

    memory: int
    file_size: int
    descriptors: int = 4096
    capabilities: tuple[Capability, ...] = ()


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def confine(limits: Confinement) -> None:
    """Confine this process for good. It must have one thread, and have imported all it needs: no file is left to read.

    Files it makes still belong to root, though it runs as a uid that owns no process and no file.

    :raises SandboxError: PRIVILEGE_DROP_FAILED; the process is then of no use and has to end.
    """
    try:
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS)
        _empty_root()
        _drop_privileges(limits.capabilities)
        _limit(limits)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_DUMPABLE, 0)
        install_filter()
    except OSError as error:
        raise SandboxError(
            SandboxErrorKind.PRIVILEGE_DROP_FAILED,
            "not_confined",
            "the process that reads images can't be confined",
            details=describe(error),
            resolution="run the executor as root, with CAP_SYS_ADMIN",
        ) from error


def detached_copy(fd: int, shown: str, *, read_only: bool) -> int:
    """What `fd` refers to as a mount of its own, attached nowhere: ``..`` in it ends at `fd`. An O_PATH descriptor.

    :raises SandboxError: MOUNT_FAILED.
    """
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC
    attributes |= syscalls.MOUNT_ATTR_RDONLY if read_only else 0
    try:
        tree = syscalls.clone_tree(fd, shown)
        try:
            syscalls.mount_setattr(tree, "", attr_set=attributes, shown=shown)
        except OSError:
            os.close(tree)
            raise
    except OSError as error:
        raise SandboxError(
            SandboxErrorKind.MOUNT_FAILED,
            "mount_refused",
            f"cannot hand over {shown}",
            details=describe(error),
            resolution="mounting needs CAP_SYS_ADMIN and Linux 5.12 or newer",
        ) from error
    return tree


def _call(name: str, *arguments: int) -> None:
    syscalls.checked(getattr(_LIBC, name)(*(ctypes.c_ulong(value) for value in arguments)), name)


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, value, 0, 0, 0)


def _empty_root() -> None:
    """Put an empty, read-only tmpfs in the root's place, and let go of the old one."""
    syscalls.mount("none", "/", "none", syscalls.MS_PRIVATE | syscalls.MS_REC)
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    # /proc is there wherever the executor runs, and nobody else sees this namespace.
    syscalls.mount("forgeyard", "/proc", "tmpfs", flags, "mode=0555,size=4k,nr_inodes=4")
    os.chdir("/proc")
    # The old root lands on top of the new one, where the next call removes it.
    syscalls.checked(_LIBC.pivot_root(b".", b"."), "pivot_root")
    syscalls.umount(".")
    os.chdir("/")


def _drop_privileges(kept: Iterable[Capability]) -> None:
    _prctl(_PR_SET_SECUREBITS, _SECUREBITS)
    _drop_bounding(kept)
    _prctl_ambient()
    os.setgroups([])
    _become_nobody()
    # What is made belongs to root, unless it is given to another: one system call less for most files of an image.
    _LIBC.setfsgid(0)
    _LIBC.setfsuid(0)
    mask = sum(1 << capability for capability in kept)
    low = _CapData(mask, mask, 0)
    data = (_CapData * 2)(low, _CapData(0, 0, 0))
    syscalls.checked(_LIBC.capset(ctypes.byref(_CapHeader(_CAPABILITY_VERSION, 0)), data), "capset")


def _drop_bounding(kept: Iterable[Capability]) -> None:
    wanted = frozenset(kept)
    for capability in range(64):
        if capability in wanted:
            continue
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # beyond the last one that this kernel knows
                raise
            return


def _prctl_ambient() -> None:
    _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def _become_nobody() -> None:
    for number in _NOBODYS:
        try:
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
        except OSError as error:
            if error.errno != errno.EINVAL or number == _NOBODYS[-1]:
                raise
        else:
            return


def _limit(limits: Confinement) -> None:
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.descriptors),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_NPROC, _MOST_THREADS),
        (resource.RLIMIT_AS, limits.memory),
    ):
        _, hard = resource.getrlimit(kind)
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))
