"""`forgeyard ps`: the server's attempts; where none listens, those of a state directory."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forgeyard_api import sandbox_commands
from forgeyard_api.cli_flags import StateDir
from forgeyard_api.main import as_usage, say
from forgeyard_api.operate.server import Json, Socket, ask, socket_path, why_unreachable
from forgeyard_model.errors import InvalidRequest

if TYPE_CHECKING:
    from forgeyard_api.client.calls import Calls
    from forgeyard_api.operate.tables import Shown
    from forgeyard_api.wire.messages import executor as wire

INTERVAL: Final = 2.0


def ps(
    *,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, on a terminal.")] = False,
    as_json: Json = False,
    socket: Socket = None,
    state_dir: StateDir = None,
) -> int:
    """List attempts: the server's; or with --state-dir, and where no server listens, those of a state directory."""
    if state_dir is not None and socket is None:
        return sandbox_commands.ps(state_dir, as_json)
    with as_usage():
        if state_dir is not None:
            raise InvalidRequest("--state-dir", state_dir, "goes not with --socket: keep one")
    path = socket_path(socket)
    why = why_unreachable(path) if socket is None else ""
    if why:
        say(f"{why}; these are the attempts of the state directory")
        return sandbox_commands.ps(None, as_json)
    return _of_server(path, everything=everything, watch=watch, as_json=as_json)


def _of_server(path: Path, *, everything: bool, watch: bool, as_json: bool) -> int:
    from forgeyard_api.operate.tables import on_terminal

    async def once(calls: Calls) -> None:
        from forgeyard_api.operate.attempts import HEAD, attempt_json, attempt_row

        found = await listed(calls, everything=everything)
        if as_json:
            typer.echo(json.dumps([attempt_json(attempt) for attempt in found]))
        else:
            typer.echo(sandbox_commands.table(HEAD, [attempt_row(attempt) for attempt in found]))

    async def again_and_again(calls: Calls) -> None:
        from forgeyard_api.operate.tables import keep_drawing

        await keep_drawing(lambda: _shown(calls, everything=everything), INTERVAL)

    if watch and on_terminal() and not as_json:
        with suppress(KeyboardInterrupt):
            ask(path, again_and_again)
    else:
        ask(path, once)
    return 0


async def _shown(calls: Calls, *, everything: bool) -> Shown:
    from forgeyard_api.operate.attempts import HEAD, attempt_row
    from forgeyard_api.operate.tables import Shown

    found = await listed(calls, everything=everything)
    return Shown(HEAD, [attempt_row(attempt) for attempt in found], f"{len(found)} attempts")


async def listed(calls: Calls, *, everything: bool) -> list[wire.Attempt]:
    """The attempts that the caller may see, oldest first; those that have ended only with `everything`."""
    from forgeyard_api.wire.messages import executor as wire

    answer = await calls.call("ListSandboxes", wire.ListSandboxesRequest())
    return [each for each in answer.attempts if everything or each.state != wire.ATTEMPT_STATE_ENDED]
