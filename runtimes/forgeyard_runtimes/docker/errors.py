"""What the daemon and its client say, as errors of ours."""

from __future__ import annotations

import errno
import os
from http import HTTPStatus
from typing import Final

import requests
from docker.errors import APIError, DockerException, InvalidVersion

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, SandboxError, SandboxErrorKind

_FULL: Final = ("no space left on device", "disk quota exceeded")
_START: Final = "check that dockerd runs, and DOCKER_HOST or the context that names it"


class NotThere(ExecutorError):  # noqa: N818  it reads as what it is
    """The daemon has no such container, image or exec."""


def translate(error: Exception, doing: str) -> ForgeyardError:
    """The error of ours for what the client raised while `doing` something."""
    if isinstance(error, APIError):
        return _refused(error, doing)
    if isinstance(error, InvalidVersion):
        return ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "docker_too_old",
            "the Docker daemon is too old",
            details=str(error),
            resolution="use Docker 20.10 or newer",
        )
    if isinstance(error, requests.exceptions.Timeout):
        return hangs(doing, str(error))
    return _unreachable(error, doing)


def hangs(doing: str, details: str = "") -> ExecutorError:
    """It took longer than its deadline."""
    return ExecutorError(
        ExecutorErrorKind.TIMEOUT,
        "runtime_hangs",
        f"the Docker daemon does not answer ({doing})",
        details=details,
        resolution="look at dockerd's log; restart it if it hangs",
    )


def _refused(error: APIError, doing: str) -> ForgeyardError:
    said = str(error.explanation or error)
    status = error.status_code or 0
    if any(text in said.lower() for text in _FULL):
        return SandboxError(
            SandboxErrorKind.INTERNAL,
            "docker_disk_full",
            f"Docker has no disk space left ({doing})",
            details=said,
            resolution="free space below Docker's data-root; `docker system df` shows what uses it",
        )
    if status == HTTPStatus.NOT_FOUND:
        return NotThere(
            ExecutorErrorKind.LOST, "docker_not_found", f"Docker has no such object ({doing})", details=said
        )
    kind = ExecutorErrorKind.UNSUPPORTED if status == HTTPStatus.BAD_REQUEST else ExecutorErrorKind.SPAWN_FAILED
    return ExecutorError(kind, "docker_refused", f"Docker could not {doing}", details=f"{status}: {said}"[:2000])


def _unreachable(error: Exception, doing: str) -> ExecutorError:
    number = _errno(error)
    if number in (errno.EACCES, errno.EPERM):
        reason, brief, cure = (
            "docker_permission",
            "no permission to use the Docker daemon's socket",
            "run as root, or as a member of the socket's group (usually docker)",
        )
    elif number in (errno.ENOENT, errno.ECONNREFUSED):
        reason, brief, cure = "docker_not_there", "no Docker daemon listens there", _START
    elif isinstance(error, DockerException) and number is None and "version" in str(error).lower():
        reason, brief, cure = "docker_version", "the Docker daemon tells no version", _START
    else:
        # A stream that ends says nothing of what it was about: a closed connection is no exit status.
        reason, brief, cure = "docker_lost", f"the connection to the Docker daemon broke ({doing})", _START
    # What the library wraps an errno in says nothing more.
    details = str(error)[:2000] if number is None else f"{doing}: {os.strerror(number)}"
    return ExecutorError(ExecutorErrorKind.LOST, reason, brief, details=details, resolution=cure)


def _errno(error: BaseException) -> int | None:
    """The errno beneath the layers of exceptions that libraries put around it."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        current = waiting.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        if (
            isinstance(current, OSError)
            and current.errno is not None
            and not isinstance(current, requests.RequestException)
        ):
            return current.errno
        waiting += [current.__cause__, current.__context__, *current.args]
    return None
