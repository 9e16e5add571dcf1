"""What an attempt's router is made of, as far as making it blocks. All of it runs in threads of a pool."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forgeyard_host.links import Links
from forgeyard_host.netfilter import Flows, PacketLog
from forgeyard_host.netns import in_namespace, set_sysctls, sockets_at
from forgeyard_networks.firewall.backend import Backend, Sets
from forgeyard_networks.firewall.forwarding import uplink_sysctls
from forgeyard_networks.firewall.hub import DNS_PORT, NO_UPLINK_ROUTE, HubPolicy, install_hub
from forgeyard_networks.topology import Topology

_ACCOUNTING: Final = {"net.netfilter.nf_conntrack_acct": "1"}


@dataclass(slots=True)
class Listeners:
    """Bound sockets in the router. Whoever serves one owns it."""

    dns_udp: socket.socket
    dns_tcp: socket.socket
    fetch: socket.socket | None


class RouterParts:
    """Filled step by step; `close` drops whatever is there, however far it came.

    :param release: gives the block of addresses back.
    """

    def __init__(self, topology: Topology, release: Callable[[Topology], None], *, prepared: bool) -> None:
        self.topology = topology
        self.listeners: Listeners | None = None
        self.log: PacketLog | None = None
        self.flows: Flows | None = None
        self.sets: Sets | None = None
        self._release: Callable[[Topology], None] | None = release
        self._prepared = prepared

    def enforce(self, backend: Backend, policy: HubPolicy) -> None:
        """Put the rules in force.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        fd = self.topology.router.fd
        install_hub(backend, fd, policy, self.topology.block, prepared=self._prepared)
        if policy.sets:
            self.sets = backend.sets_in(fd)

    def equip(self, members: int, fetch_port: int | None, *, nflog: bool, uplink: bool) -> None:
        """Namespaces of the members, sockets to serve at, and what is watched.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED.
        """
        self.topology.build(members)
        if not uplink:
            self.topology.links.run(NO_UPLINK_ROUTE)
        self.listeners = self._listen(fetch_port)
        if nflog:
            self.log = PacketLog(self.topology.router.fd)
        if uplink:
            self.flows = Flows(self.topology.router.fd)

    def lead_out(self, host: Links, host_fd: int) -> None:
        """The way to the executor's own namespace. The rules of both are in force by then.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        in_namespace(self.topology.router.fd, lambda: set_sysctls(_ACCOUNTING))
        self.topology.add_uplink(host, host_fd)
        in_namespace(host_fd, lambda: set_sysctls(uplink_sysctls(self.topology.uplink)))

    def close(self) -> None:
        """Drop everything. Idempotent. The kernel takes it down in its own time."""
        release, self._release = self._release, None
        if release is None:
            return
        sockets = self.listeners
        if sockets is not None:
            for made in (sockets.dns_udp, sockets.dns_tcp, sockets.fetch):
                if made is not None:
                    made.close()
        for part in (self.log, self.flows, self.sets):
            if part is not None:
                part.close()
        self.topology.close()
        release(self.topology)

    def _listen(self, fetch_port: int | None) -> Listeners:
        gateway, fd = str(self.topology.block.gateway), self.topology.router.fd
        ports = [DNS_PORT] if fetch_port is None else [DNS_PORT, fetch_port]
        udp, tcp, *fetch = sockets_at(fd, gateway, udp=[DNS_PORT], tcp=ports)
        return Listeners(udp, tcp, fetch[0] if fetch else None)
