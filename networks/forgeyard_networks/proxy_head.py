"""Heads of requests to the proxy: read within bounds, refused when two readers could read them in two ways.

The grammar is h11's. What is refused before it sees the bytes is what it tolerates: folded lines, control characters,
line ends of one byte, both ways to frame a body at once (RFC 9112, sections 2.2, 5.2 and 6.3).
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import TYPE_CHECKING, Final

from forgeyard_networks.names import normal_name
from forgeyard_networks.proxy_policy import CONNECT_PORTS, HTTP, PLAIN_PORTS, NotServed, ProxyLimits, Target, is_number

if TYPE_CHECKING:
    import h11

CONNECT: Final = b"CONNECT"
_END: Final = b"\r\n\r\n"
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_AUTHORITY: Final = re.compile(r"(\[[^\[\]@/?#\s]*\]|[^\[\]@/?#:\s]+)(?::(\d{1,5}))?")
_ABSOLUTE: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)(#.*)?", re.DOTALL)
_VERSIONS: Final = (b"1.0", b"1.1")
_CODING: Final = b"transfer-encoding"
_LENGTH: Final = b"content-length"


@dataclass(frozen=True, slots=True)
class Head:
    """A request as it was read.

    :ivar headers: names as they were written, with their values.
    :ivar path: of an absolute URI, with its query: the target that the host itself is asked for. Empty for CONNECT.
    :ivar connection: h11's state, which goes on to read the body and writes the answer.
    """

    method: bytes
    target: Target
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    connection: h11.Connection

    @property
    def is_tunnel(self) -> bool:
        """Whether bytes are to be passed as they are."""
        return self.method == CONNECT


async def read_head(reader: asyncio.StreamReader, limits: ProxyLimits) -> bytes:
    """Up to and with the empty line; empty when the peer left without a word.

    :raises NotServed: 400, 408, 431.
    """
    try:
        async with asyncio.timeout(limits.head_time):
            return await reader.readuntil(_END)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return b""
        raise bad("head_incomplete", "the request ends within its head") from None
    except asyncio.LimitOverrunError:
        raise NotServed(431, "head_too_large", f"a request's head has at most {limits.head_bytes} bytes") from None
    except TimeoutError:
        raise NotServed(408, "head_too_slow", f"no whole head came within {limits.head_time:g} s") from None


def parse_head(raw: bytes, limits: ProxyLimits) -> Head:
    """What `read_head` gave.

    :raises NotServed: 400, 403, 405, 431, 501, 505.
    """
    import h11

    _check_lines(raw, limits)
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
    try:
        connection.receive_data(raw)
        event = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise NotServed(error.error_status_hint, "bad_request", f"bad request: {error}") from None
    if not isinstance(event, h11.Request):
        raise bad("bad_request", "no request could be read")
    if event.http_version not in _VERSIONS:
        raise NotServed(505, "http_version", "write HTTP/1.1 or HTTP/1.0")
    _check_framing(event)
    target, path = _target(event.method, event.target.decode("ascii"))
    return Head(event.method, target, path, tuple(event.headers.raw_items()), connection)


def bad(reason: str, text: str) -> NotServed:
    """A 400."""
    return NotServed(400, reason, text)


def _check_lines(raw: bytes, limits: ProxyLimits) -> None:
    lines = raw.removesuffix(_END).split(b"\r\n")
    if len(lines) - 1 > limits.headers:
        raise NotServed(431, "too_many_headers", f"a request has at most {limits.headers} header lines")
    for line in lines:
        if _CONTROL.search(line):
            raise bad("control_character", "a control character, or a line end of one byte, is in the head")
        if not line or line[:1] in b" \t":
            raise bad("folded_line", "a header line is empty or begins with a blank")


def _check_framing(event: h11.Request) -> None:
    names = [name for name, _ in event.headers]
    coded = _CODING in names
    if coded and _LENGTH in names:
        raise bad("two_framings", "both Content-Length and Transfer-Encoding are there")
    if coded and event.http_version == b"1.0":
        raise bad("two_framings", "Transfer-Encoding is no part of HTTP/1.0")
    if event.method == CONNECT and (coded or _LENGTH in names):
        raise bad("connect_with_body", "CONNECT has no body")
    if event.method == b"TRACE":
        # It sends back what arrives, with the credentials that were added on the way.
        raise NotServed(405, "method", "TRACE is not passed on")


def _target(method: bytes, text: str) -> tuple[Target, str]:
    if method == CONNECT:
        return _authority(text, None, CONNECT_PORTS), ""
    found = _ABSOLUTE.fullmatch(text)
    if found is None:
        raise bad("not_a_proxy_request", "this is a proxy: write the whole URL, as in GET http://HOST/PATH")
    scheme, authority, path, fragment = found.groups()
    if scheme.lower() != "http":
        raise bad("scheme", "for https use CONNECT HOST:443; other schemes than http are not passed on")
    if fragment is not None:
        raise bad("fragment", "a request's URL has no #fragment")
    return _authority(authority, HTTP, PLAIN_PORTS), path if path.startswith("/") else f"/{path}"


def _authority(text: str, default: int | None, defaults: tuple[int, ...]) -> Target:
    if "@" in text:
        raise bad("userinfo", "a user name in the URL is not passed on: send an Authorization header")
    found = _AUTHORITY.fullmatch(text)
    port = default if found is None or found[2] is None else int(found[2])
    if found is None or port is None or not 1 <= port <= 65535:
        raise bad("bad_target", "write HOST:PORT with a port from 1 to 65535")
    host = found[1]
    if host.startswith("["):
        return Target(host, port, defaults)
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return Target(_name(host), port, defaults)
    return Target(str(address), port, defaults, address)


def _name(text: str) -> str:
    name = normal_name(text)
    if name is None or is_number(name):
        raise bad("bad_target", "write a host name, or an IPv4 address as four decimal numbers")
    return name
