"""Addresses that a name led to are opened in the firewall, for as long as a client may use them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Address
from typing import Final

from forgeyard_host.netfilter import Flow
from forgeyard_networks.resolver_policy import MIN_OPEN

OpenAddress = Callable[[int, IPv4Address, int], Awaitable[None]]
"""Opens an address for the destination of that index, for so many seconds from now."""
MOST_OPEN: Final = 4096


class TooManyOpen(Exception):  # noqa: N818  the question is answered with a failure; never leaves the resolver
    """The names asked so far lead to more addresses than one attempt may have open."""


class Openings:
    """Which addresses are open, and until when."""

    def __init__(self, open_address: OpenAddress) -> None:
        self._open_address = open_address
        self._until: dict[tuple[int, IPv4Address], float] = {}

    async def open(self, destinations: Sequence[int], addresses: Sequence[IPv4Address], seconds: int) -> None:
        """Open `addresses` for each of `destinations`; one that is open longer stays so.

        :raises TooManyOpen: nothing was opened.
        :raises ForgeyardError: of the firewall.
        """
        wanted = [(index, address) for index in destinations for address in addresses]
        self._make_room(wanted)
        for key in wanted:
            await self._open(key, seconds)

    async def renew(self, flows: Iterable[Flow]) -> int:
        """Keep addresses open that have connections. To be called more often than every 300 s.

        :returns: how many were renewed.
        :raises ForgeyardError: of the firewall.
        """
        live = {flow.destination for flow in flows}
        soon = time.monotonic() + MIN_OPEN
        used = [key for key, until in self._until.items() if until < soon and str(key[1]) in live]
        for key in used:
            await self._open(key, MIN_OPEN)
        return len(used)

    async def _open(self, key: tuple[int, IPv4Address], seconds: int) -> None:
        until = time.monotonic() + seconds
        if self._until.get(key, 0.0) < until:
            await self._open_address(*key, seconds)
            self._until[key] = until

    def _make_room(self, wanted: Sequence[tuple[int, IPv4Address]]) -> None:
        if len(self._until) + len(wanted) <= MOST_OPEN:
            return
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        if len(self._until.keys() | set(wanted)) > MOST_OPEN:
            raise TooManyOpen(f"more than {MOST_OPEN} addresses")
