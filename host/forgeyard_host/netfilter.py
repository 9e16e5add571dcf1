"""Netfilter's own netlink, as a job's router uses it: logged packets, flows with their bytes, sets of addresses.

Sources: linux/netfilter/nfnetlink_log.h, nfnetlink_conntrack.h, ipset/ip_set.h. By hand for the reason of `netlink`.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from typing import Final, Self

from forgeyard_host import netlink as nl
from forgeyard_host.failures import describe
from forgeyard_host.netns import in_namespace
from forgeyard_model.errors import SandboxError, SandboxErrorKind

_CONNTRACK, _LOG, _IPSET = 1, 4, 6
_NETLINK_NETFILTER: Final = 12
_ADD_MEMBERSHIP, _NO_ENOBUFS = 1, 5
_BIG_ENDIAN: Final = 0x4000

_PROTOCOLS: Final = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6", 132: "sctp"}


@dataclass(frozen=True, slots=True)
class LoggedPacket:
    """A packet that a rule logged. `port`: destination port, 0 where the protocol has none."""

    prefix: str
    protocol: str
    source: str
    destination: str
    port: int


@dataclass(frozen=True, slots=True)
class Flow:
    """A tracked connection. Bytes with headers: `sent` from the one who began it, `received` by it."""

    protocol: str
    source: str
    destination: str
    port: int
    source_port: int
    sent: int
    received: int


class _Socket:
    """A netfilter netlink socket of the namespace `fd`."""

    def __init__(self, fd: int) -> None:
        self.socket = in_namespace(fd, _open)
        self.sequence = 0

    def send(self, kind: int, flags: int, family: int, group: int, body: bytes) -> None:
        self.sequence += 1
        body = struct.pack(">BBH", family, 0, group) + body
        frame = nl.HEADER.pack(nl.HEADER.size + len(body), kind, nl.REQUEST | flags, self.sequence, 0) + body
        self.socket.send(frame)

    def ask(self, kind: int, flags: int, family: int, group: int, body: bytes) -> None:
        """Send one request and wait for its answer.

        :raises OSError: what the kernel said.
        """
        self.send(kind, nl.ACK | flags, family, group, body)
        while True:
            for number, data, sequence in _messages(self.socket.recv(nl.BUFFER)):
                if number == nl.ERROR and sequence == self.sequence:
                    if nl.error_code(data):
                        raise _refusal(data)
                    return


class PacketLog:
    """What the rules of one namespace log into NFLOG group `group`, without blocking."""

    def __init__(self, fd: int, *, group: int = 1, header: int = 96) -> None:
        """
        :param header: bytes of each packet that are copied.
        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            self._netlink = _Socket(fd)
            # Bind; copy the packet's head; hand over each at once instead of in packs or after a second.
            for kind, data in ((1, b"\1"), (2, struct.pack(">IBx", header, 2)), (5, struct.pack(">I", 1))):
                self._netlink.ask(_LOG << 8 | 1, 0, 0, group, nl.attribute(kind, data))
        except OSError as error:
            raise _failed("log packets (NFLOG)", error, "nfnetlink_log") from error
        # A burst may lose records; it must never turn into an error that ends the log.
        self._netlink.socket.setsockopt(nl.SOL_NETLINK, _NO_ENOBUFS, 1)
        self._netlink.socket.setblocking(False)

    def fileno(self) -> int:
        """For an event loop."""
        return self._netlink.socket.fileno()

    def close(self) -> None:
        """Close it. Idempotent."""
        self._netlink.socket.close()

    def read(self) -> list[LoggedPacket]:
        """What has come; empty when nothing has."""
        try:
            data = self._netlink.socket.recv(nl.BUFFER)
        except BlockingIOError:
            return []
        return [packet for kind, body, _ in _messages(data) if kind == _LOG << 8 and (packet := _packet(body))]


class Flows:
    """The connections through one namespace: those that are open, and those that have ended since this was made."""

    def __init__(self, fd: int) -> None:
        """
        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            self._asked = _Socket(fd)
            self._ended = _Socket(fd)
            self._ended.socket.setsockopt(nl.SOL_NETLINK, _ADD_MEMBERSHIP, 3)  # NFNLGRP_CONNTRACK_DESTROY
            self._ended.socket.setsockopt(nl.SOL_NETLINK, _NO_ENOBUFS, 1)
            self._ended.socket.setblocking(False)
        except OSError as error:
            raise _failed("follow connections (conntrack)", error, "nf_conntrack_netlink") from error

    def fileno(self) -> int:
        """Readable when connections have ended."""
        return self._ended.socket.fileno()

    def close(self) -> None:
        """Close it. Idempotent."""
        self._asked.socket.close()
        self._ended.socket.close()

    def ended(self) -> list[Flow]:
        """Those that have ended since the last call."""
        found: list[Flow] = []
        while True:
            try:
                data = self._ended.socket.recv(nl.BUFFER)
            except BlockingIOError:
                return found
            found.extend(flow for _, body, _ in _messages(data) if (flow := _flow(body)))

    def open(self) -> list[Flow]:
        """Those that are tracked now.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        found: list[Flow] = []
        try:
            self._asked.send(_CONNTRACK << 8 | 1, nl.DUMP, socket.AF_UNSPEC, 0, b"")
            while True:
                for kind, body, _ in _messages(self._asked.socket.recv(nl.BUFFER)):
                    if kind == nl.DONE:
                        return found
                    if kind == nl.ERROR:
                        raise _refusal(body)
                    if flow := _flow(body):
                        found.append(flow)
        except OSError as error:
            raise _failed("read connections (conntrack)", error, "nf_conntrack_netlink") from error


