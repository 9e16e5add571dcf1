"""What a job asked for, by name: for the result and for `policy from-audit`. Bounded, whatever the job asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address
from typing import Final

log: Final = logging.getLogger("forgeyard.networks")

MOST_NAMES: Final = 1000
OTHERS: Final = "others"
_MOST_ADDRESSES: Final = 64
_TYPES: Final = {
    1: "A",
    2: "NS",
    5: "CNAME",
    6: "SOA",
    12: "PTR",
    15: "MX",
    16: "TXT",
    28: "AAAA",
    33: "SRV",
    64: "SVCB",
    65: "HTTPS",
    251: "IXFR",
    252: "AXFR",
    255: "ANY",
}


class DnsVerdict(StrEnum):
    """How a question ended. REBINDING: an outside name led to addresses that are not outside."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    REBINDING = "rebinding"


@dataclass(frozen=True, slots=True)
class DnsRecord:
    """Questions for one name and type with one verdict. `name` is "others" for all that had no record of their own."""

    name: str
    type: str
    verdict: DnsVerdict
    addresses: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class ResolverStats:
    """Counts of packets and of verdicts.

    :ivar malformed: packets that were no question. `overload`: questions beyond what is worked on at a time.
    :ivar unsent: answers that could not be sent. `refused_connections`: TCP connections beyond a client's share.
    """

    questions: int
    verdicts: dict[DnsVerdict, int]
    malformed: int
    overload: int
    unsent: int
    refused_connections: int


@dataclass(slots=True)
class _Entry:
    count: int = 0
    addresses: dict[str, None] = field(default_factory=dict)


class DnsAudit:
    """Collects records.

    :param first: called with each record when it begins, for those who want to see them as they come.
    """

    def __init__(self, first: Callable[[DnsRecord], None] | None = None) -> None:
        self.questions = self.malformed = self.overload = self.unsent = self.refused_connections = 0
        self._first = first
        self._entries: dict[tuple[str, str, DnsVerdict], _Entry] = {}

    def add(self, name: str, kind: int, verdict: DnsVerdict, addresses: Sequence[IPv4Address] = ()) -> None:
        """One more."""
        key = (name, _TYPES.get(kind, f"TYPE{kind}"), verdict)
        entry = self._entries.get(key)
        if entry is None and len(self._entries) >= MOST_NAMES:
            key = (OTHERS, "", verdict)
            addresses = ()
            entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
            log.debug("dns %s %s %s", verdict.value, key[1], key[0])
            if self._first is not None:
                self._first(DnsRecord(*key, tuple(map(str, addresses)), 1))
        entry.count += 1
        for address in addresses:
            if len(entry.addresses) < _MOST_ADDRESSES:
                entry.addresses[str(address)] = None

    def records(self) -> tuple[DnsRecord, ...]:
        """All of them, in the order they began."""
        return tuple(DnsRecord(*key, tuple(entry.addresses), entry.count) for key, entry in self._entries.items())

    def stats(self) -> ResolverStats:
        """Counts so far."""
        verdicts = dict.fromkeys(DnsVerdict, 0)
        for (_, _, verdict), entry in self._entries.items():
            verdicts[verdict] += entry.count
        return ResolverStats(
            self.questions, verdicts, self.malformed, self.overload, self.unsent, self.refused_connections
        )
