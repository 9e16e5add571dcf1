"""Where the fetch proxy may go for a job, and what it adds on the way. No socket is touched here."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Final, Self

from forgeyard_model.errors import InvalidRequest
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.names import normal_name
from forgeyard_networks.proxy_records import ProxyVerdict

HTTP: Final = 80
HTTPS: Final = 443
CONNECT_PORTS: Final = (HTTPS,)
PLAIN_PORTS: Final = (HTTP, HTTPS)
_TOKEN: Final = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[\x21-\x7e]+(?: [\x21-\x7e]+)*")
_NUMBER: Final = re.compile(r"\d+|0x[0-9a-f]*")
_NOTHING: Final = Allowlist()
_FRAMING: Final = frozenset({"host", "connection", "content-length", "transfer-encoding"})


class NotServed(Exception):  # noqa: N818  an answer to the job, and no fault of ours
    """What the job is told instead of what it asked for.

    :param status: of HTTP. `reason`: a snake_case word for the audit. `text`: one line for people.
    """

    def __init__(self, status: int, reason: str, text: str, verdict: ProxyVerdict = ProxyVerdict.REFUSED) -> None:
        super().__init__(text)
        self.status, self.reason, self.text, self.verdict = status, reason, text, verdict


def failed(reason: str, text: str) -> NotServed:
    """A 502: it was allowed, and went wrong after that."""
    return NotServed(502, reason, text, ProxyVerdict.FAILED)


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Bounds: bytes of a head, header lines, seconds, connections and tunnels at a time.

    :ivar linger: seconds that what a job still sends is read and dropped after an answer, so that it sees the answer.
    """

    head_bytes: int = 32 << 10
    headers: int = 100
    head_time: float = 10.0
    connect_time: float = 10.0
    idle_time: float = 300.0
    linger: float = 2.0
    connections: int = 128
    tunnels: int = 64


@dataclass(frozen=True, slots=True)
class UpstreamCredential:
    """A header that the proxy sets on requests to exactly one host, and that no job sees.

    :ivar value: the secret. `header`: its name.
    :ivar port: of the host. `tls`: a job writes ``http://HOST/…`` and the proxy speaks TLS to the host.
    """

    host: str
    value: str = field(repr=False)
    header: str = "Authorization"
    port: int = HTTPS
    tls: bool = True

    @classmethod
    def basic(cls, host: str, user: str, password: str, *, port: int = HTTPS, tls: bool = True) -> Self:
        """A user with a password (RFC 7617)."""
        return cls(host, basic(user, password), port=port, tls=tls)

    def check(self, where: str = "network.credentials") -> None:
        """:raises InvalidRequest: names the field below `where`; never shows the value."""
        if normal_name(self.host) != self.host or self.host.startswith("*"):
            raise InvalidRequest(f"{where}.host", self.host, "write one host name in lower case: no wildcard, no port")
        if not _TOKEN.fullmatch(self.header) or self.header.lower() in _FRAMING:
            raise InvalidRequest(f"{where}.header", self.header, "write a header name such as Authorization")
        if not _VALUE.fullmatch(self.value):
            raise InvalidRequest(f"{where}.value", "(not shown)", "write one line of printable ASCII")
        if not 1 <= self.port <= 65535:
            raise InvalidRequest(f"{where}.port", self.port, "write a port from 1 to 65535")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request wants to go.

    :ivar host: a name in lower case, an IPv4 address, or an IPv6 address in brackets. `address`: the IPv4 one, or None.
    :ivar defaults: ports that a destination without ports stands for.
    """

    host: str
    port: int
    defaults: tuple[int, ...] = CONNECT_PORTS
    address: IPv4Address | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ProxyPolicy:
    """Of one attempt.

    :ivar closed: ranges beyond the private ones that stay closed: the host's own addresses, the range of jobs.
    :ivar any_name: let every name, outside address and port through, to learn which a job needs.
    :ivar cure: what a refusal tells its reader to do.
    """

    allow: Allowlist = field(default_factory=Allowlist)
    closed: tuple[IPv4Network, ...] = ()
    any_name: bool = False
    credentials: tuple[UpstreamCredential, ...] = ()
    cure: str = "name it under network.fetch of the executor's configuration"

    def credential(self, target: Target) -> UpstreamCredential | None:
        """The one for a plain request: ``http://HOST/…`` stands for the port of its credential."""
        for item in self.credentials:
            if item.host == target.host and target.port in (HTTP, item.port):
                return item
        return None

    def check(self, target: Target) -> None:
        """Before a name is looked up.

        :raises NotServed: 403.
        """
        if target.host.startswith("["):
            raise NotServed(403, "ipv6", f"{target}: jobs have no IPv6, and the proxy none for them; use a name")
        if target.address is not None:
            self._check_literal(target, target.address)
            return
        if self.any_name:
            return
        found = self.allow.host_allowed(target.host)
        if not found:
            raise self._refused(target, "host_not_listed", "this host is not listed for this job")
        if not any(self._covers(index, target) for index in found):
            raise self._refused(target, "port_not_listed", "this host is listed, this port is not")

    def admitted(self, target: Target, addresses: Sequence[IPv4Address]) -> tuple[IPv4Address, ...]:
        """Those of a name's addresses that may be connected to.

        :raises NotServed: 403, when the name leads to closed addresses only.
        """
        kept = tuple(address for address in addresses if not self._closed(address) or self._named(address, target))
        if not kept:
            raise self._refused(target, "private_address", f"this name leads to {addresses[0]}, which is not outside")
        return kept

    def _check_literal(self, target: Target, address: IPv4Address) -> None:
        if self.any_name and not self._closed(address):
            return
        found = self.allow.address_allowed(address, target.port)
        if self._named(address, target) and any(self._covers(index, target) for index in found):
            return
        text = "no network listed for this job covers this address and port"
        raise self._refused(target, "address_not_listed", text)

    def _closed(self, address: IPv4Address) -> bool:
        return not _NOTHING.admits(address, self.closed)

    def _named(self, address: IPv4Address, target: Target) -> bool:
        """Whether a CIDR says it may be connected to, and says more of it than the range that is closed."""
        return self.allow.admits(address, self.closed) and bool(self.allow.address_allowed(address, target.port))

    def _covers(self, index: int, target: Target) -> bool:
        listed = bool(self.allow.destinations[index].ports) or target.port in target.defaults
        return listed and self.allow.covers(index, target.port, "tcp")

    def _refused(self, target: Target, reason: str, text: str) -> NotServed:
        return NotServed(403, reason, f"{target}: {text}; {self.cure}")


def basic(user: str, password: str) -> str:
    """What a header says of a user with a password (RFC 7617)."""
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def is_number(host: str) -> bool:
    """Whether some C libraries would read a name as an address: 127.1, 0x7f000001, 2130706433."""
    return _NUMBER.fullmatch(host.rpartition(".")[2]) is not None
