"""What containerd says went wrong, as errors of ours: translated here, at the edge, and nowhere else."""

from __future__ import annotations

import errno
import os
import socket
import struct
from enum import StrEnum
from types import TracebackType
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

_TOO_OLD: Final = ("this containerd is too old", "containerd 1.6 is the oldest that can be used")
_NO_SPACE: Final = "no space left on device"


class Code(StrEnum):
    """gRPC status codes that mean something to us; every other is OTHER."""

    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    OTHER = "OTHER"


class DaemonError(ExecutorError):
    """A call that containerd refused or did not answer. `code` is for callers that expect one of them."""

    def __init__(
        self, code: Code, kind: ExecutorErrorKind, reason: str, brief: str, *, details: str, resolution: str = ""
    ) -> None:
        super().__init__(kind, f"containerd_{reason}", brief, details=details, resolution=resolution)
        self.code = code


def call_failed(method: str, code: str, details: str, deadline: float) -> DaemonError:
    """The error for a status.

    :param method: of the service, as Tasks/Create.
    :param deadline: seconds that the call was given.
    """
    known = Code(code) if code in Code.__members__ else Code.OTHER
    said = f"{method}: {details}"
    match known:
        case Code.UNAVAILABLE:
            kind, reason, brief = ExecutorErrorKind.LOST, "unavailable", "containerd does not answer"
            cure = "is it running?"
        case Code.DEADLINE_EXCEEDED:
            kind, reason, brief = ExecutorErrorKind.TIMEOUT, "hangs", f"containerd did not answer within {deadline:g}s"
            cure = "look at the daemon's log"
        case Code.UNIMPLEMENTED:
            kind, reason, brief, cure = ExecutorErrorKind.UNSUPPORTED, "too_old", *_TOO_OLD
        case Code.PERMISSION_DENIED:
            kind, reason, brief = ExecutorErrorKind.UNSUPPORTED, "denied", "containerd denies us what we need"
            cure = "look at the daemon's configuration"
        case _:
            return _refused(known, method, said)
    return DaemonError(known, kind, reason, brief, details=said, resolution=cure)


def _refused(code: Code, method: str, said: str) -> DaemonError:
    if code is Code.RESOURCE_EXHAUSTED or _NO_SPACE in said.lower():
        kind, brief = ExecutorErrorKind.IO_FAILED, "containerd has no space left"
        return DaemonError(code, kind, "no_space", brief, details=said, resolution="free space where it keeps its data")
    running = method.startswith(("Tasks/", "Containers/"))
    kind = ExecutorErrorKind.SPAWN_FAILED if running else ExecutorErrorKind.INTERNAL
    reason = code.value.lower() if code is not Code.OTHER else "refused"
    return DaemonError(code, kind, reason, f"containerd refused {method}", details=said)


def unsupported(reason: str, brief: str, resolution: str, details: str = "") -> ExecutorError:
    """What can't be done with this daemon, or this handler."""
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, details=details, resolution=resolution)


def version_too_old(version: str) -> ExecutorError:
    """It answered with an older version than we know how to talk to."""
    return unsupported("containerd_too_old", *_TOO_OLD, details=f"it says that it is {version!r}")


def unreachable(path: str, error: OSError) -> ExecutorError:
    """Why nobody can be reached at a socket's path, from the errno of a connection to it."""
    shown = f"{path}: {os.strerror(error.errno or 0)}"
    match error.errno:
        case errno.EACCES | errno.EPERM:
            return unsupported(
                "containerd_permission",
                "containerd's socket is not open to this user",
                "run the executor as root, or as a member of the group that owns the socket",
                shown,
            )
        case errno.ENOENT | errno.ENOTDIR:
            brief, cure = "containerd is not there", "start it, or name its socket in CONTAINERD_ADDRESS"
        case errno.ECONNREFUSED:
            brief, cure = "nobody listens on containerd's socket", "start containerd again"
        case errno.EAGAIN:
            brief, cure = "containerd takes no more connections", "look at the daemon's log"
        case _:
            brief, cure = "containerd's socket can't be used", "is it a socket?"
    return unsupported("containerd_missing", brief, cure, shown)


def check_socket(path: str) -> int:
    """Connect once, which says more than gRPC does when it fails. Does not block: a full backlog is an error.

    :returns: uid of who listens (SO_PEERCRED).

    :raises ExecutorError: UNSUPPORTED.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            raise unreachable(path, error) from error
        _, uid, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


class expecting:  # noqa: N801  read as a statement: with expecting(NOT_FOUND)
    """A refusal with one of `codes` is what was wanted: what is to go is gone, what is to be is there."""

    def __init__(self, *codes: Code) -> None:
        self._codes = codes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, DaemonError) and error.code in self._codes
