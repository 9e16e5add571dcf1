"""`GET /metrics` on a Unix socket or a port of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import h11
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

log: Final = logging.getLogger("forgeyard.serve")

ANSWER_SECONDS: Final = 10.0
"""For a whole connection. Who is slower is hung up on."""
MAX_CONNECTIONS: Final = 16
_PIECE: Final = 64 << 10


@asynccontextmanager
async def metrics_served(where: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve `registry` for the block; yields the address.

    :param where: path of a Unix socket (mode 0600), or 127.0.0.1:PORT; port 0 takes a free one.
    :raises ExecutorError: IO_FAILED, metrics_socket.
    """
    try:
        listening = _unix(Path(where)) if where.startswith("/") else _loopback(where)
    except OSError as error:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "metrics_socket",
            f"/metrics can't be served at {where}",
            details=error.strerror or str(error),
            resolution="name another path or port with serve.metrics",
        ) from error
    answering = _Answering(registry)
    server = await asyncio.start_server(answering.connection, sock=listening, limit=_PIECE)
    address = listening.getsockname()
    try:
        yield where if where.startswith("/") else f"{address[0]}:{address[1]}"
    finally:
        server.close()
        await answering.close()
        if where.startswith("/"):
            Path(where).unlink(missing_ok=True)  # noqa: ASYNC240  # one name of a local directory


def _unix(path: Path) -> socket.socket:
    if path.is_socket():
        _refuse_served(path)
        path.unlink()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        listening.bind(str(path))
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(old)
    return listening


def _refuse_served(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise OSError("another server listens there")


def _loopback(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
    except (OSError, OverflowError) as error:
        listening.close()
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    return listening


class _Answering:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._tasks: set[asyncio.Task[None]] = set()

    def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one; when there are too many, hang up."""
        crowded = len(self._tasks) >= MAX_CONNECTIONS
        task = asyncio.ensure_future(self._serve(None if crowded else reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader | None, writer: asyncio.StreamWriter) -> None:
        """One request, one answer, and good-bye."""
        try:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    if reader is not None:
                        writer.write(await self._answer(reader))
                        await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        """Hang up on everybody."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        connection = h11.Connection(h11.SERVER)
        try:
            request = await _request(connection, reader)
        except h11.RemoteProtocolError as error:
            return _response(connection, error.error_status_hint, b"bad request\n")
        if request is None:
            return b""
        if request.target.partition(b"?")[0] != b"/metrics":
            return _response(connection, 404, b"only /metrics is here\n")
        if request.method != b"GET":
            return _response(connection, 405, b"only GET is answered\n")
        accept = next((value.decode("latin-1") for name, value in request.headers if name == b"accept"), "")
        encoder, content_type = choose_encoder(accept)
        return _response(connection, 200, encoder(self._registry), content_type)


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The head of a request; None when the other side hung up before its end."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await reader.read(_PIECE))


def _response(connection: h11.Connection, status: int, body: bytes, content_type: str = "text/plain") -> bytes:
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Connection", "close")]
    parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)
