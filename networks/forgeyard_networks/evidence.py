"""What became of an attempt's connections: from the router's log and its connection tracking to rows of a result.

Bounded, whatever the job does: rows by destination, and no more of them than a result holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from forgeyard_host.netfilter import Flow, LoggedPacket
from forgeyard_model.network import (
    MOST_DESTINATIONS,
    DestinationRecord,
    DestinationVerdict,
    FetchRecord,
    NameRecord,
)
from forgeyard_networks.firewall.hub import ALLOWED_PREFIX
from forgeyard_networks.proxy_records import ProxyTotal
from forgeyard_networks.resolver_audit import DnsRecord, DnsVerdict

_Key = tuple[str, int, str, DestinationVerdict]
_MOST_NAMES: Final = 8


@dataclass(slots=True)
class _Row:
    logged: int = 0
    flows: int = 0
    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Traffic:
    """Counts of one attempt. Not safe for several threads.

    :param inside: the attempt's own network: what stays in it is no destination.
    """

    inside: IPv4Network
    most: int = MOST_DESTINATIONS
    truncated: int = 0
    _rows: dict[_Key, _Row] = field(default_factory=dict)

    def logged(self, packets: Iterable[LoggedPacket]) -> None:
        """Count what the router let through or refused."""
        for packet in packets:
            allowed = packet.prefix.startswith(ALLOWED_PREFIX)
            verdict = DestinationVerdict.ALLOWED if allowed else DestinationVerdict.REFUSED
            row = self._row((packet.destination, packet.port, packet.protocol, verdict))
            if row is not None:
                row.logged += 1

    def ended(self, flows: Iterable[Flow]) -> None:
        """Count connections that are over."""
        for flow in flows:
            if self._leaves(flow):
                row = self._row((flow.destination, flow.port, flow.protocol, DestinationVerdict.ALLOWED))
                if row is not None:
                    row.flows += 1
                    row.sent += flow.sent
                    row.received += flow.received

    def records(self, names: Mapping[str, Sequence[str]]) -> tuple[DestinationRecord, ...]:
        """All rows so far, in the order they began.

        :param names: by address, those that led there.
        """
        return tuple(
            DestinationRecord(
                name=next(iter(names.get(address, ())), ""),
                address=address,
                port=port,
                protocol=protocol,
                verdict=verdict,
                # A connection may be logged more than once (a repeated SYN), or not at all (a flood).
                count=row.flows or row.logged,
                bytes_sent=row.sent,
                bytes_received=row.received,
                names=tuple(names.get(address, ()))[:_MOST_NAMES],
            )
            for (address, port, protocol, verdict), row in self._rows.items()
        )

    def copy(self) -> Traffic:
        """The same counts, apart: for a look while connections are still open."""
        rows = {key: _Row(row.logged, row.flows, row.sent, row.received) for key, row in self._rows.items()}
        return Traffic(self.inside, self.most, self.truncated, rows)

    def _leaves(self, flow: Flow) -> bool:
        try:
            return IPv4Address(flow.destination) not in self.inside
        except ValueError:
            return True

    def _row(self, key: _Key) -> _Row | None:
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self.most:
                self.truncated += 1
                return None
            row = self._rows[key] = _Row()
        return row


def names_by_address(records: Iterable[DnsRecord]) -> dict[str, list[str]]:
    """Which names were answered with each address, in the order they were asked."""
    found: dict[str, list[str]] = {}
    for record in records:
        if record.verdict is DnsVerdict.ANSWERED:
            for address in record.addresses:
                names = found.setdefault(address, [])
                if record.name not in names:
                    names.append(record.name)
    return found


def name_records(records: Iterable[DnsRecord]) -> tuple[NameRecord, ...]:
    """As a result has them."""
    return tuple(NameRecord(item.name, item.type, item.verdict.value, item.addresses, item.count) for item in records)


def fetch_records(totals: Iterable[ProxyTotal]) -> tuple[FetchRecord, ...]:
    """As a result has them."""
    return tuple(
        FetchRecord(
            item.host,
            item.port,
            item.address,
            item.verdict.value,
            item.reason,
            item.count,
            item.bytes_up,
            item.bytes_down,
        )
        for item in totals
    )
