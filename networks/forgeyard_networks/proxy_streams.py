"""Connections of the proxy: their buffers, their ends, and time without a byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

CHUNK: Final = 256 << 10
"""Bytes read at a time, as asyncio takes them from a socket: in smaller parts, tunnels were half as fast."""
_READ_AHEAD: Final = 128 << 10
_RESET: Final = struct.pack("ii", 1, 0)
_MOST_REST: Final = 1 << 20


@dataclass(slots=True)
class Traffic:
    """Bytes of one request: `up` from the job, `down` to it."""

    up: int = 0
    down: int = 0


class Stream:
    """A reader and a writer of one connection.

    `drain` returns when the kernel has all that was written, so a slow side holds the fast one, and there is nothing
    left to wait for at the end.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, beneath: Stream | None = None
    ) -> None:
        """:param beneath: the connection that this one was made upon."""
        self.reader, self.writer = reader, writer
        # A writer that is collected closes its transport.
        self._beneath = beneath
        writer.transport.set_write_buffer_limits(high=0)

    @classmethod
    async def of(cls, connected: socket.socket, limit: int) -> Self:
        """Of a connected socket, which the stream owns from here on."""
        try:
            return cls(*await asyncio.open_connection(sock=connected, limit=limit))
        except BaseException:
            connected.close()
            raise

    @classmethod
    async def connect(cls, host: str, port: int, tls: ssl.SSLContext | None, name: str | None = None) -> Self:
        """:param name: that the certificate must have, with TLS.

        :raises OSError: with ssl.SSLError.
        """
        return cls(*await asyncio.open_connection(host, port, limit=_READ_AHEAD, ssl=tls, server_hostname=name))

    async def secured(self, tls: ssl.SSLContext, name: str) -> Stream:
        """TLS upon this connection. asyncio's own `StreamWriter.start_tls` leaves flow control to the old transport.

        :raises OSError: with ssl.SSLError.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_READ_AHEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport = await loop.start_tls(self.writer.transport, protocol, tls, server_hostname=name)
        if transport is None:
            raise ConnectionAbortedError("the connection closed during the TLS handshake")
        protocol.connection_made(transport)
        return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), self)

    async def send(self, data: bytes | bytearray) -> None:
        """:raises OSError: the peer is gone."""
        self.writer.write(data)
        await self.writer.drain()

    def end(self) -> None:
        """Tell the peer that no more comes, where the connection can: TLS can't."""
        if self.writer.can_write_eof():
            self.writer.write_eof()

    def close(self) -> None:
        """At once; what was sent and drained arrives. Idempotent."""
        self.writer.transport.abort()

    def reset(self) -> None:
        """At once, so that the peer can't take what it has for the whole."""
        found = self.writer.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError):  # the peer was faster
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()

    async def linger(self, seconds: float) -> None:
        """Read and drop what the peer still sends: closing on unread bytes resets, and takes the answer along."""
        with contextlib.suppress(OSError):  # includes TimeoutError: it had its time
            self.end()
            async with asyncio.timeout(seconds):
                left = _MOST_REST
                while left > 0 and (data := await self.reader.read(CHUNK)):
                    left -= len(data)


class Idle:
    """Around work that moves bytes: TimeoutError when none moved for `seconds`.

    One timer that looks at the clock now and then: moving it with every chunk would cost more than the chunk.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def expired(self) -> bool:
        """Whether a TimeoutError is from here."""
        return self._scope.expired()

    def touch(self) -> None:
        """Bytes moved."""
        self._last = self._loop.time()

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _look(self) -> None:
        left = self._last + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._scope.reschedule(self._loop.time())


async def together(*needed: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None] | None = None) -> None:
    """Until all of `needed` have ended, or any has failed: raises that failure itself. The rest is cancelled."""
    main = {asyncio.create_task(work) for work in needed}
    everything = main if beside is None else {*main, asyncio.create_task(beside)}
    waiting = set(everything)
    try:
        while not all(task.done() for task in main):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
