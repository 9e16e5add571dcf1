"""Web servers and proxies that a test scripts byte by byte, and a fetch proxy in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any

from forgeyard_model.policy import NetworkDestination
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.proxy import FetchProxy
from forgeyard_networks.proxy_policy import ProxyLimits, ProxyPolicy
from forgeyard_networks.proxy_records import ProxyRecord

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@dataclass(slots=True)
class FakeWeb:
    """A server on a loopback port of its own. `seen`: requests as they arrived, head and body."""

    port: int
    seen: list[bytes] = field(default_factory=list)


@contextlib.asynccontextmanager
async def web(handler: Handler | bytes = OK, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeWeb]:
    """Serve connections with `handler`, or each with one request's answer of these bytes."""
    served: list[FakeWeb] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            if callable(handler):
                await handler(reader, writer)
            else:
                served[0].seen.append(await read_request(reader))
                writer.write(handler)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    served.append(FakeWeb(server.sockets[0].getsockname()[1]))
    try:
        yield served[0]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request with its body, as sent."""
    head = await reader.readuntil(b"\r\n\r\n")
    if found := re.search(rb"(?i)\r\ncontent-length: (\d+)", head):
        return head + await reader.readexactly(int(found[1]))
    if re.search(rb"(?i)\r\ntransfer-encoding: chunked", head):
        return head + await reader.readuntil(b"0\r\n\r\n")
    return head


def connect_proxy(authorization: str = "", *, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n", to: int = 0) -> Handler:
    """A proxy that tunnels every CONNECT to the loopback port `to`, whatever its target.

    :param authorization: what Proxy-Authorization must be; else it answers 407.
    """

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if authorization and f"\r\nProxy-Authorization: {authorization}\r\n".encode() not in head:
            writer.write(b'HTTP/1.1 407 No\r\nProxy-Authenticate: Basic realm="x"\r\nContent-Length: 0\r\n\r\n')
            return
        writer.write(answer)
        if not to:
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.close()

    return handler


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


@dataclass(slots=True)
class Proxied:
    """A fetch proxy under test. `records`: of its audit; `asked`: names it looked up."""

    proxy: FetchProxy
    port: int
    records: list[ProxyRecord]
    asked: list[str]
    more: asyncio.Event

    async def ask(self, request: bytes, *, end: bool = False) -> bytes:
        """Everything that comes back until the connection ends. `end`: of the sending side, after the request."""
        reader, writer = await self.open()
        writer.write(request)
        if end:
            writer.write_eof()
        try:
            return await reader.read()
        finally:
            writer.close()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to it."""
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)

    async def tunnel(self, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A tunnel that is open."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        return reader, writer

    async def settled(self, count: int, within: float = 5) -> list[ProxyRecord]:
        """The records, when there are `count`; a record comes after its connection has ended."""
        async with asyncio.timeout(within):
            while len(self.records) < count:
                self.more.clear()
                await self.more.wait()
        return self.records


def allow(*items: str | NetworkDestination) -> Allowlist:
    """Of host names and CIDRs, each with an optional ``:PORT``."""
    return Allowlist.from_destinations(
        [item if isinstance(item, NetworkDestination) else _parsed(item) for item in items]
    )


def _parsed(text: str) -> NetworkDestination:
    name, _, port = text.partition(":")
    ports = (int(port),) if port else ()
    return NetworkDestination(cidr=name, ports=ports) if "/" in name else NetworkDestination(host=name, ports=ports)


@contextlib.asynccontextmanager
async def proxied(
    allowed: Allowlist | ProxyPolicy,
    names: Mapping[str, Sequence[str]] | Callable[[str], Awaitable[Sequence[IPv4Address]]] | None = None,
    *,
    limits: ProxyLimits | None = None,
    listener: socket.socket | None = None,
    **options: Any,
) -> AsyncIterator[Proxied]:
    """A fetch proxy. `names`: what it finds when it looks names up."""
    asked: list[str] = []

    async def resolve(name: str) -> Sequence[IPv4Address]:
        asked.append(name)
        if callable(names):
            return await names(name)
        return [IPv4Address(text) for text in (names or {}).get(name, ())]

    policy = allowed if isinstance(allowed, ProxyPolicy) else ProxyPolicy(allowed)
    listening = listener or socket.create_server(("127.0.0.1", 0))
    records: list[ProxyRecord] = []
    more = asyncio.Event()

    def audit(record: ProxyRecord) -> None:
        records.append(record)
        more.set()

    port = listening.getsockname()[1]
    proxy = FetchProxy.serve(listening, policy=policy, resolve=resolve, limits=limits, audit=audit, **options)
    try:
        yield Proxied(proxy, port, records, asked, more)
    finally:
        await proxy.close()
