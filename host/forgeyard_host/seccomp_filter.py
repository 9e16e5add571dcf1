"""A list of the system calls that a confined process may make, in the kernel's own filter language (seccomp(2)).

For a process of ours that reads files and fills directories. Everything else answers EPERM, so that a call this list
forgot shows as an error with a name. Starting processes, sockets, mounts, keys, tracing and signals to others are out.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from forgeyard_host import syscalls

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_CLONE_THREAD: Final = 0x10000

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_ANY_BIT: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

# name: (x86_64, aarch64); -1 where an architecture has no such call
_CALLS: Final = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, -1),
    "fstat": (5, 80),
    "lstat": (6, -1),
    "poll": (7, -1),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "exit": (60, 93),
    "fcntl": (72, 25),
    "ftruncate": (77, 46),
    "umask": (95, 166),
    "sigaltstack": (131, 132),
    "fchmod": (91, 52),
    "fchown": (93, 55),
    "gettid": (186, 178),
    "fsetxattr": (190, 7),
    "fgetxattr": (193, 10),
    "flistxattr": (196, 13),
    "futex": (202, 98),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "openat": (257, 56),
    "mkdirat": (258, 34),
    "mknodat": (259, 33),
    "fchownat": (260, 54),
    "newfstatat": (262, 79),
    "unlinkat": (263, 35),
    "linkat": (265, 37),
    "symlinkat": (266, 36),
    "readlinkat": (267, 78),
    "fchmodat": (268, 53),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "utimensat": (280, 88),
    "prlimit64": (302, 261),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "getrusage": (98, 165),
}
_CLONE: Final = (56, 220)
_CLONE3: Final = 435
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter() -> None:
    """Keep this process to the list, for good. No new privileges has to be set. Nothing on other architectures.

    :raises OSError: when the kernel takes no filter.
    """
    known = _ARCHITECTURES.get(os.uname().machine)
    if known is None:
        return
    program = _program(*known)
    block = _Program(len(program) // 8, program)
    arguments = (ctypes.c_ulong(_MODE_FILTER), ctypes.byref(block), ctypes.c_ulong(0), ctypes.c_ulong(0))
    syscalls.checked(_LIBC.prctl(ctypes.c_int(_PR_SET_SECCOMP), *arguments), "seccomp")


def _program(column: int, architecture: int) -> bytes:
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        # Its flags lie in memory, where no filter can look: the C library falls back to clone.
        _step(_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
        # A new thread is fine, a new process is not.
        _step(_EQUAL, _CLONE[column], 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _CLONE_THREAD, 0, 1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ]
    for numbers in _CALLS.values():
        if numbers[column] >= 0:
            steps += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ALLOW)]
    return b"".join([*steps, _step(_RETURN, _ERRNO | errno.EPERM)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
