"""Which names and addresses a policy's destinations cover. The resolver, the proxy and the firewall all ask here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Self

from forgeyard_model.policy import DEFAULT_PROTOCOLS, NetworkDestination
from forgeyard_networks.names import normal_name
from forgeyard_networks.ranges import PRIVATE_NETWORKS


@dataclass(frozen=True, slots=True)
class Allowlist:
    """Destinations, looked up by name and by address. An index is a destination's place in the policy."""

    destinations: tuple[NetworkDestination, ...] = ()
    _exact: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _below: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _networks: tuple[tuple[int, IPv4Network], ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def from_destinations(cls, destinations: Sequence[NetworkDestination]) -> Self:
        """Of a policy.

        :raises InvalidRequest: names the destination that no network can enforce.
        """
        exact: dict[str, tuple[int, ...]] = {}
        below: dict[str, tuple[int, ...]] = {}
        networks: list[tuple[int, IPv4Network]] = []
        for index, item in enumerate(destinations):
            item.check(f"network.restricted.allow[{index}]")
            if item.cidr:
                networks.append((index, IPv4Network(item.cidr)))
            else:
                table = below if item.host.startswith("*.") else exact
                name = item.host.removeprefix("*.").lower()
                table[name] = (*table.get(name, ()), index)
        return cls(tuple(destinations), exact, below, tuple(networks))

    def host_allowed(self, name: str) -> tuple[int, ...]:
        """The destinations that cover `name`: those that are it, and each ``*.`` it lies below. Empty: not allowed."""
        wanted = normal_name(name)
        if wanted is None:
            return ()
        found = list(self._exact.get(wanted, ()))
        parent = wanted
        while "." in parent:
            parent = parent.partition(".")[2]
            found.extend(self._below.get(parent, ()))
        return tuple(sorted(found))

    def name_allowed(self, name: str, port: int, protocol: str = "tcp") -> tuple[int, ...]:
        """As `host_allowed`, for one port."""
        return tuple(index for index in self.host_allowed(name) if self.covers(index, port, protocol))

    def address_allowed(self, address: IPv4Address, port: int, protocol: str = "tcp") -> tuple[int, ...]:
        """The CIDR destinations that cover an address and port. Addresses that a name led to are not known here."""
        return tuple(
            index for index, network in self._networks if address in network and self.covers(index, port, protocol)
        )

    def admits(self, address: IPv4Address, closed: Sequence[IPv4Network] = ()) -> bool:
        """Whether a name may lead to `address`: into no closed range, unless a CIDR names it or a part of it.

        As in the router's rules, what says most about an address counts: 0.0.0.0/0 opens no private range.

        :param closed: beyond the private ranges: the host's own addresses.
        """
        shut = max((net.prefixlen for net in (*PRIVATE_NETWORKS, *closed) if address in net), default=-1)
        named = max((network.prefixlen for _, network in self._networks if address in network), default=-1)
        return shut <= named

    def covers(self, index: int, port: int, protocol: str) -> bool:
        """Whether that destination includes a port of a protocol."""
        item = self.destinations[index]
        return (not item.ports or port in item.ports) and protocol in (item.protocols or DEFAULT_PROTOCOLS)
