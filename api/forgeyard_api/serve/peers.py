"""Who is at the other end of a Unix socket: asked of the kernel when a connection is accepted, and of nobody else.

gRPC accepts connections itself and tells nobody whose they are. So the socket that callers see is ours: each
connection is accepted here, its process is asked for (SO_PEERCRED), and its bytes are passed on to gRPC's own socket
in a directory that only this process may enter, from an address that names the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from forgeyard_api.observe import audit
from forgeyard_api.serve.attempt_types import Caller
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

log: Final = logging.getLogger("forgeyard.serve")

_CREDENTIALS: Final = struct.Struct("3i")
_PIECE: Final = 64 << 10
_BACKLOG: Final = 128
_MAX_SOCKET_PATH: Final = 107
"""Of sun_path, less its end (unix(7))."""
_LONGEST_NAME: Final = len("/peer-1000000000")
_FLUSH_SECONDS: Final = 1.0
MAX_CONNECTIONS: Final = 512
"""Open at once; further ones are closed, so that callers can't take the server's descriptors."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may connect, by uid, and which of them are operators."""

    uids: frozenset[int]
    operators: frozenset[int]


class Peers:
    """The socket that callers see, and the one that gRPC listens on."""

    def __init__(self, path: Path, inner: Path, allowed: Allowed) -> None:
        self.allowed = allowed
        self._path = path
        self._inner = inner
        self._callers: dict[str, Caller] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, allowed: Allowed) -> AsyncIterator[Self]:
        """Listen at `path`, in a directory made for root alone where there is none.

        :raises ExecutorError: IO_FAILED, when another server listens there or the path can't be used.
        """
        inner = path.with_name(f".{path.name}")
        peers = cls(path, inner, allowed)
        listening = _listen(path, allowed)
        try:
            _make_anew(inner)
            server = await asyncio.start_unix_server(peers._accept, sock=listening, backlog=_BACKLOG, limit=_PIECE)
            try:
                yield peers
            finally:
                server.close()
                for task in list(peers._tasks):
                    task.cancel()
                if peers._tasks:
                    await asyncio.wait(peers._tasks)
                await asyncio.to_thread(path.unlink, missing_ok=True)
        finally:
            shutil.rmtree(inner, ignore_errors=True)

    @property
    def target(self) -> str:
        """Where gRPC has to listen."""
        return f"unix:{self._inner / 'grpc.sock'}"

    def caller_of(self, context: Any) -> Caller:
        """Who makes a call, of which gRPC knows only the address that it was passed on from.

        :raises ExecutorError: UNSUPPORTED, not_allowed, for a connection that did not come through here.
        """
        caller = self._callers.get(context.peer())
        if caller is None:
            raise ExecutorError(ExecutorErrorKind.UNSUPPORTED, "not_allowed", "nobody knows whose connection this is")
        return caller

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by asyncio for each connection. What is cancelled before it has begun is closed too."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            writer.transport.abort()

        task.add_done_callback(ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            caller = self._identified(writer.get_extra_info("socket"))
            if caller is not None:
                await self._pass_on(caller, reader, writer)
        except OSError as error:
            log.debug("a connection broke: %s", error)
        finally:
            await _closed(writer)

    def _identified(self, connection: socket.socket) -> Caller | None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(raw)
        if uid not in self.allowed.uids:
            audit.connection_refused(str(self._path), f"uid {uid} may not connect", uid=uid, gid=gid, pid=pid)
            return None
        if len(self._callers) >= MAX_CONNECTIONS:
            why = f"more than {MAX_CONNECTIONS} connections: one of uid {uid} is closed"
            audit.connection_refused(str(self._path), why, uid=uid, gid=gid, pid=pid)
            return None
        self._number += 1
        caller = Caller(uid, gid, pid, operator=uid in self.allowed.operators, connection=f"peer-{self._number}")
        audit.connected(caller, str(self._path))
        return caller

    async def _pass_on(self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = self._inner / caller.connection
        onward = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        onward.setblocking(False)
        name = f"unix:{address}"
        try:
            onward.bind(str(address))
            self._callers[name] = caller
            await asyncio.get_running_loop().sock_connect(onward, str(self._inner / "grpc.sock"))
            inner_reader, inner_writer = await asyncio.open_unix_connection(sock=onward, limit=_PIECE)
            ways = (_copy(reader, inner_writer), _copy(inner_reader, writer))
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                try:
                    await asyncio.wait(tasks)
                finally:
                    await _closed(inner_writer)
        finally:
            self._callers.pop(name, None)
            onward.close()
            address.unlink(missing_ok=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side closes. A reader that does not read holds up its own writer alone."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Once what is left has been sent; soon, also where nobody reads it any more."""
    writer.close()
    try:
        async with asyncio.timeout(_FLUSH_SECONDS):
            await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        log.debug("a connection was cut off: %s", error)
    finally:
        writer.transport.abort()


def _listen(path: Path, allowed: Allowed) -> socket.socket:
    """A bound socket with mode 0600, or 0666 where more than root may connect: then the kernel's word decides."""
    others = allowed.uids - {os.geteuid()}
    try:
        # A directory that is there is somebody else's to open and shut: it may be /run.
        path.parent.mkdir(mode=0o711 if others else 0o700, parents=True, exist_ok=True)
        if others and not path.parent.stat().st_mode & stat.S_IXOTH:
            raise _shut(path.parent)
        if path.is_socket():
            _refuse_served(path)
            path.unlink()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            old = os.umask(0o177)
            try:
                listening.bind(str(path))
            finally:
                os.umask(old)
            if others:
                path.chmod(0o666)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise _unusable(path, error) from error
    return listening


def _shut(directory: Path) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "socket_directory",
        f"not everybody in serve.allowed_uids can pass through {directory}",
        resolution=f"chmod o+x {directory}, or name another path with serve.socket",
    )


def _make_anew(inner: Path) -> None:
    """Nobody listens at the socket that this belongs to: what is there is a dead server's."""
    try:
        shutil.rmtree(inner, ignore_errors=True)
        inner.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable(inner, error) from error
    if len(os.fsencode(inner)) + _LONGEST_NAME > _MAX_SOCKET_PATH:
        raise _unusable(inner, OSError(errno.ENAMETOOLONG, "too long for the names of sockets in it"))


def _unusable(path: Path, error: OSError) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "socket",
        f"can't listen at {path}",
        details=error.strerror or str(error),
        resolution="name another path with serve.socket, or mend this one",
    )


def _refuse_served(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "socket_served",
        f"another server listens at {path}",
        resolution="stop that one, or name another path with serve.socket",
    )
