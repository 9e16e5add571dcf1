"""Route netlink as bytes: messages and attributes (rtnetlink(7), linux/if_link.h).

Packed by hand for speed: a job's whole network is a few dozen messages in two or three system calls. The library for
this, pyroute2, needs longer to be imported than a job takes, and 2 ms for each message.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

NEWLINK, DELLINK, GETLINK = 16, 17, 18
NEWADDR, GETADDR = 20, 22
NEWROUTE, GETROUTE = 24, 26
GETNEIGH = 30
GETRULE = 34

REQUEST, ACK, DUMP, EXCLUSIVE, CREATE = 0x1, 0x4, 0x300, 0x200, 0x400
ERROR, DONE = 2, 3
_NESTED: Final = 0x8000
_TYPE_MASK: Final = 0x3FFF
HEADER: Final = struct.Struct("=IHHII")
BUFFER: Final = 256 << 10
SOL_NETLINK: Final = 270
_NETLINK_GET_STRICT_CHK: Final = 12


def attribute(kind: int, data: bytes) -> bytes:
    """One attribute, padded."""
    size = 4 + len(data)
    return struct.pack("=HH", size, kind) + data + b"\0" * (-size % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute made of attributes."""
    return attribute(kind | _NESTED, b"".join(parts))


def text(kind: int, value: str) -> bytes:
    """A string attribute, with the final zero that the kernel wants."""
    return attribute(kind, value.encode() + b"\0")


def number(kind: int, value: int) -> bytes:
    """A 32-bit attribute."""
    return attribute(kind, struct.pack("=I", value))


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes in `data` by kind; the last of a kind stands."""
    found, at = {}, 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4:
            break
        found[kind & _TYPE_MASK] = data[at + 4 : at + size]
        at += (size + 3) & ~3
    return found


def messages_in(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Type, body and sequence of each message."""
    at = 0
    while at + HEADER.size <= len(data):
        size, kind, _, sequence, _ = HEADER.unpack_from(data, at)
        if size < HEADER.size:
            return
        yield kind, data[at + HEADER.size : at + size], sequence
        at += (size + 3) & ~3


def error_code(body: bytes) -> int:
    """The errno of an ERROR message; 0 for one that only acknowledges."""
    return -int(struct.unpack_from("=i", body)[0])


@dataclass(frozen=True, slots=True)
class Message:
    """One request: its type, what it is for in words, flags beside REQUEST, and its body."""

    kind: int
    what: str
    flags: int
    body: bytes


class NetlinkSocket:
    """A route netlink socket. It belongs to the namespace of the thread that makes it. One caller at a time."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._sequence = 0
        try:
            # Filters of a dump are honoured, instead of being passed over without a word.
            self._socket.setsockopt(SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
            self._socket.bind((0, 0))
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def run(self, messages: Sequence[Message]) -> None:
        """Carry out `messages` in order, all in one call. The kernel goes on past a failure; the first is raised.

        :raises OSError: its filename says which.
        """
        first = self._sequence + 1
        frames = [self._frame(item.kind, REQUEST | ACK | item.flags, item.body) for item in messages]
        self._socket.send(b"".join(frames))
        failed: OSError | None = None
        for sequence, code in self._acks(len(messages)):
            if code and failed is None:
                failed = OSError(code, os.strerror(code), messages[sequence - first].what)
        if failed is not None:
            raise failed

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """The bodies of everything that `kind` lists.

        :raises OSError: what the kernel said.
        """
        self._socket.send(self._frame(kind, REQUEST | DUMP, body))
        found: list[bytes] = []
        while True:
            for number_, data, sequence in messages_in(self._socket.recv(BUFFER)):
                if sequence != self._sequence:
                    continue
                if number_ == DONE:
                    return found
                if number_ == ERROR:
                    code = error_code(data)
                    raise OSError(code, os.strerror(code), "netlink dump")
                found.append(data)

    def _frame(self, kind: int, flags: int, body: bytes) -> bytes:
        self._sequence += 1
        return HEADER.pack(HEADER.size + len(body), kind, flags, self._sequence, 0) + body + b"\0" * (-len(body) % 4)

    def _acks(self, count: int) -> Iterator[tuple[int, int]]:
        seen = 0
        while seen < count:
            for kind, data, sequence in messages_in(self._socket.recv(BUFFER)):
                if kind == ERROR and self._sequence - count < sequence <= self._sequence:
                    seen += 1
                    yield sequence, error_code(data)
