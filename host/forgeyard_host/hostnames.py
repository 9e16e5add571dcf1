"""The host name of a container, seen and set from outside: an engine may leave no other way."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from forgeyard_host import syscalls
from forgeyard_host.failures import describe
from forgeyard_model.errors import SandboxError, SandboxErrorKind

T = TypeVar("T")

_CLONE_NEWUTS: Final = 0x04000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def set_hostname(pid: int, name: str) -> None:
    """Give the UTS namespace of process `pid`, which is not this one's own, the host name `name`. Blocking.

    :raises SandboxError: NAMESPACE_FAILED.
    """

    def act() -> None:
        socket.sethostname(name)

    _in_uts(pid, act, "set the host name of a container")


def hostname_of(pid: int) -> str:
    """The host name that process `pid` sees. Blocking.

    :raises SandboxError: NAMESPACE_FAILED.
    """
    return _in_uts(pid, lambda: os.uname().nodename, "read the host name of a container")


def _in_uts(pid: int, act: Callable[[], T], what: str) -> T:
    """What `act` returns in a thread made for it: it stays in the namespace that it enters."""
    done: list[T] = []
    failed: list[OSError] = []

    def run() -> None:
        try:
            done.append(_entered(pid, act))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="forgeyard-uts")
    thread.start()
    thread.join()
    if failed:
        raise SandboxError(
            SandboxErrorKind.NAMESPACE_FAILED, "hostname", f"cannot {what}", details=describe(failed[0])
        ) from failed[0]
    return done[0]


def _entered(pid: int, act: Callable[[], T]) -> T:
    fd = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino == os.stat("/proc/self/ns/uts").st_ino:  # noqa: PTH116  a namespace file, not a path
            raise OSError(22, "it is in the executor's own UTS namespace")  # EINVAL
        syscalls.checked(_LIBC.setns(fd, _CLONE_NEWUTS), "setns")
    finally:
        os.close(fd)
    return act()
