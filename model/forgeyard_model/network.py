"""What an attempt's network let through and refused: the evidence that stands in its result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forgeyard_model.policy import NetworkMode

MOST_DESTINATIONS = 1000
"""Rows of each kind that a result holds; what is beyond them is counted."""


class DestinationVerdict(StrEnum):
    """What the router did with new connections to a destination."""

    ALLOWED = "allowed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DestinationRecord:
    """All connections to one address and port that ended the same way.

    :param name: the name that led the job there, as its resolver answered; empty for an address it knew by itself.
    :param names: every such name, since several may share an address. The first is `name`.
    :param port: 0 where the protocol has none.
    :param protocol: tcp, udp, icmp, or the number of another.
    :param count: attempts to connect. In a flood only the first of a second are counted.
    :param bytes_sent, bytes_received: seen from the job, with the packets' headers.
    """

    name: str
    address: str
    port: int
    protocol: str
    verdict: DestinationVerdict
    count: int
    bytes_sent: int = 0
    bytes_received: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NameRecord:
    """Questions to the resolver for one name and type with one end.

    :param verdict: answered, refused, failed, or rebinding: an outside name that led to addresses that are not.
    """

    name: str
    type: str
    verdict: str
    addresses: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """Requests through the fetch proxy to one destination with one end.

    :param verdict: allowed, refused or failed. `reason`: a snake_case word; empty when allowed.
    :param bytes_sent, bytes_received: seen from the job.
    """

    host: str
    port: int
    address: str
    verdict: str
    reason: str
    count: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class NetworkEvidence:
    """Facts about one attempt's network, seen from outside the job.

    :param backend: what enforced the policy, such as ``iptables-legacy``; empty when nothing of ours did.
    :param conflist: the operator's own network, whose rules are the operator's and not ours to vouch for.
    :param audit: everything outside was let through, to learn what is needed.
    :param truncated: connections that had no row of their own here.
    :param notes: what could not be seen.
    """

    mode: NetworkMode
    backend: str = ""
    conflist: str = ""
    audit: bool = False
    destinations: tuple[DestinationRecord, ...] = ()
    dns: tuple[NameRecord, ...] = ()
    fetches: tuple[FetchRecord, ...] = ()
    truncated: int = 0
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[DestinationRecord, ...]:
        """The destinations that were refused."""
        return tuple(row for row in self.destinations if row.verdict is DestinationVerdict.REFUSED)
