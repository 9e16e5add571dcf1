"""Single calls about a container, and what their failures mean."""

from __future__ import annotations

import time
from typing import Final

import requests
from docker import APIClient
from docker.errors import APIError, NotFound

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_runtimes.docker.process import belongs


def start_container(api: APIClient, docker_id: str) -> int:
    """Start it; the host pid of its PID 1. Blocking."""
    api.start(docker_id)
    return int(api.inspect_container(docker_id)["State"]["Pid"])


_TRIES: Final = 5
_PAUSE: Final = 0.1
"""Seconds. Another process on the host may hold a mount of the container's file system for a moment."""


def remove_container(api: APIClient, name: str) -> None:
    """Remove it with its anonymous volumes, whatever state it is in; not there is fine. Blocking."""
    for left in reversed(range(_TRIES)):
        try:
            api.remove_container(name, v=True, force=True)
        except NotFound:
            return
        except APIError as error:
            if error.status_code == requests.codes.conflict:
                _wait_removed(api, name)
            elif error.status_code == requests.codes.server_error and left:
                time.sleep(_PAUSE)
                continue
            else:
                raise
        return


def _wait_removed(api: APIClient, name: str) -> None:
    """Somebody else removes it at this moment."""
    try:
        api.wait(name, condition="removed")
    except NotFound:
        return


def check_here(pid: int, docker_id: str) -> None:
    """That the pid means on this machine what it means to the daemon: it will be killed by it.

    :raises ExecutorError: LOST.
    """
    if not pid or not belongs(pid, docker_id):
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "docker_pid",
            "PID 1 of the container ended at once, or is not on this machine",
            details=f"pid {pid} is not in a group of {docker_id[:12]}",
            resolution="use a daemon in this pid namespace",
        )


def refuse_fields(fields: tuple[str, ...]) -> None:
    """:raises SandboxError: UNSUPPORTED_ISOLATION, when there are any."""
    if fields:
        raise SandboxError(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "docker_cannot_carry",
            f"Docker can't carry {', '.join(fields)}",
            resolution="use another runtime, such as --runtime runc, or ask for less",
        )


def not_applied(warnings: str) -> SandboxError:
    """Docker warns of a limit that it leaves out."""
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED,
        "docker_warning",
        "Docker would not apply all that was asked for",
        details=warnings,
        resolution="enable what the daemon's warning names, or use --runtime runc",
    )


def failed_start(error: ExecutorError) -> SandboxError:
    """The runtime below Docker could not do what it was given."""
    return SandboxError(
        SandboxErrorKind.NAMESPACE_FAILED,
        "runtime_start",
        "docker could not start the container",
        details=error.details,
    )
