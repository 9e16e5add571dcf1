"""`forgeyard events`: what became of attempts, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgeyard_api.main import one_line
from forgeyard_api.operate.server import Json, Socket, ask

if TYPE_CHECKING:
    import asyncio

    from forgeyard_api.client.calls import Calls
    from forgeyard_api.wire.messages import executor as wire


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `attempt_id` is empty for what is the whole server's."""

    time: datetime
    attempt_id: str
    kind: str
    message: str = ""

    def text(self) -> str:
        """For people."""
        return one_line(f"{self.time.isoformat(timespec='milliseconds')} {self.kind} {self.attempt_id} {self.message}")

    def json(self) -> str:
        """For programs."""
        found = {"time": self.time.isoformat(), "kind": self.kind, "attempt_id": self.attempt_id or None}
        return json.dumps({**found, "message": self.message or None})


def events(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens from now.")] = False,
    attempt: Annotated[str, typer.Option("--attempt", metavar="NAME", help="Of one attempt, by its whole name.")] = "",
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """List when the attempts that the server knows were queued, ran and ended; with -f also what happens next.

    What was drained, lost or adopted is told only to those who follow: the server keeps no record of it.
    """

    async def show(calls: Calls) -> None:
        found = _followed(calls, attempt) if follow else _past(calls, attempt)
        async with aclosing(found) as listed:
            async for event in listed:
                typer.echo(event.json() if as_json else event.text())

    ask(socket, show)
    return 0


async def _past(calls: Calls, name: str) -> AsyncGenerator[Event, None]:
    from forgeyard_api.wire.messages import executor as wire

    attempts = (await calls.call("ListSandboxes", wire.ListSandboxesRequest())).attempts
    found = [event for each in attempts if name in ("", each.attempt_id) for event in _of(each)]
    for event in sorted(found, key=lambda event: event.time):
        yield event


def _of(attempt: wire.Attempt) -> list[Event]:
    from forgeyard_api.operate.attempts import shown_state, time_of

    steps = (("created_at", "queued"), ("started_at", "running"), ("finished_at", "ended"))
    return [
        Event(time, attempt.attempt_id, kind, shown_state(attempt) if kind == "ended" else "")
        for field, kind in steps
        if (time := time_of(attempt, field)) is not None
    ]


async def _followed(calls: Calls, name: str) -> AsyncGenerator[Event, None]:
    """First what was, then what comes: listened to from before the look back, so that nothing falls between."""
    import asyncio

    coming: asyncio.Queue[Event | BaseException] = asyncio.Queue()
    listening = asyncio.ensure_future(_listen(calls, name, coming))
    try:
        await asyncio.sleep(0)  # the call is on its way before the next one
        seen = set()
        async with aclosing(_past(calls, name)) as past:
            async for event in past:
                seen.add((event.attempt_id, event.kind))
                yield event
        while True:
            event_or_error = await coming.get()
            if isinstance(event_or_error, BaseException):
                raise event_or_error
            if (event_or_error.attempt_id, event_or_error.kind) not in seen or not event_or_error.attempt_id:
                yield event_or_error
    finally:
        listening.cancel()


async def _listen(calls: Calls, name: str, into: asyncio.Queue[Any]) -> None:
    from forgeyard_model.errors import ForgeyardError

    try:
        async for event in _told(calls, name):
            into.put_nowait(event)
    except ForgeyardError as error:
        into.put_nowait(error)


async def _told(calls: Calls, name: str) -> AsyncIterator[Event]:
    from forgeyard_api.wire.messages import executor as wire

    async with aclosing(calls.stream("Events", wire.EventsRequest(attempt_id=name))) as answers:
        async for answer in answers:
            yield Event(answer.time.ToDatetime(tzinfo=UTC), answer.attempt_id, answer.kind, answer.message)
