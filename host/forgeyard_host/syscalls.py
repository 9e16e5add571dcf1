"""System calls that Python's os module lacks. Thin: numbers, structures, errno turned into OSError.

The numbers are the same on every 64-bit architecture, since calls from 424 on share one table.
Every call releases the interpreter lock, and errno is kept per thread by ctypes, so threads may call freely.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_OPENAT2: Final = 437
_MOUNT_SETATTR: Final = 442
_QUOTACTL_FD: Final = 443

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

OPEN_TREE_CLONE: Final = 1
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8
MOUNT_ATTR_IDMAP: Final = 0x100000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_NOATIME: Final = 1024
MS_BIND: Final = 4096
MS_REC: Final = 1 << 14
MS_PRIVATE: Final = 1 << 18

MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8

_FSCONFIG_SET_FLAG: Final = 0
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def checked(result: int, path: str) -> int:
    """`result` of a call of the C library.

    :raises OSError: when it is negative; `path` says of what.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def _int(value: int) -> ctypes.c_long:
    # The variadic syscall() would take a bare Python int as 32 bits.
    return ctypes.c_long(value)


def openat2(dirfd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """openat2(2). The new fd is close-on-exec."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    size = _int(ctypes.sizeof(how))
    return checked(
        _LIBC.syscall(_int(_OPENAT2), _int(dirfd), os.fsencode(path), ctypes.byref(how), size),
        path,
    )


def clone_tree(fd: int, shown: str) -> int:
    """A detached mount of what `fd` refers to, without the mounts below it (open_tree(2))."""
    flags = OPEN_TREE_CLONE | AT_EMPTY_PATH | os.O_CLOEXEC
    return checked(_LIBC.syscall(_int(_OPEN_TREE), _int(fd), b"", _int(flags)), shown)


def mount_setattr(
    dirfd: int, path: str, *, attr_set: int = 0, propagation: int = 0, userns_fd: int = 0, shown: str = ""
) -> None:
    """mount_setattr(2) on one mount; an empty `path` means `dirfd` itself."""
    attr = _MountAttr(attr_set, 0, propagation, userns_fd)
    flags = 0 if path else AT_EMPTY_PATH
    size = _int(ctypes.sizeof(attr))
    checked(
        _LIBC.syscall(_int(_MOUNT_SETATTR), _int(dirfd), os.fsencode(path), _int(flags), ctypes.byref(attr), size),
        shown or path,
    )


def move_mount(mount_fd: int, dirfd: int, path: str) -> None:
    """Attach the detached mount `mount_fd` at `path` below `dirfd`; symlinks in the last component are not followed."""
    checked(
        _LIBC.syscall(
            _int(_MOVE_MOUNT), _int(mount_fd), b"", _int(dirfd), os.fsencode(path), _int(MOVE_MOUNT_F_EMPTY_PATH)
        ),
        path,
    )


def fsopen(filesystem: str) -> int:
    """A configuration context of fsopen(2) for `filesystem`."""
    return checked(_LIBC.syscall(_int(_FSOPEN), filesystem.encode(), _int(1)), filesystem)  # 1: close-on-exec


def fsconfig_string(fd: int, key: str, value: str) -> None:
    """Set a parameter. The kernel takes up to 255 bytes per value and refuses more."""
    checked(
        _LIBC.syscall(_int(_FSCONFIG), _int(fd), _int(_FSCONFIG_SET_STRING), key.encode(), os.fsencode(value), _int(0)),
        f"{key}={value}",
    )


def fsconfig_flag(fd: int, key: str) -> None:
    """Set a parameter that has no value."""
    checked(_LIBC.syscall(_int(_FSCONFIG), _int(fd), _int(_FSCONFIG_SET_FLAG), key.encode(), None, _int(0)), key)


def fsmount(fd: int, attributes: int, shown: str) -> int:
    """Create the filesystem that `fd` configures; a detached mount with `attributes` of it."""
    checked(_LIBC.syscall(_int(_FSCONFIG), _int(fd), _int(_FSCONFIG_CMD_CREATE), None, None, _int(0)), shown)
    return checked(_LIBC.syscall(_int(_FSMOUNT), _int(fd), _int(1), _int(attributes)), shown)


def mount(source: str, target: str, filesystem: str, flags: int, data: str = "") -> None:
    """mount(2). `data` must fit in a page: the kernel would cut the rest off without a word."""
    raw = os.fsencode(data)
    if len(raw) >= os.sysconf("SC_PAGE_SIZE"):
        raise OSError(7, "mount options exceed one page", target)  # E2BIG
    checked(
        _LIBC.mount(os.fsencode(source), os.fsencode(target), filesystem.encode(), ctypes.c_ulong(flags), raw),
        target,
    )


def umount(target: str) -> None:
    """Detach the topmost mount at `target` and everything below it; a symlink is not followed."""
    checked(_LIBC.umount2(os.fsencode(target), MNT_DETACH | UMOUNT_NOFOLLOW), target)


def reserve(fd: int, size: int, shown: str) -> None:
    """Set `size` bytes of the disk aside for a file (fallocate(2)). Unlike posix_fallocate(3) it never writes zeros:
    a filesystem that can't do it says EOPNOTSUPP."""
    result = _LIBC.fallocate(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size))
    checked(result, shown)


def project_quota_format(fd: int, shown: str) -> int:
    """The format of the project quota on the filesystem of `fd` (quotactl_fd(2), Q_GETFMT); an error when it is off."""
    command = 0x800004 << 8 | 2  # Q_GETFMT of PRJQUOTA
    answer = ctypes.c_uint32()
    checked(_LIBC.syscall(_int(_QUOTACTL_FD), _int(fd), _int(command), _int(0), ctypes.byref(answer)), shown)
    return answer.value


def syncfs(fd: int, shown: str) -> None:
    """Write everything that the filesystem of `fd` has in memory to its disk, and wait for it (syncfs(2))."""
    checked(_LIBC.syncfs(fd), shown)
