"""What is done with a container's processes at containerd, in the order that its shim wants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import QUERY_DEADLINE, START_DEADLINE, Client
from forgeyard_runtimes.containerd.errors import Code, DaemonError, expecting
from forgeyard_runtimes.containerd.messages import PROCESS, any_of, containers, task_types, tasks
from forgeyard_runtimes.contract import ContainerStatus
from forgeyard_runtimes.shielding import shielded

_WAIT_AT_A_TIME: Final = 600.0
STATUS: Final = {
    task_types.CREATED: ContainerStatus.CREATED,
    task_types.RUNNING: ContainerStatus.RUNNING,
    task_types.STOPPED: ContainerStatus.STOPPED,
    # Paused by somebody else: it has processes, that is what matters.
    task_types.PAUSED: ContainerStatus.RUNNING,
    task_types.PAUSING: ContainerStatus.RUNNING,
}


async def get_task(client: Client, container_id: str) -> task_types.Process | None:
    """What the shim says of PID 1; None when there is no task."""
    with expecting(Code.NOT_FOUND):
        request = tasks.GetRequest(container_id=container_id)
        return (await client.call(calls.TASK_GET, request, patient=True)).process
    return None


async def kill_all(client: Client, container_id: str) -> None:
    """SIGKILL everything in the container; nothing there is fine."""
    request = tasks.KillRequest(container_id=container_id, signal=signal.SIGKILL, all=True)
    with expecting(Code.NOT_FOUND):
        await client.call(calls.TASK_KILL, request, deadline=START_DEADLINE, patient=True)


async def remove_task(client: Client, container_id: str) -> None:
    """Delete the task, and kill it first if it has not ended. None there is fine.

    :raises DaemonError: it can't be deleted.
    """
    request = tasks.DeleteTaskRequest(container_id=container_id)
    try:
        await client.call(calls.TASK_DELETE, request, deadline=START_DEADLINE, patient=True)
    except DaemonError as error:
        if error.code is Code.NOT_FOUND:
            return
        if error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            raise
        # Most likely it runs, for which versions have different codes. PID 1 may also be dead already, and the shim
        # just not have heard of it. What else was wrong is wrong the second time as well.
        await kill_all(client, container_id)
        with expecting(Code.NOT_FOUND):
            wait = tasks.WaitRequest(container_id=container_id)
            await client.call(calls.TASK_WAIT, wait, deadline=QUERY_DEADLINE, patient=True)
            await client.call(calls.TASK_DELETE, request, deadline=START_DEADLINE, patient=True)


async def remove_container(client: Client, container_id: str) -> None:
    """Delete the task, which ends containerd's shim, and the record. Neither there is fine.

    :raises DaemonError: something could not be removed; also after waiting for a daemon that is away.
    """
    await remove_task(client, container_id)
    with expecting(Code.NOT_FOUND):
        request = containers.DeleteContainerRequest(id=container_id)
        await client.call(calls.CONTAINER_DELETE, request, patient=True)


async def run_process(client: Client, container_id: str, process: bytes, deadline: float) -> int:
    """Run one more process in a container; its exit code, 128+n for a death by signal n.

    :raises ExecutorError: SPAWN_FAILED when it could not be started, TIMEOUT when it outlived `deadline`.
    """
    exec_id = f"x{os.urandom(8).hex()}"
    request = tasks.ExecProcessRequest(container_id=container_id, exec_id=exec_id, spec=any_of(PROCESS, process))
    await client.call(calls.TASK_EXEC, request)
    try:
        async with asyncio.timeout(deadline):
            start = tasks.StartRequest(container_id=container_id, exec_id=exec_id)
            await client.call(calls.TASK_START, start, deadline=START_DEADLINE)
            return await _exit_status(client, tasks.WaitRequest(container_id=container_id, exec_id=exec_id))
    except TimeoutError as error:
        brief = f"the process did not end within {deadline:g}s"
        raise ExecutorError(ExecutorErrorKind.TIMEOUT, "exec_timeout", brief) from error
    finally:
        await shielded(_end_process(client, container_id, exec_id))


async def _exit_status(client: Client, request: tasks.WaitRequest) -> int:
    """A stream that breaks is no exit status: the daemon is asked again when it is back."""
    while True:
        with expecting(Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            answer = await client.call(calls.TASK_WAIT, request, deadline=_WAIT_AT_A_TIME, patient=True)
            return answer.exit_status


async def _end_process(client: Client, container_id: str, exec_id: str) -> None:
    """The process is forgotten, killed if need be. What is left goes with the task."""
    delete = tasks.DeleteProcessRequest(container_id=container_id, exec_id=exec_id)
    with contextlib.suppress(DaemonError):
        try:
            await client.call(calls.PROCESS_DELETE, delete, deadline=START_DEADLINE)
        except DaemonError as error:
            if error.code is Code.NOT_FOUND:
                return
            kill = tasks.KillRequest(container_id=container_id, exec_id=exec_id, signal=signal.SIGKILL)
            await client.call(calls.TASK_KILL, kill)
            wait = tasks.WaitRequest(container_id=container_id, exec_id=exec_id)
            await client.call(calls.TASK_WAIT, wait)
            await client.call(calls.PROCESS_DELETE, delete, deadline=START_DEADLINE)
