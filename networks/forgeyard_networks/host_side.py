"""The executor's own namespace, as far as attempts' networks touch it: its addresses, its routes, our links in it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from forgeyard_host.links import Links
from forgeyard_host.netns import NetNamespace, current_namespace
from forgeyard_networks.topology import HOST_LINKS

_FRESH: Final = 10.0
"""Seconds for which the host's addresses are taken as known. The host's own rules refuse a new one meanwhile."""
_ADDRESS: Final = re.compile(r"\d+: (\d+\.\d+\.\d+\.\d+)[ /]")
_ROUTE: Final = re.compile(r"table \d+ type 1 (\d+\.\d+\.\d+\.\d+/\d+).* dev (\d+)")


class HostSide:
    """Of one executor. Every method blocks, for a moment; safe to use from several threads."""

    def __init__(self) -> None:
        """In the namespace of the calling thread.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED.
        """
        self.links = Links.at()
        self.namespace: NetNamespace = current_namespace()
        self._lock = threading.Lock()
        self._read = float("-inf")
        self._addresses: tuple[IPv4Network, ...] = ()
        self._routes: tuple[IPv4Network, ...] = ()

    def close(self) -> None:
        """Let go. Idempotent."""
        self.links.close()
        self.namespace.close()

    def addresses(self, network: IPv4Network) -> tuple[IPv4Network, ...]:
        """The host's own, each as a network of one; not those of our links, which are out of `network`.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        with self._lock:
            self._refresh()
            return tuple(one for one in self._addresses if not one.subnet_of(network))

    def routes(self) -> tuple[IPv4Network, ...]:
        """Networks that the host reaches by routes that are not ours; the default one is none of them.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        with self._lock:
            self._refresh()
            return self._routes

    def covering(self, network: IPv4Network) -> tuple[IPv4Network, ...]:
        """Routes that hold all of `network`.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        return tuple(route for route in self.routes() if network.subnet_of(route))

    def _refresh(self) -> None:
        if time.monotonic() - self._read <= _FRESH:
            return
        state = self.links.dump()
        found = {IPv4Address(match[1]) for text in state.addresses if (match := _ADDRESS.match(text))}
        self._addresses = tuple(IPv4Network(address) for address in sorted(found))
        ours = {link.index for link in state.links if link.name.startswith(HOST_LINKS)}
        self._routes = tuple(dict.fromkeys(_foreign(state.routes, ours)))
        self._read = time.monotonic()


def _foreign(routes: tuple[str, ...], ours: set[int]) -> Iterator[IPv4Network]:
    for text in routes:
        match = _ROUTE.match(text)
        if match is not None and int(match[2]) not in ours:
            yield IPv4Network(match[1])
