"""One more process in a running container, by Podman's exec: an exit code is read from its state, never guessed.

Podman's exec takes a user, an environment and a directory; capabilities, limits, no_new_privs and the filter are
those of init. So a process that asks for other ones is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forgeyard_host.processes import pidfd_open, send_signal
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.podman.client import PodmanClient
from forgeyard_runtimes.podman.errors import NotThere, Refused, hangs, not_understood, unsupported

_AS_INIT: Final = ("capabilities", "noNewPrivileges", "rlimits", "terminal")
_NO_EXEC: Final = (126, 127)
_SAID: Final = b"OCI runtime"
_PODMANS_OWN: Final = 125
"""What Podman writes down for a process whose end it did not see, as when PID 1 took it along. Also anybody's code."""


def exec_now(client: PodmanClient, name: str, init: Mapping[str, Any], process: bytes, deadline: float) -> int:
    """Run `process`, a compiled process.json, for at most `deadline` seconds. Blocks.

    :param init: the container's own process, which it must not exceed.
    :raises ExecutorError: UNSUPPORTED for other rights than init's; SPAWN_FAILED when it could not be started; TIMEOUT
        when it does not end (it is killed then); LOST when its end was not seen.
    """
    until = time.monotonic() + deadline
    session = _create(client, name, init, json.loads(process))
    try:
        said = client.drain_now(
            f"exec/{session}/start", {"Detach": False, "Tty": False}, max(0.1, until - time.monotonic())
        )
    except Refused as error:
        raise _not_started(error.details) from error
    except ExecutorError as error:
        if error.kind is not ExecutorErrorKind.TIMEOUT:
            raise
        _kill(client, name, session)
        raise hangs("a process in the container", deadline) from error
    code = _exit_code(client.call_now("GET", f"exec/{session}/json"), said)
    if code == _PODMANS_OWN and not _runs(client, name):
        raise _unseen()
    return code


def _create(client: PodmanClient, name: str, init: Mapping[str, Any], process: Mapping[str, Any]) -> str:
    differing = [f"process.{field}" for field in _AS_INIT if process.get(field) != init.get(field)]
    if differing:
        raise unsupported(
            "podman_exec_rights",
            "Podman's exec has init's rights and no others",
            "compile the process from the container's own plan",
            details=", ".join(differing),
        )
    answer = client.call_now("POST", f"containers/{name}/exec", body=_request(process))
    try:
        return str(answer["Id"])
    except (KeyError, TypeError) as error:
        raise not_understood("exec", answer) from error


def _request(process: Mapping[str, Any]) -> dict[str, Any]:
    user = process["user"]
    return {
        "Cmd": list(process["args"]),
        "Env": list(process["env"]),
        "User": f"{user['uid']}:{user['gid']}",
        "WorkingDir": process["cwd"],
        "Privileged": False,
        "Tty": False,
        "AttachStdin": False,
        # Only of what is attached does Podman record the end in time; what comes is dropped.
        "AttachStdout": True,
        "AttachStderr": True,
    }


def _exit_code(state: Mapping[str, Any], said: bytes) -> int:
    """A closed stream is no end: only a session that does not run any more has a code.

    For a program that is not there Podman has a code as well, and its own words at the end of the stream.
    """
    if state.get("Running") or "ExitCode" not in state:
        raise _unseen()
    code = int(state["ExitCode"])
    if code in _NO_EXEC and _SAID in said:
        raise _not_started(said[8:].decode("utf-8", "replace"))
    return code


def _runs(client: PodmanClient, name: str) -> bool:
    try:
        state = client.call_now("GET", f"containers/{name}/json")["State"]
    except NotThere:
        return False
    # Podman may not have heard yet that PID 1 is dead.
    return state.get("Status") == "running" and Path(f"/proc/{state['Pid']}/ns/pid").exists()


def _kill(client: PodmanClient, name: str, session: str) -> None:
    """End it, if it is still there: a number that has become another process's is not in the container's group."""
    pid = int(client.call_now("GET", f"exec/{session}/json").get("Pid", 0))
    group = str(client.call_now("GET", f"containers/{name}/json")["State"].get("CgroupPath", ""))
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if pid > 0 and group:
            pidfd = pidfd_open(pid)
            try:
                if group in Path(f"/proc/{pid}/cgroup").read_text():
                    send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def _unseen() -> ExecutorError:
    brief = "the end of a process in the container was not seen"
    return ExecutorError(ExecutorErrorKind.LOST, "podman_exec_lost", brief)


def _not_started(details: str) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.SPAWN_FAILED,
        "runtime_output",
        "Podman could not run a process in the container",
        details=details,
    )
