"""A resolver in a namespace of its own, and clients that ask it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address

import dns.message
import dns.rdatatype

from forgeyard_host.netns import NetNamespace, new_namespace, stream_socket, tcp_listener, udp_socket
from forgeyard_model.policy import NetworkDestination, NetworkMode
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.resolver import Resolver
from forgeyard_networks.resolver_limits import ResolverLimits
from forgeyard_networks.resolver_policy import ResolverPolicy
from forgeyard_networks.resolver_upstream import Upstream

JOB, DB = IPv4Address("10.213.0.2"), IPv4Address("10.213.0.3")
NAMES = {"job": JOB, "sandbox-1": JOB, "db": DB, "postgres": DB}
LOOPBACK = "127.0.0.1"


@dataclass
class Kit:
    """A resolver that runs, its namespace, and what it had opened."""

    resolver: Resolver
    namespace: NetNamespace
    opened: list[tuple[int, str, int]] = field(default_factory=list)
    clients: list[socket.socket] = field(default_factory=list)

    async def ask(self, name: str, kind: str = "A", *, edns: bool = True) -> dns.message.Message:
        """By UDP."""
        query = dns.message.make_query(name, kind, use_edns=0 if edns else False)
        answer = dns.message.from_wire(await self.raw(query.to_wire()))
        assert query.is_response(answer)
        return answer

    def client(self) -> socket.socket:
        """A UDP socket that talks to the resolver."""
        made = udp_socket(self.namespace.fd, LOOPBACK, 0)
        made.connect((LOOPBACK, 53))
        self.clients.append(made)
        return made

    async def raw(self, packet: bytes) -> bytes:
        """The answer to any bytes."""
        client = self.client()
        client.send(packet)
        async with asyncio.timeout(15):
            return await asyncio.get_running_loop().sock_recv(client, 65535)

    async def tcp(self, *, buffer: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TCP connection to the resolver; `buffer`: bytes that the client's kernel takes in."""
        made = stream_socket(self.namespace.fd)
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await asyncio.get_running_loop().sock_connect(made, (LOOPBACK, 53))
        return await asyncio.open_connection(sock=made)

    async def ask_tcp(self, name: str, kind: str = "A") -> dns.message.Message:
        """By TCP."""
        query = dns.message.make_query(name, kind).to_wire()
        reader, writer = await self.tcp()
        try:
            writer.write(struct.pack(">H", len(query)) + query)
            async with asyncio.timeout(15):
                (size,) = struct.unpack(">H", await reader.readexactly(2))
                return dns.message.from_wire(await reader.readexactly(size))
        finally:
            writer.transport.abort()


@asynccontextmanager
async def resolving(
    mode: NetworkMode,
    *destinations: NetworkDestination,
    upstream: Upstream | None = None,
    names: Mapping[str, IPv4Address] = NAMES,
    limits: ResolverLimits | None = None,
    open_address: Callable[[int, IPv4Address, int], Awaitable[None]] | None = None,
    **more: object,
) -> AsyncIterator[Kit]:
    """A resolver at 127.0.0.1:53 of a new namespace; afterwards nothing of it is left."""
    before = asyncio.all_tasks()
    namespace = new_namespace()
    opened: list[tuple[int, str, int]] = []

    async def note(index: int, address: IPv4Address, seconds: int) -> None:
        opened.append((index, str(address), seconds))

    resolver = await Resolver.serve(
        udp_socket(namespace.fd, LOOPBACK, 53),
        tcp_listener(namespace.fd, LOOPBACK, 53),
        names=names,
        policy=ResolverPolicy(mode, Allowlist.from_destinations(destinations)),
        upstream=upstream or Upstream(()),
        open_addresses=open_address or note,
        limits=limits,
        **more,
    )
    kit = Kit(resolver, namespace, opened)
    try:
        yield kit
    finally:
        await resolver.close()
        for client in kit.clients:
            client.close()
        namespace.close()
        await asyncio.sleep(0)
        left = [task.get_coro().cr_code.co_filename for task in asyncio.all_tasks() - before]
        assert [path for path in left if "forgeyard" in path] == []


def addresses(message: dns.message.Message) -> list[str]:
    """Of all A records, sorted: servers shuffle them."""
    return sorted(item.to_text() for part in message.answer if part.rdtype == dns.rdatatype.A for item in part)
