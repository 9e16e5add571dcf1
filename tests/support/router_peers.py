"""An attempt's network with a host and an outside, all in namespaces of the test, and what can be tried from inside."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

from forgeyard_host.links import Address, Links, Route, Up, Veth
from forgeyard_host.netfilter import LoggedPacket, PacketLog
from forgeyard_host.netns import NetNamespace, in_namespace, new_namespace, set_sysctls, stream_socket, udp_socket
from forgeyard_networks.ipam import Block, Blocks
from forgeyard_networks.topology import Topology

RANGE = IPv4Network("10.213.0.0/16")
SERVER = "203.0.113.2"
NEAR = IPv4Address("203.0.113.1")
WAIT = 5.0
"""Bound for what has to come. Nothing waits for it to pass but the look for what must not come, which is shorter."""


class Peers:
    """`host` forwards between the attempt's router and `outside`, which has SERVER and whatever `also` names."""

    def __init__(self, locks: Path, *, also: tuple[str, ...] = (), forwards: bool = True) -> None:
        self.blocks = Blocks(RANGE, str(locks / "subnets"))
        self.host = new_namespace(
            {"net.ipv4.ip_forward": "1" if forwards else "0"}
        )  # else what this machine has is inherited
        self.outside = new_namespace()
        self._open: list[Topology] = []
        self._sockets: list[socket.socket] = []
        self.host_links, far = Links.at(self.host.fd), Links.at(self.outside.fd)
        self.host_links.run(Veth("out0", "eth0", self.outside.fd), Up("out0"))
        index = self.host_links.index("out0")
        self.host_links.run(Address(index, IPv4Interface(f"{NEAR}/24")), Route(None, IPv4Address(SERVER), index))
        outer = far.index("eth0")
        more = [Address(outer, IPv4Interface(f"{address}/32")) for address in also]
        far.run(*more, Address(outer, IPv4Interface(f"{SERVER}/24")), Up("eth0"))
        if forwards:  # without the host's rules nothing is translated, so the outside has to know the way back
            far.run(Route(RANGE, NEAR, outer))
        far.close()

    def attempt(self, *, members: int = 1, uplink: bool = True) -> Topology:
        """A router with members, with a way to the host."""
        made = Topology.make(self.blocks.acquire())
        self._open.append(made)
        for _ in range(members - 1):
            made.add_member()
        if uplink:
            made.add_uplink(self.host_links, self.host.fd)
            forwards = {f"net.ipv4.conf.{made.uplink}.forwarding": "1"}
            in_namespace(self.host.fd, lambda: set_sysctls(forwards))
        return made

    def udp(self, where: NetNamespace, address: str, port: int) -> socket.socket:
        """A UDP socket that is closed with the rest."""
        made = udp_socket(where.fd, address, port)
        self._sockets.append(made)
        return made

    def tcp(self, where: NetNamespace, address: str, port: int) -> socket.socket:
        """A TCP listener that is closed with the rest."""

        def make() -> socket.socket:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen()
            return listener

        made = in_namespace(where.fd, make)
        self._sockets.append(made)
        return made

    def close(self) -> None:
        """Drop everything."""
        for made in self._sockets:
            made.close()
        for topology in self._open:
            topology.close()
        self.host_links.close()
        self.outside.close()
        self.host.close()
        self.blocks.close()


def connect(where: NetNamespace, address: str, port: int, wait: float = WAIT) -> str:
    """ "ok", the name of the error, or "timeout"."""
    with stream_socket(where.fd) as client:
        code = client.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            if not select.select([], [client], [], wait)[1]:
                return "timeout"
            code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return "ok" if code == 0 else errno.errorcode[code]


def ask_udp(where: NetNamespace, address: str, port: int, server: socket.socket | None = None) -> str:
    """Send a datagram and have `server` answer it: "ok", the name of the error that came back, or "timeout"."""
    with udp_socket(where.fd, "0.0.0.0", 0) as client:
        try:
            client.connect((address, port))
            client.send(b"ask")
            watched = [client] if server is None else [client, server]
            ready = select.select(watched, [], [], WAIT)[0]
            if server is not None and server in ready:
                data, sender = server.recvfrom(100)
                server.sendto(data, sender)
                ready = select.select([client], [], [], WAIT)[0]
            if not ready:
                return "timeout"
            return "ok" if client.recv(100) == b"ask" else "garbled"
        except OSError as error:
            return errno.errorcode[error.errno or 0]


def ping(where: NetNamespace, address: str) -> str:
    """ "ok", "prohibited" when a router says so, "timeout", or the name of an error."""
    made = in_namespace(where.fd, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    with made as raw:
        head = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 1)
        total = sum(struct.unpack("!4H", head))
        check = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        try:
            raw.sendto(head[:2] + struct.pack("!H", check) + head[4:], (address, 0))
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        end = time.monotonic() + WAIT
        while select.select([raw], [], [], max(0.0, end - time.monotonic()))[0]:
            data = raw.recv(1000)
            kind, code = data[(data[0] & 15) * 4 :][:2]
            if kind == 0:
                return "ok"
            if (kind, code) == (3, 13):
                return "prohibited"
    return "timeout"


def forged(where: NetNamespace, source: str, destination: str, port: int) -> None:
    """Send a datagram whose source address is not the sender's."""
    made = in_namespace(where.fd, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW))
    with made as raw:
        body = struct.pack("!HHHH", 4000, port, 8 + 6, 0) + b"forged"
        head = struct.pack(
            "!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, 17, 0, _packed(source), _packed(destination)
        )
        raw.sendto(head + body, (destination, 0))


def logged(log: PacketLog, count: int) -> list[LoggedPacket]:
    """The next `count` records, or those that came within the bound."""
    found: list[LoggedPacket] = []
    while len(found) < count and select.select([log], [], [], WAIT)[0]:
        found += log.read()
    return found


def gateway(block: Block) -> str:
    """The router's address inside."""
    return str(block.gateway)


def _packed(address: str) -> bytes:
    return IPv4Address(address).packed
