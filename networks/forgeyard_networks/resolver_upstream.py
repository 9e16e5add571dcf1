"""Asking the host's name servers, from the executor's own network: UDP, then TCP for what UDP can't hold.

Each question has a socket of its own, so a random port, connected, so that the kernel drops what comes from elsewhere
and a server that is not there is known at once.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

from forgeyard_host.failures import describe
from forgeyard_networks.dns_wire import NotAnAnswer, Rcode

if TYPE_CHECKING:
    from types import ModuleType

    from forgeyard_networks.dns_codec import Answer, Query

DNS_PORT: Final = 53
_CODEC: Final = "forgeyard_networks.dns_codec"
_MOST_STRANGE: Final = 8
_FINAL: Final = (Rcode.NOERROR, Rcode.NXDOMAIN)


class UpstreamFailed(Exception):  # noqa: N818  the question goes unanswered; never leaves the resolver
    """No server answered."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Bounds in seconds and questions. `total` ends before a client's C library asks again (5 s)."""

    attempt: float = 1.5
    total: float = 4.5
    rounds: int = 2
    at_once: int = 64


class Upstream:
    """The name servers of a host, asked in their order; one that answered last is asked first."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        port: int = DNS_PORT,
        limits: UpstreamLimits | None = None,
        problem: str = "this host has no usable name server",
    ) -> None:
        """
        :param servers: addresses, as `host_resolvers` gives them.
        :param problem: why there are none.
        """
        self._servers = list(servers)
        self._port = port
        self._problem = problem
        self._limits = limits or UpstreamLimits()
        self._slots = asyncio.Semaphore(self._limits.at_once)
        self._loading = asyncio.Lock()
        self._codec: ModuleType | None = None

    async def ask(self, name: str, kind: int) -> Answer:
        """What is said of `name`: records, none, or that there is no such name.

        :raises UpstreamFailed: with the reasons of all servers.
        """
        if not self._servers:
            raise UpstreamFailed(self._problem)
        codec = self._codec or await self.load()
        causes: list[str] = []
        try:
            async with asyncio.timeout(self._limits.total), self._slots:
                for server, edns in self._attempts():
                    found = await self._try(server, codec.Query(name, kind, edns=edns), causes)
                    if found is not None:
                        self._prefer(server)
                        return found
        except TimeoutError:
            causes.append(f"no answer within {self._limits.total:g} s")
        raise UpstreamFailed("; ".join(dict.fromkeys(causes)))

    async def load(self) -> ModuleType:
        """Load the DNS library, once, in a thread. An executor that lives long does so before its first job."""
        async with self._loading:
            if self._codec is None:
                self._codec = await asyncio.to_thread(importlib.import_module, _CODEC)
        return self._codec

    def _attempts(self) -> Iterator[tuple[str, bool]]:
        """Servers in turn; from the second round on without EDNS, which some old ones fail at."""
        for number in range(self._limits.rounds):
            for server in tuple(self._servers):
                yield server, number == 0

    def _prefer(self, server: str) -> None:
        if self._servers[0] != server:
            self._servers.remove(server)
            self._servers.insert(0, server)

    async def _try(self, server: str, query: Query, causes: list[str]) -> Answer | None:
        try:
            async with asyncio.timeout(self._limits.attempt):
                found = await self._exchange(server, query)
        except TimeoutError:
            causes.append(f"{server}: no answer within {self._limits.attempt:g} s")
        except OSError as error:
            causes.append(f"{server}: {describe(error)}")
        except (UpstreamFailed, asyncio.IncompleteReadError) as error:
            causes.append(f"{server}: {error}")
        else:
            if found.rcode in _FINAL:
                return found
            causes.append(f"{server}: response code {found.rcode}")
        return None

    async def _exchange(self, server: str, query: Query) -> Answer:
        target = _target(server, self._port)
        found = await _by_udp(target, query)
        if found is None:
            found = await _by_tcp(target, query)
        return found


@dataclass(frozen=True, slots=True)
class _Target:
    family: socket.AddressFamily
    address: tuple[object, ...]


def _target(server: str, port: int) -> _Target:
    address = ip_address(server)
    if not isinstance(address, IPv6Address):
        return _Target(socket.AF_INET, (server, port))
    scope = socket.if_nametoindex(address.scope_id) if address.scope_id else 0
    return _Target(socket.AF_INET6, (str(address).partition("%")[0], port, 0, scope))


class _Waiting(asyncio.DatagramProtocol):
    """Waits for the answer among what comes. `found`: it, or None where UDP is not enough."""

    def __init__(self, read: Callable[[bytes], Answer | None]) -> None:
        self.found: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._read = read
        self._strange = 0

    def datagram_received(self, data: bytes, addr: object) -> None:
        """Somebody who guesses ids gets few tries: TCP, which cannot be answered blindly, takes over."""
        del addr
        if self.found.done():
            return
        try:
            self.found.set_result(self._read(data))
        except NotAnAnswer:
            self._strange += 1
            if self._strange == _MOST_STRANGE:
                self.found.set_result(None)

    def error_received(self, exc: Exception) -> None:
        """An ICMP error: nobody is there."""
        if not self.found.done():
            self.found.set_exception(exc)


async def _by_udp(target: _Target, query: Query) -> Answer | None:
    with _socket(target, socket.SOCK_DGRAM) as made:
        made.connect(target.address)
        loop = asyncio.get_running_loop()
        transport, waiting = await loop.create_datagram_endpoint(lambda: _Waiting(query.read), sock=made)
        try:
            transport.sendto(query.wire)
            return await waiting.found
        finally:
            transport.abort()


async def _by_tcp(target: _Target, query: Query) -> Answer:
    made = _socket(target, socket.SOCK_STREAM)
    try:
        await asyncio.get_running_loop().sock_connect(made, target.address)
        reader, writer = await asyncio.open_connection(sock=made)
    except BaseException:
        made.close()
        raise
    try:
        writer.write(struct.pack(">H", len(query.wire)) + query.wire)
        (size,) = struct.unpack(">H", await reader.readexactly(2))
        found = query.read(await reader.readexactly(size))
    except NotAnAnswer as error:
        raise UpstreamFailed(f"by TCP: {error}") from error
    finally:
        writer.transport.abort()
    if found is None:
        raise UpstreamFailed("an answer cut short by TCP")
    return found


def _socket(target: _Target, kind: socket.SocketKind) -> socket.socket:
    made = socket.socket(target.family, kind | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    return made
