"""`forgeyard stop`, `wait` and `drain`: what an operator does about attempts, and about the host."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forgeyard_api.main import REFUSED, as_usage, one_line, say
from forgeyard_api.operate.server import Json, Name, Socket, ask
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.result import CancellationReason

if TYPE_CHECKING:
    from forgeyard_api.client.calls import Calls
    from forgeyard_api.wire.messages import executor as wire

RECONNECT: Final = 30.0
"""Seconds for which a server that restarts is waited for."""
_LOOK: Final = 1.0
"""Seconds between two looks at how many attempts a drained host still has."""
_UNTIL: Final = ("prepared", "running", "ended")


def stop(
    name: Name,
    *,
    kill: Annotated[bool, typer.Option("--kill", help="At once, without grace.")] = False,
    reason: Annotated[
        str, typer.Option("--reason", metavar="|".join(CancellationReason), help="What its result says.")
    ] = CancellationReason.USER.value,
    socket: Socket = None,
) -> int:
    """Stop an attempt: soft signal, grace, kill. Returns at once; `forgeyard wait` tells when it has ended."""
    with as_usage():
        why = _reason(reason)

    async def cancel(calls: Calls) -> None:
        from forgeyard_api.wire.convert import enum_number
        from forgeyard_api.wire.messages import executor as wire

        request = wire.CancelRequest(attempt_id=name, kill=kill)
        enum = wire.CancelRequest.DESCRIPTOR.fields_by_name["reason"].enum_type
        request.reason = enum_number(enum, why)  # type: ignore[assignment]  # a number of the enum
        await calls.call("Cancel", request)

    ask(socket, cancel)
    return 0


def _reason(text: str) -> CancellationReason:
    try:
        return CancellationReason(text)
    except ValueError as error:
        raise InvalidRequest("--reason", text, f"write {', '.join(CancellationReason)}") from error


def wait(
    name: Name,
    *,
    until: Annotated[str, typer.Option("--until", metavar="|".join(_UNTIL), help="How far it has to get.")] = "ended",
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Wait for an attempt; exits as `forgeyard run` would have: with the job's own code, or 125 without a result."""
    with as_usage():
        if until not in _UNTIL:
            raise InvalidRequest("--until", until, f"write {', '.join(_UNTIL)}")

    async def reach(calls: Calls) -> wire.Attempt:
        from forgeyard_api.client.attempt import reached
        from forgeyard_api.wire.messages import executor as wire

        return await reached(calls, name, getattr(wire, f"ATTEMPT_STATE_{until.upper()}"))

    attempt = ask(socket, reach, reconnect=RECONNECT)
    return _ended(attempt, as_json=as_json)


def _ended(attempt: wire.Attempt, *, as_json: bool) -> int:
    from forgeyard_api.operate.attempts import attempt_json, result_of, shown_state
    from forgeyard_api.wire.errors import error_of

    typer.echo(
        json.dumps(attempt_json(attempt)) if as_json else one_line(f"{attempt.attempt_id} {shown_state(attempt)}")
    )
    if attempt.HasField("error"):
        say(one_line(str(error_of(attempt.error))))
        return REFUSED
    return result_of(attempt).exit_code if attempt.HasField("result") else 0


def drain(
    *,
    until_empty: Annotated[bool, typer.Option("--wait", help="Return once no attempt is left.")] = False,
    undrain: Annotated[bool, typer.Option("--undrain", help="Take attempts in again.")] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Take no more attempts in; those that are there go on to their end."""
    with as_usage():
        if undrain and until_empty:
            raise InvalidRequest("--wait", "", "goes not with --undrain: keep one")

    async def ask_for_it(calls: Calls) -> Any:
        import asyncio

        found = await _drained(calls, on=not undrain)
        while until_empty and (found.running or found.queued):
            await asyncio.sleep(_LOOK)
            found = await _drained(calls, on=True)
        return found

    try:
        found = ask(socket, ask_for_it, reconnect=RECONNECT if until_empty else 0.0)
    except KeyboardInterrupt:
        say("the host stays drained; `forgeyard drain --undrain` takes that back")
        raise
    shown = {"draining": found.draining, "running": found.running, "queued": found.queued}
    with suppress(BrokenPipeError):
        state = "takes no attempts in" if found.draining else "takes attempts in"
        text = f"{state}; {found.running} running, {found.queued} queued"
        typer.echo(json.dumps(shown) if as_json else text)
    return 0


async def _drained(calls: Calls, *, on: bool) -> Any:
    from forgeyard_api.wire.messages import executor as wire

    return await calls.call("Drain", wire.DrainRequest(drain=on))