class AddressSets:
    """Sets of IPv4 addresses that rules of one namespace match (ipset, hash:ip), each entry with an end of its own."""

    def __init__(self, netlink: _Socket) -> None:
        self._netlink = netlink
        self._lock = threading.Lock()

    @classmethod
    def at(cls, fd: int) -> Self:
        """Of the namespace `fd`.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            return cls(_Socket(fd))
        except OSError as error:
            raise _failed("use sets of addresses (ipset)", error, "ip_set_hash_ip") from error

    def close(self) -> None:
        """Close the socket; the sets stay with their namespace. Idempotent."""
        self._netlink.socket.close()

    def create(self, name: str) -> None:
        """A new, empty set whose entries end.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        words = nl.text(3, "hash:ip") + nl.attribute(4, b"\1") + nl.attribute(5, bytes((socket.AF_INET,)))
        data = nl.nested(7, nl.attribute(6 | _BIG_ENDIAN, struct.pack(">I", 300)))
        self._ask(2, nl.CREATE | nl.EXCLUSIVE, name, words + data)

    def add(self, name: str, address: IPv4Address, seconds: int) -> None:
        """Put `address` in for `seconds` from now, or renew it.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        where = nl.nested(1, nl.attribute(1 | _BIG_ENDIAN, address.packed))
        until = nl.attribute(6 | _BIG_ENDIAN, struct.pack(">I", seconds))
        self._ask(9, 0, name, nl.nested(7, where, until))

    def _ask(self, command: int, flags: int, name: str, body: bytes) -> None:
        try:
            with self._lock:
                self._netlink.ask(
                    _IPSET << 8 | command, flags, socket.AF_INET, 0, nl.attribute(1, b"\6") + nl.text(2, name) + body
                )
        except OSError as error:
            raise _failed(f"change the set of addresses {name}", error, "ip_set_hash_ip") from error


def _open() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
    made.bind((0, 0))
    return made


def _messages(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Type, body (past nfgenmsg for what is not netlink's own) and sequence of each."""
    for kind, body, sequence in nl.messages_in(data):
        yield kind, body[4:] if kind > 0xFF else body, sequence


def _packet(body: bytes) -> LoggedPacket | None:
    found = nl.attributes(body)
    payload = found.get(9, b"")
    prefix = found.get(10, b"").rstrip(b"\0").decode("ascii", "replace")
    if len(payload) >= 20 and payload[0] >> 4 == 4:
        start, protocol, ends = (payload[0] & 15) * 4, payload[9], (payload[12:16], payload[16:20])
    elif len(payload) >= 40 and payload[0] >> 4 == 6:
        start, protocol, ends = 40, payload[6], (payload[8:24], payload[24:40])
    else:
        return None
    port = 0
    if protocol in (6, 17, 132) and len(payload) >= start + 4:
        port = int.from_bytes(payload[start + 2 : start + 4], "big")
    source, destination = (str(ip_address(end)) for end in ends)
    return LoggedPacket(prefix, _protocol(protocol), source, destination, port)


def _flow(body: bytes) -> Flow | None:
    found = nl.attributes(body)
    ends = nl.attributes(found.get(1, b""))  # CTA_TUPLE_ORIG
    addresses, ports = nl.attributes(ends.get(1, b"")), nl.attributes(ends.get(2, b""))
    source = addresses.get(1) or addresses.get(3)
    destination = addresses.get(2) or addresses.get(4)
    if source is None or destination is None:
        return None
    sent, received = (int.from_bytes(nl.attributes(found.get(kind, b"")).get(2, b""), "big") for kind in (9, 10))
    return Flow(
        protocol=_protocol(int.from_bytes(ports.get(1, b""), "big")),
        source=str(ip_address(source)),
        destination=str(ip_address(destination)),
        port=int.from_bytes(ports.get(3, b""), "big"),
        source_port=int.from_bytes(ports.get(2, b""), "big"),
        sent=sent,
        received=received,
    )


def _refusal(body: bytes) -> OSError:
    code = nl.error_code(body)
    return OSError(code, os.strerror(code))


def _protocol(number: int) -> str:
    return _PROTOCOLS.get(number, str(number))


def _failed(what: str, error: OSError, module: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED,
        "netfilter",
        f"cannot {what}",
        details=describe(error),
        resolution=f"the kernel needs the module {module}",
    )
