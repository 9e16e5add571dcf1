"""The few bytes of DNS that a job's own questions need (RFC 1035, 6891, 8914): one question in, one answer out.

By hand, and strict: members' names are then answered without loading a DNS library, which takes longer than a job has,
and what a hostile client can send meets 60 lines instead of a parser for everything.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address
from typing import Final

MOST_UDP: Final = 1232
"""Bytes of an answer by UDP (DNS flag day 2020); a client without EDNS gets 512."""
_PLAIN_UDP: Final = 512
_HEADER: Final = struct.Struct(">6H")
_FIXED: Final = struct.Struct(">HH")
_OPT: Final = struct.Struct(">BHHIH")
_RECORD: Final = struct.Struct(">HHHIH")
_QUESTION_AT: Final = 0xC00C  # a compressed name that points at the question's
_IN, _OPT_TYPE, _EDE = 1, 41, 15

TYPE_A, TYPE_PTR, TYPE_AAAA = 1, 12, 28


class Rcode(IntEnum):
    """Response codes used here. BADVERS is carried by EDNS."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


class Reason(IntEnum):
    """Extended errors (RFC 8914), which `dig` and resolvers print."""

    FILTERED = 17
    PROHIBITED = 18
    NO_REACHABLE_AUTHORITY = 22


class Malformed(Exception):  # noqa: N818  it is a verdict on a packet, and never leaves this package
    """Not a question that anybody asks. `reply`: an answer that says so, None to stay silent."""

    def __init__(self, why: str, reply: bytes | None = None) -> None:
        super().__init__(why)
        self.reply = reply


class NotAnAnswer(Exception):  # noqa: N818  as above
    """Bytes from an upstream server that do not answer the question it was sent."""


@dataclass(frozen=True, slots=True)
class Question:
    """A client's question. `wire`: as it stood, in the client's mix of cases, which the answer repeats."""

    id: int
    recursion: bool
    name: str
    type: int
    wire: bytes
    edns: int | None
    """The size that the client can take by UDP; None without EDNS."""

    @property
    def most_udp(self) -> int:
        """Bytes of an answer by UDP."""
        return _PLAIN_UDP if self.edns is None else min(max(self.edns, _PLAIN_UDP), MOST_UDP)


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered. `body`: records in wire form, `count` of them, with pointers into a question at byte 12."""

    rcode: Rcode = Rcode.NOERROR
    body: bytes = b""
    count: int = 0
    reason: Reason | None = None


def parse(packet: bytes) -> Question:
    """The question of `packet`.

    :raises Malformed: for anything else. Silence is the answer to responses: two servers must not talk to each other.
    """
    if len(packet) < _HEADER.size:
        raise Malformed("short header")
    identifier, flags, questions, answers, authority, additional = _HEADER.unpack_from(packet)
    if flags & 0x8000:
        raise Malformed("a response")
    if flags & 0x7800:
        raise Malformed("an opcode other than QUERY", _bare(identifier, flags, Rcode.NOTIMP))
    refusal = _bare(identifier, flags, Rcode.FORMERR)
    if (questions, answers, authority) != (1, 0, 0) or additional > 1:
        raise Malformed("sections that a question does not have", refusal)
    name, end = _name(packet, refusal)
    if len(packet) < end + 4:
        raise Malformed("short question", refusal)
    kind, klass = _FIXED.unpack_from(packet, end)
    end += 4
    edns, version = _edns(packet, end, refusal) if additional else (None, 0)
    question = Question(identifier, bool(flags & 0x0100), name, kind, packet[_HEADER.size : end], edns)
    if not additional and len(packet) != end:
        raise Malformed("bytes after the question", refusal)
    if version:
        raise Malformed("EDNS of another version", render(question, Reply(Rcode.BADVERS)))
    if klass != _IN:
        raise Malformed("a class other than IN", render(question, Reply(Rcode.REFUSED)))
    return question


def render(question: Question, reply: Reply, most: int = 65535) -> bytes:
    """The answer's bytes; with TC set and without records where they would be more than `most`."""
    tail = _opt(reply) if question.edns is not None else b""
    body, count, truncated = reply.body, reply.count, 0
    if _HEADER.size + len(question.wire) + len(body) + len(tail) > most:
        body, count, truncated = b"", 0, 0x0200
    flags = 0x8080 | truncated | (0x0100 if question.recursion else 0) | (reply.rcode & 15)
    return _HEADER.pack(question.id, flags, 1, count, 0, 1 if tail else 0) + question.wire + body + tail


def address_reply(address: IPv4Address, ttl: int) -> Reply:
    """One A record for the name that was asked."""
    return Reply(body=_RECORD.pack(_QUESTION_AT, TYPE_A, _IN, ttl, 4) + address.packed, count=1)


def name_reply(name: str, ttl: int) -> Reply:
    """One PTR record."""
    labels = b"".join(bytes((len(label),)) + label.encode("ascii") for label in name.split(".")) + b"\0"
    return Reply(body=_RECORD.pack(_QUESTION_AT, TYPE_PTR, _IN, ttl, len(labels)) + labels, count=1)


def _bare(identifier: int, flags: int, rcode: Rcode) -> bytes:
    return _HEADER.pack(identifier, 0x8080 | (flags & 0x7900) | rcode, 0, 0, 0, 0)


def _name(packet: bytes, refusal: bytes) -> tuple[str, int]:
    """The name at byte 12 in lower case, and where it ends. A question has nothing that a pointer could point to."""
    at, labels = _HEADER.size, []
    while True:
        size = packet[at] if at < len(packet) else 64
        if size == 0:
            break
        if size > 63 or at + 1 + size > len(packet) or at + size - _HEADER.size > 253:
            raise Malformed("a name that is none", refusal)
        labels.append(packet[at + 1 : at + 1 + size])
        at += 1 + size
    return ".".join(map(_shown, labels)), at + 1


def _shown(label: bytes) -> str:
    """Labels may hold any byte: a dot would make another name of it, a control character another line of a log."""
    text = label.decode("ascii", "replace").lower()
    if text.isprintable() and "." not in text:
        return text
    return "".join(char if char.isprintable() and char != "." else "\ufffd" for char in text)


def _edns(packet: bytes, at: int, refusal: bytes) -> tuple[int, int]:
    """Size and version of the OPT record that ends the packet; its options mean nothing here."""
    if len(packet) < at + _OPT.size:
        raise Malformed("short record", refusal)
    name, kind, size, extended, length = _OPT.unpack_from(packet, at)
    if name or kind != _OPT_TYPE or len(packet) != at + _OPT.size + length:
        raise Malformed("an additional record other than OPT", refusal)
    return size, extended >> 16 & 0xFF


def _opt(reply: Reply) -> bytes:
    options = b"" if reply.reason is None else struct.pack(">HHH", _EDE, 2, reply.reason)
    return _OPT.pack(0, _OPT_TYPE, MOST_UDP, (reply.rcode >> 4) << 24, len(options)) + options
