"""Makes attempts' routers: everything between a policy and a network that serves it. All of it blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_model.config import FetchCredential
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.policy import NetworkMode, NetworkPolicy
from forgeyard_networks.firewall.detect import Firewall
from forgeyard_networks.firewall.host import HostFirewall
from forgeyard_networks.firewall.hub import prepare_hub
from forgeyard_networks.firewall.registered import abandoned
from forgeyard_networks.firewall_memory import FirewallMemory
from forgeyard_networks.host_resolvers import Upstreams, host_resolvers
from forgeyard_networks.host_side import HostSide
from forgeyard_networks.ipam import Block, Blocks
from forgeyard_networks.policy import CompiledPolicy, compile_policy
from forgeyard_networks.pool import NetworkPool, PoolMetrics
from forgeyard_networks.router_parts import RouterParts
from forgeyard_networks.settings import NetworkSettings, read_secret
from forgeyard_networks.tasks import Lazy
from forgeyard_networks.topology import Topology

if TYPE_CHECKING:
    from forgeyard_networks.firewall.probe import ForwardingReport
    from forgeyard_networks.proxy_policy import UpstreamCredential

log: Final = logging.getLogger("forgeyard.networks")


@dataclass(frozen=True, slots=True)
class Begun:
    """A router that nothing is enforced or served in yet.

    :ivar upstreams: the host's name servers, read for this attempt.
    """

    parts: RouterParts
    firewall: Firewall
    compiled: CompiledPolicy
    upstreams: Upstreams


class Routers:
    """Of one executor. Safe to use from several threads; nothing is made before it is needed."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._network: IPv4Network = settings.network
        self._memory = FirewallMemory(settings.run_dir)
        self.firewall = Lazy(self._memory.recall)
        self._side = Lazy(HostSide)
        self._blocks = Lazy(self._open_blocks)
        self._host = Lazy(self._acquire)
        self._pool = NetworkPool(self._make_ready, self._discard, 0)

    def fill_pool(self) -> None:
        """Begin to keep networks ready, as many as the settings say."""
        self._pool = NetworkPool(self._make_ready, self._discard, self._settings.pool)

    def metrics(self) -> PoolMetrics:
        """Of the pool."""
        return self._pool.metrics()

    def close(self) -> None:
        """Give everything back; attempts' networks are closed by then.

        :raises SandboxError: NETWORK_SETUP_FAILED, when the host's rules can't be taken away.
        """
        self._pool.close()
        try:
            if (host := self._host.take()) is not None:
                host.release()
        finally:
            if (side := self._side.take()) is not None:
                side.close()
            if (blocks := self._blocks.take()) is not None:
                blocks.close()

    def begin(self, policy: NetworkPolicy, made: list[RouterParts]) -> Begun:
        """Take or make a router.

        :param made: gets it, for a caller who gives up waiting for what this returns.
        :raises ForgeyardError: nothing is left then.
        """
        firewall, closed = self.firewall.get(), [self._network]
        if policy.mode is not NetworkMode.DENY:  # every other one has a way out, by the router or by the proxy
            closed += self._side.get().addresses(self._network)
        compiled = compile_policy(policy, self._settings.config, closed)
        if compiled.uplink:
            self._check_routes()
        compiled = self._with_credentials(compiled)
        upstreams = host_resolvers(self._settings.resolv_conf)
        pooled = self._settings.pool > 0
        topology = self._pool.take() if pooled else self._make(Topology.begin)
        parts = RouterParts(topology, self._discard, prepared=pooled)
        made.append(parts)
        return Begun(parts, firewall, compiled, upstreams)

    def enforce(self, begun: Begun) -> None:
        """Put the rules of a router in force.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            begun.parts.enforce(begun.firewall.routers, begun.compiled.hub)
        except SandboxError:
            self._memory.forget()
            raise

    def share_host(self) -> HostFirewall:
        """The host's rules, in force.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        return self._host.get()

    def lead_out(self, parts: RouterParts) -> None:
        """The way out of a router, once all rules are in force.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        side = self._side.get()
        parts.lead_out(side.links, side.namespace.fd)

    def mend_host(self) -> None:
        """Put right what others did to the host's rules, if they are in use. Said in the log.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        host = self._host.made
        if host is not None and (problems := host.problems()):
            log.warning("this host's rules for job networks were changed and are put right: %s", "; ".join(problems))
            host.acquire()

    def probe_forwarding(self) -> ForwardingReport:
        """Does what these rules let out really get out?

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        from forgeyard_networks.firewall.probe import forwarding_probe

        self.share_host()
        return forwarding_probe(self.firewall.get().routers, self._blocks.get())

    def _make(self, make: Callable[[Block], Topology]) -> Topology:
        blocks = self._blocks.get()
        block = blocks.acquire()
        try:
            return make(block)
        except BaseException:
            blocks.release(block)
            raise

    def _make_ready(self) -> Topology:
        made = self._make(Topology.make)
        try:
            prepare_hub(self.firewall.get().routers, made.router.fd, made.block)
        except BaseException:
            self._discard(made)
            raise
        return made

    def _discard(self, topology: Topology) -> None:
        topology.close()
        if (blocks := self._blocks.made) is not None:
            blocks.release(topology.block)

    def _open_blocks(self) -> Blocks:
        # A route that holds the whole range is no reason to leave blocks out: networks without a way out never meet
        # it, and the others are refused for it.
        routes = [route for route in self._side.get().routes() if not self._network.subnet_of(route)]
        return Blocks(self._network, f"{self._settings.run_dir}/subnets", routes=routes)

    def _check_routes(self) -> None:
        for route in self._side.get().covering(self._network):
            raise SandboxError(
                SandboxErrorKind.NETWORK_SETUP_FAILED,
                "range_in_use",
                f"this host has a route to {route}, which holds the addresses of jobs, {self._network}",
                resolution="name another private network under network.range of the configuration",
            )

    def sweep_host(self) -> None:
        """Take away the host's rules that killed executors left, when no other uses them. Blocking.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        if abandoned(Path(self._settings.run_dir) / "net"):
            self._host_firewall().sweep()

    def _host_firewall(self) -> HostFirewall:
        return HostFirewall(self.firewall.get().host, self._network, lock_dir=f"{self._settings.run_dir}/net")

    def _acquire(self) -> HostFirewall:
        made = self._host_firewall()
        made.acquire()
        return made

    def _with_credentials(self, compiled: CompiledPolicy) -> CompiledPolicy:
        if compiled.fetch is None or not self._settings.config.credentials:
            return compiled
        found = _credentials(self._settings.config.credentials)
        return replace(compiled, fetch=replace(compiled.fetch, credentials=found))


def _credentials(configured: Sequence[FetchCredential]) -> tuple[UpstreamCredential, ...]:
    from forgeyard_networks.proxy_policy import UpstreamCredential

    found = []
    for number, item in enumerate(configured):
        where = f"network.credentials[{number}]"
        secret = read_secret(item, where)
        if item.user:
            made = UpstreamCredential.basic(item.host, item.user, secret, port=item.port, tls=item.tls)
        elif item.header:
            made = UpstreamCredential(item.host, secret, item.header, port=item.port, tls=item.tls)
        else:
            made = UpstreamCredential(item.host, f"Bearer {secret}", port=item.port, tls=item.tls)
        made.check(where)
        found.append(made)
    return tuple(found)
