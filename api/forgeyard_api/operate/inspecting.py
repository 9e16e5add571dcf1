"""`forgeyard inspect`: one attempt in every detail."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgeyard_api.operate.server import Name, Socket, ask
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest

if TYPE_CHECKING:
    from forgeyard_api.client.calls import Calls
    from forgeyard_api.wire.messages import executor as wire


def inspect(
    name: Name,
    *,
    bundle: Annotated[bool, typer.Option("--bundle", help="The config.json of its bundle, byte for byte.")] = False,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="With --bundle: of a service of its.")] = "",
    socket: Socket = None,
) -> int:
    """Show an attempt as JSON: its state, its containers, what they use, its result; or with --bundle what it runs."""
    found = ask(socket, lambda calls: inspected(calls, name))
    if bundle:
        sys.stdout.buffer.write(container_of(found, service).bundle)
    else:
        typer.echo(json.dumps(_json(found), indent=2))
    return 0


async def inspected(calls: Calls, name: str) -> wire.InspectResponse:
    """The server's answer.

    :raises ExecutorError: it has no such attempt.
    """
    from forgeyard_api.wire.messages import executor as wire

    answer: wire.InspectResponse = await calls.call("Inspect", wire.InspectRequest(attempt_id=name))
    return answer


def container_of(found: wire.InspectResponse, service: str) -> wire.Container:
    """The container of the job, or of a service.

    :raises ExecutorError: LOST, when it has none any more, or its backend does not answer.
    :raises InvalidRequest: it has no such service.
    """
    if not found.containers:
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "no_container",
            f"{found.attempt.attempt_id} has no container at this moment",
            resolution="inspect it while it is prepared or runs; `forgeyard bundle generate` makes a job's bundle",
        )
    if not service:
        return found.containers[0]
    for container in found.containers[1:]:
        if container.name == service:
            return container
    names = ", ".join(container.name for container in found.containers[1:]) or "none"
    raise InvalidRequest("--service", service, f"the attempt has {names}")


def _json(found: wire.InspectResponse) -> dict[str, Any]:
    from forgeyard_api.operate.attempts import attempt_json

    return {**attempt_json(found.attempt), "containers": [_container(each) for each in found.containers]}


def _container(container: wire.Container) -> dict[str, Any]:
    names = ("name", "container_id", "sandbox_id", "state", "rootfs", "bundle_digest", "plan_digest", "cgroup")
    used = container.usage
    usage = {
        name: getattr(used, name)
        for name in ("cpu_nanoseconds", "memory_bytes", "pids", "disk_bytes")
        if used.HasField(name)
    }
    return {
        **{name: getattr(container, name) for name in names},
        "pid": container.pid or None,
        "image": container.image or None,
        "address": container.address or None,
        "usage": usage or None,
    }
