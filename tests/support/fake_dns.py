"""A name server that answers as a test tells it to: rightly, wrongly, late or not at all. For UDP and TCP."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


@dataclass
class Zone:
    """What the server knows, by name in lower case without the last dot.

    :ivar behaviours: per name one of: silent, servfail, truncate, wrong-id, wrong-question, garbage, only-wrong.
    """

    records: dict[str, list[str]] = field(default_factory=dict)
    behaviours: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *records: str) -> None:
        """Records in zone file form without the owner: ``60 IN A 203.0.113.5``; an owner may stand before them."""
        self.records[name] = [text if text.split()[0].endswith(".") else f"{name}. {text}" for text in records]


@dataclass
class FakeDns:
    """A running server. `seen`: (name, type, transport, source port, id) of each question."""

    zone: Zone
    port: int
    seen: list[tuple[str, str, str, int, int]]
    close: Callable[[], None]

    def asked(self, name: str) -> int:
        """How often `name` was asked for."""
        return sum(1 for item in self.seen if item[0] == name)


async def start(zone: Zone, address: str = "127.0.0.1", *, port: int = 0) -> FakeDns:
    """Serve `zone`; the port is chosen by the kernel unless one is given."""
    loop = asyncio.get_running_loop()
    seen: list[tuple[str, str, str, int, int]] = []
    udp, tcp = _sockets(address, port)
    number = udp.getsockname()[1]

    class Udp(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            for answer in _answers(zone, data, seen, "udp", addr[1]):
                self.transport.sendto(answer, addr)

    tasks: set[asyncio.Task[None]] = set()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            while True:
                (size,) = struct.unpack(">H", await reader.readexactly(2))
                data = await reader.readexactly(size)
                for answer in _answers(zone, data, seen, "tcp", writer.get_extra_info("peername")[1]):
                    writer.write(struct.pack(">H", len(answer)) + answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(asyncio.current_task())
            writer.transport.abort()

    transport, _ = await loop.create_datagram_endpoint(Udp, sock=udp)
    server = await asyncio.start_server(stream, sock=tcp)

    def close() -> None:
        transport.abort()
        server.close()
        for task in list(tasks):
            task.cancel()

    return FakeDns(zone, number, seen, close)


def _sockets(address: str, port: int) -> tuple[socket.socket, socket.socket]:
    while True:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        udp = socket.socket(family, socket.SOCK_DGRAM)
        tcp = socket.socket(family, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        udp.bind((address, port))
        try:
            tcp.bind((address, udp.getsockname()[1]))
        except OSError:
            udp.close()
            tcp.close()
            if port:
                raise
            continue
        tcp.listen()
        udp.setblocking(False)
        tcp.setblocking(False)
        return udp, tcp


def _answers(zone: Zone, data: bytes, seen: list, transport: str, port: int) -> Iterator[bytes]:
    query = dns.message.from_wire(data)
    question = query.question[0]
    name = question.name.to_text().lower().rstrip(".")
    seen.append((name, question.rdtype.name, transport, port, query.id))
    behaviour = zone.behaviours.get(name, "")
    if behaviour == "silent":
        return
    response = dns.message.make_response(query)
    response.flags |= dns.flags.RA
    if behaviour == "servfail":
        response.set_rcode(dns.rcode.SERVFAIL)
        yield response.to_wire()
        return
    records = zone.records.get(name)
    if records is None:
        response.set_rcode(dns.rcode.NXDOMAIN)
    else:
        response.answer = [dns.rrset.from_text(*_parts(text)) for text in records]
    wire = response.to_wire(max_size=65535)
    if transport == "udp":
        yield from _bad(behaviour, wire, response)
        if behaviour == "truncate":
            response.answer = []
            response.flags |= dns.flags.TC
            wire = response.to_wire()
    if behaviour != "only-wrong" or transport == "tcp":
        yield wire


def _bad(behaviour: str, wire: bytes, response: dns.message.Message) -> Iterator[bytes]:
    """What a forger would send before the real answer."""
    wrong = bytes((wire[0] ^ 0xFF,)) + wire[1:]
    if behaviour == "wrong-id":
        yield wrong
    elif behaviour == "only-wrong":
        yield from [wrong] * 20
    elif behaviour == "garbage":
        yield wire[:4] + b"\xff" * 40
        yield b""
    elif behaviour == "wrong-question":
        other = dns.message.make_response(dns.message.make_query("evil.example.", "A", id=response.id))
        other.answer = [dns.rrset.from_text("evil.example.", 60, "IN", "A", "203.0.113.66")]
        yield other.to_wire()


def _parts(text: str) -> tuple:
    owner, ttl, klass, kind, *rest = text.split(None, 4)
    return owner, int(ttl), klass, kind, *rest
