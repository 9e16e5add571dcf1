"""The running server, as the operator's commands ask it."""

from __future__ import annotations

import socket as sockets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

if TYPE_CHECKING:
    from forgeyard_api.client.calls import Calls

T = TypeVar("T")

Socket = Annotated[
    Path | None,
    typer.Option("--socket", metavar="PATH", envvar="FORGEYARD_SOCKET", help="Where the server listens."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="An attempt, a sandbox, or an unambiguous beginning of one.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]

_CONNECT_SECONDS: Final = 5.0


def socket_path(given: Path | None) -> Path:
    """Where the server listens: the flag's, or the configuration's."""
    if given is not None:
        return given.absolute()
    from forgeyard_api.configured import configured

    return Path(configured(None).serve.socket)


def why_unreachable(path: Path) -> str:
    """Why nobody can be asked at `path`, in words; empty where a server listens."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return f"no server listens at {path}"
        except OSError as error:
            return f"the server at {path} can't be asked: {error.strerror or error}"
    return ""


def ask(given: Path | None, body: Callable[[Calls], Awaitable[T]], *, reconnect: float = 0.0) -> T:
    """Await `body` with a connection to the server.

    :param reconnect: seconds for which a server that restarts is waited for, once it was there.
    :raises ExecutorError: nobody listens, or the server says so.
    """
    import asyncio

    path = socket_path(given)
    why = why_unreachable(path)
    if why:
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "server_unavailable",
            why,
            resolution="start one with `forgeyard serve`, name its --socket, or be one of its allowed uids",
        )
    return asyncio.run(_connected(path, body, reconnect))


async def _connected(path: Path, body: Callable[[Calls], Awaitable[T]], reconnect: float) -> T:
    try:
        from forgeyard_api.client.calls import connected
    except ModuleNotFoundError as error:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "not_installed",
            f"asking a server needs the package {error.name}",
            resolution='pip install "forgeyard-executor[serve]"',
        ) from error
    async with connected(f"unix:{path}", reconnect=reconnect) as calls:
        return await body(calls)
