"""`forgeyard top`: what every container uses, as it runs."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forgeyard_api.main import as_usage
from forgeyard_api.operate.server import Json, Socket, ask
from forgeyard_api.sandbox_commands import table
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.units import format_size, parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forgeyard_api.client.calls import Calls
    from forgeyard_api.operate.tables import Shown

HEAD: Final = ("ATTEMPT", "CONTAINER", "CPU", "MEMORY", "PIDS", "DISK", "STATE")
_NANOSECONDS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Usage:
    """One container at one moment. cpu: cores, since the last look. memory, disk: bytes. None: not known."""

    attempt_id: str
    container: str
    container_id: str
    state: str
    at: datetime | None = None
    cpu_seconds: float | None = None
    cpu: float | None = None
    memory: int | None = None
    pids: int | None = None
    disk: int | None = None

    @property
    def row(self) -> tuple[str, ...]:
        """Below HEAD."""
        return (
            self.attempt_id,
            self.container,
            "" if self.cpu is None else f"{self.cpu * 100:.1f}%",
            "" if self.memory is None else format_size(self.memory),
            "" if self.pids is None else str(self.pids),
            "" if self.disk is None else format_size(self.disk),
            self.state,
        )


def top(
    *,
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="Between two looks.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Two looks, then end; so always where there is no terminal.")] = (
        False
    ),
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Show what the containers of running attempts use: processors, memory, processes, disk."""
    from forgeyard_api.operate.tables import keep_drawing, on_terminal

    with as_usage():
        seconds = parse_duration(interval, field="--interval")

    async def drawing(calls: Calls) -> None:
        watched = Watched(calls)
        await keep_drawing(watched.shown, seconds)

    async def two_looks(calls: Calls) -> None:
        import asyncio

        watched = Watched(calls)
        await watched.look()
        await asyncio.sleep(seconds)
        found = await watched.look()
        if as_json:
            typer.echo(json.dumps([_json(usage) for usage in found]))
        else:
            typer.echo(table(HEAD, [usage.row for usage in found]))

    if once or as_json or not on_terminal():
        ask(socket, two_looks)
    else:
        with suppress(KeyboardInterrupt):
            ask(socket, drawing)
    return 0


class Watched:
    """The containers of a server, each look compared with the one before."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._before: Mapping[str, Usage] = {}

    async def look(self) -> tuple[Usage, ...]:
        """What they use now."""
        import asyncio

        from forgeyard_api.wire.messages import executor as wire

        request = wire.ListSandboxesRequest(states=[wire.ATTEMPT_STATE_RUNNING])
        attempts = (await self._calls.call("ListSandboxes", request)).attempts
        parts = await asyncio.gather(*(self._inspected(attempt.attempt_id) for attempt in attempts))
        found = tuple(self._since_before(usage) for part in parts for usage in part)
        self._before = {usage.container_id: usage for usage in found}
        return found

    async def shown(self) -> Shown:
        """As a table."""
        from forgeyard_api.operate.tables import Shown

        found = await self.look()
        return Shown(HEAD, [usage.row for usage in found], f"{len(found)} containers; Ctrl-C ends")

    async def _inspected(self, attempt_id: str) -> tuple[Usage, ...]:
        from forgeyard_api.wire.messages import executor as wire

        try:
            answer = await self._calls.call("Inspect", wire.InspectRequest(attempt_id=attempt_id))
        except ForgeyardError as error:
            if getattr(error, "reason", "") == "no_such_attempt":
                return ()  # it ended between the two calls
            raise
        if not answer.containers:
            # Its backend does not answer in time; that is seen here, and holds up nothing.
            return (Usage(attempt_id, "", attempt_id, "unknown"),)
        return tuple(_usage(attempt_id, container) for container in answer.containers)

    def _since_before(self, usage: Usage) -> Usage:
        from dataclasses import replace

        before = self._before.get(usage.container_id)
        if before is None or None in (before.at, before.cpu_seconds, usage.at, usage.cpu_seconds):
            return usage
        seconds = (usage.at - before.at).total_seconds()  # type: ignore[operator]  # neither is None
        spent = usage.cpu_seconds - before.cpu_seconds  # type: ignore[operator]  # as above
        return replace(usage, cpu=max(0.0, spent / seconds)) if seconds > 0 else usage


def _usage(attempt_id: str, container: Any) -> Usage:
    if not container.HasField("usage"):
        return Usage(attempt_id, container.name, container.container_id, container.state)
    used = container.usage

    def known(name: str) -> int | None:
        return getattr(used, name) if used.HasField(name) else None

    cpu = known("cpu_nanoseconds")
    return Usage(
        attempt_id,
        container.name,
        container.container_id,
        container.state,
        at=used.at.ToDatetime(tzinfo=UTC),
        cpu_seconds=None if cpu is None else cpu / _NANOSECONDS,
        memory=known("memory_bytes"),
        pids=known("pids"),
        disk=known("disk_bytes"),
    )


def _json(usage: Usage) -> dict[str, Any]:
    return {**asdict(usage), "at": None if usage.at is None else usage.at.isoformat()}
