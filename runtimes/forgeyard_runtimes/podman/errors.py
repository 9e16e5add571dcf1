"""What Podman's service says, in the words of our own errors. Nothing of podman-py or requests leaves this folder."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

if TYPE_CHECKING:
    from requests import Response

_SHOWN: Final = 2000
_START: Final = "start it, for instance with: systemctl start podman.socket"


class NotThere(ExecutorError):  # noqa: N818  it reads as what it is
    """The service knows no such object. What is to be removed is gone then."""

    def __init__(self, details: str) -> None:
        super().__init__(ExecutorErrorKind.LOST, "podman_absent", "Podman knows no such object", details=details)


class Refused(ExecutorError):  # noqa: N818  it reads as what it is
    """The service answered, and would not do it.

    :param status: of its HTTP answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(
            ExecutorErrorKind.SPAWN_FAILED, "podman_refused", "Podman could not do it", details=message[:_SHOWN]
        )
        self.status = status


def unreachable(path: str, error: OSError) -> ExecutorError:
    """Why nobody answers at the socket `path`."""
    shown = f"{path}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "podman_permission",
            "Podman's socket may not be used",
            details=shown,
            resolution="run the executor as the socket's owner, or name another socket in CONTAINER_HOST",
        )
    if error.errno == errno.ENOENT:
        return ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "podman_missing",
            "Podman's socket is not there",
            details=shown,
            resolution=f"{_START}, or name its socket in CONTAINER_HOST",
        )
    return gone(shown)


def gone(details: str) -> ExecutorError:
    """The connection failed or broke off: what became of the call is not known."""
    return ExecutorError(
        ExecutorErrorKind.LOST, "podman_gone", "Podman's service is gone", details=details, resolution=_START
    )


def hangs(what: str, seconds: float) -> ExecutorError:
    """No answer within its deadline."""
    return ExecutorError(
        ExecutorErrorKind.TIMEOUT,
        "podman_hangs",
        "Podman's service does not answer",
        details=f"{what}: no answer within {seconds:g}s",
        resolution="look at the service's log, and restart it: running jobs go on",
    )


def unsupported(reason: str, brief: str, resolution: str, details: str = "") -> ExecutorError:
    """Something that can't be done with this service, however often it is tried."""
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, details=details, resolution=resolution)


def not_understood(what: str, answer: object) -> ExecutorError:
    """An answer without the parts that the API promises."""
    return ExecutorError(
        ExecutorErrorKind.INTERNAL,
        "podman_answer",
        "Podman's answer can't be understood",
        details=f"{what}: {str(answer)[:_SHOWN]}",
    )


def check(what: str, response: Response) -> None:
    """Raise what a response with an error status says.

    :raises NotThere: 404.
    :raises Refused: any other.
    """
    if response.status_code < 400:
        return
    try:
        message = str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text
    if response.status_code == 404:
        raise NotThere(f"{what}: {message[:_SHOWN]}")
    raise Refused(response.status_code, message)


def refuse_systemd_manager(error: Refused) -> None:
    """Told by what Podman says of a group of ours, which is no slice: asking before takes longer than a container.

    :raises ExecutorError: UNSUPPORTED, when that is what `error` says.
    """
    if "systemd" in error.details and "cgroup parent" in error.details:
        raise unsupported(
            "podman_cgroup_manager",
            "Podman makes control groups through systemd, below which the executor can't put its groups",
            'set cgroup_manager = "cgroupfs" in containers.conf and restart the service, or use --runtime runc',
            details=error.details,
        ) from error
