"""Network namespaces, and sockets made inside of them.

A namespace is held by descriptor alone: nothing on disk names it, and when its last holder goes, by whatever death,
the kernel drops every link, address and rule in it. Entering one happens in a thread made for it and ended after,
since a thread of a pool would stay where it was put.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from forgeyard_host import syscalls
from forgeyard_host.failures import describe
from forgeyard_model.errors import SandboxError, SandboxErrorKind

T = TypeVar("T")

_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_OWN: Final = Path("/proc/self/ns/net")  # every namespace file has the device number of the one nsfs
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_BACKLOG: Final = 128


class NetNamespace:
    """An open network namespace. Owned by the host's user namespace, so that no job gains a right over it."""

    __slots__ = ("fd", "inode")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.inode = os.fstat(fd).st_ino

    @property
    def path(self) -> str:
        """Where a runtime can open it while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Let go; with its last holder the namespace ends. Not waited for. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def new_namespace(sysctls: Mapping[str, str] | None = None) -> NetNamespace:
    """A new namespace with loopback up.

    :param sysctls: names below ``net.`` as sysctl(8) spells them, set inside it.
    :raises SandboxError: NAMESPACE_FAILED.
    """
    return new_namespace_and(lambda: None, sysctls)[0]


def new_namespace_and(act: Callable[[], T], sysctls: Mapping[str, str] | None = None) -> tuple[NetNamespace, T]:
    """A new namespace, and what `act` returns inside it: one thread less than `in_namespace` afterwards.

    :raises SandboxError: NAMESPACE_FAILED, also for an OSError of `act`.
    """

    def make() -> tuple[int, T]:
        syscalls.checked(_LIBC.unshare(_CLONE_NEWNET), "unshare")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
            _raise_loopback(control)
        set_sysctls(sysctls or {})
        fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return fd, act()
        except BaseException:
            os.close(fd)
            raise

    made, found = _in_thread(make, "make a network namespace")
    return NetNamespace(made), found


def current_namespace() -> NetNamespace:
    """The one this thread is in."""
    return NetNamespace(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))


def namespace_of(pid: int) -> NetNamespace:
    """The one that the process is in, which the caller holds by a pidfd.

    :raises SandboxError: NAMESPACE_FAILED, when it is gone.
    """
    try:
        return NetNamespace(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise _failed("open a container's network namespace", error) from error


def in_namespace(fd: int, act: Callable[[], T]) -> T:
    """What `act` returns when it runs inside the namespace `fd`. Its own ForgeyardErrors come through as they are.

    :raises SandboxError: NAMESPACE_FAILED, when the namespace can't be entered, or for an OSError of `act`.
    """

    def enter() -> T:
        syscalls.checked(_LIBC.setns(fd, _CLONE_NEWNET), "setns")
        return act()

    return _in_thread(enter, "work in a network namespace")


def set_sysctls(values: Mapping[str, str]) -> None:
    """Set sysctls of the calling thread's namespace; what this kernel lacks is an error.

    :raises OSError: names the file.
    """
    for name, value in values.items():
        # /proc/sys/net shows the namespace of the thread that opens it.
        fd = os.open(f"/proc/sys/{name.replace('.', '/')}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


def read_sysctls(names: tuple[str, ...]) -> dict[str, str]:
    """Sysctls of the calling thread's namespace; "" for one that this kernel lacks."""
    found = {}
    for name in names:
        try:
            found[name] = Path(f"/proc/sys/{name.replace('.', '/')}").read_text().strip()
        except FileNotFoundError:
            found[name] = ""
    return found


def tcp_listener(fd: int, address: str, port: int) -> socket.socket:
    """A listening, non-blocking TCP socket inside the namespace `fd`."""

    def make() -> socket.socket:
        return _bound(socket.SOCK_STREAM, address, port)

    return in_namespace(fd, make)


def udp_socket(fd: int, address: str, port: int) -> socket.socket:
    """A bound, non-blocking UDP socket inside the namespace `fd`."""

    def make() -> socket.socket:
        return _bound(socket.SOCK_DGRAM, address, port)

    return in_namespace(fd, make)


def sockets_at(fd: int, address: str, *, udp: Sequence[int], tcp: Sequence[int]) -> list[socket.socket]:
    """Several at once: bound UDP sockets, then TCP listeners, all non-blocking, inside the namespace `fd`."""

    def make() -> list[socket.socket]:
        with contextlib.ExitStack() as undo:
            made = [undo.enter_context(_bound(socket.SOCK_DGRAM, address, port)) for port in udp]
            made += [undo.enter_context(_bound(socket.SOCK_STREAM, address, port)) for port in tcp]
            undo.pop_all()
        return made

    return in_namespace(fd, make)


def stream_socket(fd: int) -> socket.socket:
    """An unconnected, non-blocking TCP socket inside the namespace `fd`."""

    def make() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    return in_namespace(fd, make)


def pin(namespace: NetNamespace, path: Path) -> None:
    """Give `namespace` a name on disk, as CNI plugins want one. It then outlives its holders, until `unpin`.

    :raises SandboxError: NAMESPACE_FAILED.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        try:
            syscalls.mount(namespace.path, str(path), "none", syscalls.MS_BIND)
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        raise _failed("pin a network namespace", error) from error


def unpin(path: Path) -> None:
    """Take the name away. One that is gone, or is no namespace, is no error: a reboot leaves empty files.

    :raises SandboxError: NAMESPACE_FAILED.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            while is_nsfs(path):
                syscalls.umount(str(path))
            path.unlink()
    except OSError as error:
        raise _failed(f"remove {path}", error) from error


def is_nsfs(path: Path) -> bool:
    """Whether a namespace is at `path`, and not the empty file that a reboot leaves."""
    try:
        return path.stat().st_dev == _OWN.stat().st_dev
    except FileNotFoundError:
        return False


def open_pinned(path: Path) -> NetNamespace:
    """The namespace that `pin` put at `path`.

    :raises SandboxError: NAMESPACE_FAILED, when none is there.
    """
    if not is_nsfs(path):
        raise SandboxError(SandboxErrorKind.NAMESPACE_FAILED, "no_namespace", f"no network namespace is at {path}")
    return NetNamespace(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _bound(kind: int, address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        if kind == socket.SOCK_STREAM:
            made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _raise_loopback(control: socket.socket) -> None:
    request = struct.pack("16sH22x", b"lo", 0)
    flags = struct.unpack_from("16xH", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[0]
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def _in_thread(act: Callable[[], T], what: str) -> T:
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001  handed to the caller below, whatever it is
            failed.append(error)

    thread = threading.Thread(target=run, name="forgeyard-netns")
    thread.start()
    thread.join()
    if failed:
        if isinstance(failed[0], OSError):
            raise _failed(what, failed[0]) from failed[0]
        raise failed[0]
    return done[0]


def _failed(what: str, error: OSError) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NAMESPACE_FAILED,
        "network_namespace",
        f"cannot {what}",
        details=describe(error),
        resolution="network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN",
    )
