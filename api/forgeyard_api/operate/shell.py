"""`forgeyard shell`: one more process in a running attempt's container, on this terminal.

It gets the container's own namespaces, control group, filter and limits, and the rights of its PID 1, which has no
capability and can gain none. It is a process of the job: it ends with the attempt, or when the running step ends and
what that left behind is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forgeyard_api.cli_flags import StateDir
from forgeyard_api.configured import configured
from forgeyard_api.main import say
from forgeyard_api.operate.server import Name, Socket, ask, socket_path, why_unreachable
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

if TYPE_CHECKING:
    from forgeyard_model.config import ExecutorConfig

COMMAND_LINES: Final = ("runc", "crun")
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLACES: Final = ("/work/source", "/work/build")


@dataclass(frozen=True, slots=True)
class Target:
    """A container that runs. files: the directory of the attempt's own files."""

    attempt_id: str
    sandbox_id: str
    runtime: str
    files: Path


def shell(
    name: Name,
    command: Annotated[list[str] | None, typer.Argument(metavar="[CMD...]", help="Else /bin/sh.")] = None,
    *,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="In a service of its.")] = "",
    socket: Socket = None,
    state_dir: StateDir = None,
) -> int:
    """Run a shell, or a command, inside a running attempt: the same sandbox, with no more rights than the job has.

    For operators, and recorded in the security audit. Exits as the command did.
    """
    config = configured(state_dir)
    _refuse_unless_operator(config)
    if state_dir is None and not why_unreachable(socket_path(socket)):
        target = _of_server(name, service, socket)
    else:
        target = _of_state(config, name, service)
    _refuse_unless_command_line(target)
    _record(config, target, service)
    return run_inside(target, command or ["/bin/sh"])


def _refuse_unless_operator(config: ExecutorConfig) -> None:
    if os.geteuid() != 0 or os.getuid() not in config.serve.operators:
        raise _unsupported("not_allowed", "a shell in an attempt is for operators", "run it as root, if you are one")


def _refuse_unless_command_line(target: Target) -> None:
    if target.runtime not in COMMAND_LINES:
        raise _unsupported(
            "no_shell",
            f"{target.runtime} offers no terminal in a container that keeps to the job's policy",
            f"it works for {' and '.join(COMMAND_LINES)}; `forgeyard bundle export --podman` shows another way",
        )


def _of_server(name: str, service: str, socket: Path | None) -> Target:
    from forgeyard_api.operate.inspecting import container_of, inspected

    found = ask(socket, lambda calls: inspected(calls, name))
    container = container_of(found, service)
    root = Path(json.loads(container.bundle)["root"]["path"])
    return Target(found.attempt.attempt_id, container.sandbox_id, found.attempt.runtime, root.parent / "files")


def _of_state(config: ExecutorConfig, name: str, service: str) -> Target:
    from forgeyard_executor import list_sandboxes
    from forgeyard_executor.state import StatePaths
    from forgeyard_model.identity import SandboxId

    found = [
        item
        for item in list_sandboxes(config.state_dir)
        if item.state == "running" and (item.sandbox_id.startswith(name) or item.attempt_id == name)
    ]
    services = [(item, each) for item in found for each in item.services if each.name == service]
    if len(found) != 1 or (service and not services):
        what = f"service {service!r} of {name!r}" if found and service else repr(name)
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "no_such_attempt",
            f"{len(found) if len(found) > 1 else 'no'} running attempts in {config.state_dir} match {what}",
            resolution="`forgeyard ps` lists them",
        )
    sandbox = SandboxId(services[0][1].sandbox_id if service else found[0].sandbox_id)
    files = StatePaths.at(config.state_dir).attempt(sandbox) / "mnt" / "files"
    return Target(found[0].attempt_id, sandbox.value, config.runtime, files)


def _record(config: ExecutorConfig, target: Target, service: str) -> None:
    """Before anything runs: what can't be recorded does not happen.

    :raises ExecutorError: the configured audit can't be written.
    """
    from forgeyard_api.observe.audit import Event, record
    from forgeyard_api.observe.audit_writer import auditing

    if not config.serve.audit:
        say("note: no security audit is configured (serve.audit): this is recorded nowhere")
    with auditing(config.serve.audit):
        record(
            Event.EXEC,
            f"a shell in attempt {target.attempt_id!r}",
            uid=os.getuid(),
            pid=os.getpid(),
            attempt_id=target.attempt_id,
            sandbox=target.sandbox_id,
            service=service or None,
        )


def run_inside(target: Target, command: Sequence[str]) -> int:
    """Run `command` there, on our own stdin, stdout and stderr; its exit code.

    :raises ExecutorError: it can't be run.
    """
    import asyncio

    from forgeyard_model.identity import SandboxId
    from forgeyard_runtimes.cli_runtime import CliRuntime
    from forgeyard_runtimes.contract import ContainerRef

    runtime = asyncio.run(CliRuntime.find(target.runtime))
    ref = ContainerRef(SandboxId(target.sandbox_id).container, target.files)
    try:
        config = json.loads((ref.bundle / "config.json").read_bytes())
    except OSError as error:
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "no_container",
            f"{target.attempt_id} has no container here",
            details=f"{error.strerror}: {error.filename}",
            resolution="run it on the server's host, while the attempt runs",
        ) from error
    with tempfile.TemporaryDirectory(prefix="forgeyard-shell-") as directory:
        process = Path(directory, "process.json")
        process.write_text(json.dumps(compiled(config, command, terminal=sys.stdin.isatty() and sys.stdout.isatty())))
        done = subprocess.run(runtime.exec_argv(ref, process, Path(directory, "log")), check=False)  # the runtime
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def compiled(config: Mapping[str, Any], command: Sequence[str], *, terminal: bool) -> dict[str, Any]:
    """process.json: the container's own process, with other arguments. Nothing of its rights is changed."""
    places = {mount["destination"] for mount in config.get("mounts", ())}
    cwd = next((place for place in _PLACES if place in places), config["process"].get("cwd", "/"))
    env = [f"PATH={PATH}", "HOME=/home/forgeyard", "LANG=C.UTF-8", f"TERM={os.environ.get('TERM', 'dumb')}"]
    return {**config["process"], "args": list(command), "env": env, "cwd": cwd, "terminal": terminal}


def _unsupported(reason: str, brief: str, resolution: str) -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, resolution=resolution)
