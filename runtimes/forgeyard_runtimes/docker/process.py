"""One more process in a running container, with PID 1's rights and no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any, Final

from docker import APIClient

from forgeyard_host.children import wait_readable
from forgeyard_host.processes import process_facts
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_runtimes.docker.client import DockerClient

_LAST_LOOK: Final = 5.0
"""Seconds between the end of a process and Docker's knowing of it, at the most."""


def exec_request(process: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of docker-py's exec_create for a compiled process.json.

    An exec of Docker's takes these from its container, whatever a request says, so they have to be PID 1's.

    :param first: PID 1's own.
    :raises SandboxError: UNSUPPORTED_ISOLATION, naming what differs from PID 1's.
    """
    wanted, there = _rights(process), _rights(first)
    different = [name for name in wanted if wanted[name] != there[name]]
    if different:
        raise SandboxError(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "docker_exec",
            f"Docker runs a process only with its container's own {', '.join(different)}",
            resolution="compile the process from the container's plan",
        )
    user = process["user"]
    return {
        "cmd": process["args"],
        "user": f"{user['uid']}:{user['gid']}",
        "environment": process["env"],
        "workdir": process["cwd"],
        "privileged": False,
        "stdout": False,
        "stderr": False,
    }


def _rights(process: Mapping[str, Any]) -> dict[str, object]:
    capabilities, user = process.get("capabilities") or {}, process["user"]
    return {
        "capabilities": {name: sorted(held) for name, held in capabilities.items() if held},
        "noNewPrivileges": bool(process.get("noNewPrivileges")),
        "rlimits": {(limit["type"], limit["soft"], limit["hard"]) for limit in process.get("rlimits") or ()},
        "terminal": bool(process.get("terminal")),
        "user": (user["uid"], user["gid"], frozenset({*(user.get("additionalGids") or ()), user["gid"]})),
    }


async def run_exec(client: DockerClient, container: str, request: Mapping[str, Any], deadline: float) -> int:
    """Run it to its end. The exit code is what Docker says of an exec that has ended, never what a stream does.

    :raises ExecutorError: SPAWN_FAILED, TIMEOUT (then it is killed), LOST.
    """

    def begin(api: APIClient) -> tuple[str, int, str]:
        key = str(api.exec_create(container, **request)["Id"])
        api.exec_start(key, detach=True)
        found = api.exec_inspect(key)
        return key, int(found["Pid"] or 0), str(found["ContainerID"])

    try:
        key, pid, docker_id = await client.change(begin, "run a process in the container")
    except ExecutorError as error:
        if error.reason != "docker_refused":
            raise
        raise ExecutorError(
            ExecutorErrorKind.SPAWN_FAILED, "runtime_exec", error.brief, details=error.details
        ) from error
    try:
        async with asyncio.timeout(deadline):
            await _ended(pid, docker_id)
    except TimeoutError as error:
        raise ExecutorError(
            ExecutorErrorKind.TIMEOUT, "exec_timeout", f"the process was killed after {deadline:g}s"
        ) from error
    return await _exit_code(client, key)


async def _ended(pid: int, docker_id: str) -> None:
    """Until the process is dead; when nobody waits for it any more, it is killed."""
    if pid == 0:
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if belongs(pid, docker_id):  # else it has ended, and its number is somebody else's
            await _wait_or_kill(pidfd)
    finally:
        os.close(pidfd)


async def _wait_or_kill(pidfd: int) -> None:
    try:
        await wait_readable(pidfd)
    except BaseException:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await asyncio.wait_for(wait_readable(pidfd), _LAST_LOOK)
        raise


def belongs(pid: int, docker_id: str) -> bool:
    """Whether `pid` is a process of that container, by its control groups."""
    try:
        return any(docker_id in path for path in process_facts(pid).cgroups.values())
    except ProcessLookupError:
        return False


async def _exit_code(client: DockerClient, key: str) -> int:
    pause = 0.002
    try:
        async with asyncio.timeout(_LAST_LOOK):
            while True:
                found = await client.ask(lambda api: api.exec_inspect(key), "ask how a process ended")
                if not found["Running"] and found["ExitCode"] is not None:
                    return int(found["ExitCode"])
                await asyncio.sleep(pause)
                pause *= 2
    except TimeoutError as error:
        raise ExecutorError(
            ExecutorErrorKind.LOST, "exec_lost", "Docker does not say how a process in the container ended"
        ) from error
