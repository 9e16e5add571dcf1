"""Ports of services on the host's loopback, for somebody who develops there. No firewall is opened for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from forgeyard_host.failures import describe
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.policy import PublishedPort

Connect = Callable[[str, int, float], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
_LOOPBACK: Final = "127.0.0.1"
_CONNECT_TIME: Final = 5.0
_CHUNK: Final = 64 << 10
_MOST: Final = 64


class Published:
    """Listens for the ports of one attempt and passes bytes on."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, ports: Sequence[PublishedPort], addresses: Mapping[str, str]) -> None:
        """Listen.

        :param addresses: of the services, by their names.
        :raises SandboxError: NETWORK_SETUP_FAILED, reason port_not_published; `close` is still to be called.
        """
        for port in ports:
            address = addresses.get(port.service)
            if address is None:
                raise _failed(port, "no service of this network has this name")
            try:
                server = await asyncio.start_server(self._handler(address, port.port), _LOOPBACK, port.host_port)
            except OSError as error:
                raise _failed(port, describe(error)) from error
            self._servers.append(server)

    async def close(self) -> None:
        """End every connection. Idempotent."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    def _handler(self, address: str, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(self._tasks) >= _MOST:
                writer.transport.abort()
                return
            task = asyncio.get_running_loop().create_task(self._serve(address, port, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: writer.transport.abort())

        return accept

    async def _serve(self, address: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await self._connect(address, port, _CONNECT_TIME)
        except OSError:  # the service is not there yet: its client sees the connection end, as it would without us
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass(reader, far_writer))
                group.create_task(_pass(far_reader, writer))
        finally:
            far_writer.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            await writer.drain()


def _failed(port: PublishedPort, cause: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED,
        "port_not_published",
        f"port {port.port} of {port.service} can't be published on 127.0.0.1:{port.host_port}",
        details=cause,
        resolution="choose another host_port",
    )
