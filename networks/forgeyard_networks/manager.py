"""The networks of one executor: from a policy to a network with everything in place, and back to nothing.

What the executor uses, and may rely on:

    manager = NetworkManager(NetworkSettings.of(config.network, state_dir), in_pool=services.in_pool)
    await manager.open(); ...; await manager.close()
    manager.refuse(policy, members)                 sync, pure: InvalidRequest, ExecutorError(UNSUPPORTED)
    network = await manager.attach(NetworkRequest(sandbox, policy, members))
    network.members[name].netns, .address, .hosts, .resolv_conf, .hostname, .environment, .home_files
    await network.connect(address, port, timeout); await network.evidence(); await network.close()
    network.failed, network.notes
    await manager.capabilities(); manager.metrics(); await manager.recover(valid_sandbox_ids)

No network is attached for host, nor for deny without services: there the runtime's own namespace is all there is.
A job on an operator's network has NetworkMode.CONFLIST; its impurity is ``network conflist NAME``.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forgeyard_model.errors import ForgeyardError, InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.policy import NetworkMode, NetworkPolicy
from forgeyard_networks.attempt_network import AttemptNetwork, NetworkRequest
from forgeyard_networks.ipam import MAX_MEMBERS
from forgeyard_networks.policy import FETCH_PORT, check_policy
from forgeyard_networks.pool import PoolMetrics
from forgeyard_networks.resolver_upstream import Upstream
from forgeyard_networks.router_network import RouterNetwork
from forgeyard_networks.router_parts import RouterParts
from forgeyard_networks.routers import Begun, Routers
from forgeyard_networks.settings import NetworkSettings
from forgeyard_networks.tasks import InPool, to_the_end

if TYPE_CHECKING:
    from forgeyard_networks.firewall.probe import ForwardingReport
    from forgeyard_networks.operator_networks import OperatorNetworks

log: Final = logging.getLogger("forgeyard.networks")
UPKEEP: Final = 30.0
"""Seconds between two looks at whether the host's rules are still there."""


@dataclass(frozen=True, slots=True)
class NetworkCapabilities:
    """What networks this host can make.

    :ivar modes: those that can be made; host never is, and deny matters beside services alone.
    :ivar backend: what enforces them, in words. `problem`: why some can't be, `cure`: what to do.
    """

    modes: frozenset[NetworkMode]
    backend: str
    problem: str = ""
    cure: str = ""


class NetworkManager:
    """Of one executor, on one event loop.

    :param in_pool: runs a blocking call in a bounded pool of threads.
    """

    def __init__(self, settings: NetworkSettings, *, in_pool: InPool) -> None:
        """:raises InvalidRequest: a range of addresses that can't be used."""
        self._settings, self._in_pool = settings, in_pool
        self._routers = Routers(settings)
        self._open: set[AttemptNetwork] = set()
        self._operators: OperatorNetworks | None = None
        self._forwarding: ForwardingReport | None = None
        self._upkeep: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Nothing is made before the first attach, but the pool where there is one: it fills by itself."""
        self._routers.fill_pool()

    async def close(self) -> None:
        """Drop what is still open, empty the pool, and leave the host's rules.

        :raises SandboxError: the first thing that could not be undone; the rest was tried as well.
        """
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        closing = [network.close() for network in tuple(self._open)]
        try:
            await to_the_end(*closing)
        finally:
            if self._operators is not None:
                self._operators.close()
            await to_the_end(self._in_pool(self._routers.close))

    def refuse(self, policy: NetworkPolicy, members: int) -> None:
        """Whether a network for `policy` with so many members can be made, as far as that is known without trying.

        :raises InvalidRequest: names what has to be written in another way.
        :raises ExecutorError: UNSUPPORTED: the configuration does not provide for it.
        :raises SandboxError: NETWORK_SETUP_FAILED: the last forwarding test failed.
        """
        if members > MAX_MEMBERS:
            raise InvalidRequest("services", members - 1, f"a job's network has room for {MAX_MEMBERS - 1} services")
        check_policy(policy, self._settings.config)
        if policy.mode in (NetworkMode.RESTRICTED, NetworkMode.ALLOW):
            _refuse_dropped(self._forwarding)

    async def attach(self, request: NetworkRequest) -> AttemptNetwork:
        """A network with rules, listeners and names in place, before any process is in it.

        :raises ForgeyardError: typed; nothing is left then, and nothing weaker was put in its place.
        """
        if request.audit and not request.policy.audit:
            policy = NetworkPolicy(NetworkMode.ALLOW, request.policy.egress, audit=True, publish=request.policy.publish)
            request = replace(request, policy=policy)
        self.refuse(request.policy, len(request.members))
        if request.policy.mode is NetworkMode.CONFLIST:
            made: AttemptNetwork = await self._operator_networks().attach(request, self._open.discard)
        else:
            made = await self._attach_router(request)
        self._open.add(made)
        return made

    async def capabilities(self) -> NetworkCapabilities:
        """What this host can do, from trying it: rules are loaded, and a connection is made through them and back."""
        modes = {NetworkMode.DENY}
        if self._settings.config.conflists:
            modes.add(NetworkMode.CONFLIST)
        try:
            (firewall,) = await to_the_end(self._in_pool(self._routers.firewall.get))
        except SandboxError as error:
            return NetworkCapabilities(frozenset(modes - {NetworkMode.DENY}), "", str(error.brief), error.resolution)
        if self._settings.config.fetch:
            modes.add(NetworkMode.FETCH_ONLY)
        try:
            (self._forwarding,) = await to_the_end(self._in_pool(self._routers.probe_forwarding))
            _refuse_dropped(self._forwarding)
        except SandboxError as error:
            return NetworkCapabilities(frozenset(modes), firewall.summary, str(error), error.resolution)
        return NetworkCapabilities(frozenset({*modes, NetworkMode.RESTRICTED, NetworkMode.ALLOW}), firewall.summary)

    def metrics(self) -> PoolMetrics:
        """Of the pool of ready networks."""
        return self._routers.metrics()

    async def recover(self, valid: Collection[str]) -> tuple[str, ...]:
        """Undo what dead executors left: attachments to operators' networks, and the host's rules for ours.

        Our own networks died with their executor.

        :param valid: ids of sandboxes that live.
        :returns: what went wrong, a line each.
        """
        errors = await self._recover_operators(valid)
        try:
            await to_the_end(self._in_pool(self._routers.sweep_host))
        except ForgeyardError as error:
            errors = (*errors, str(error))
        return errors

    async def _recover_operators(self, valid: Collection[str]) -> tuple[str, ...]:
        if not self._settings.config.conflists and not os.path.exists(self._settings.cni_cache):  # noqa: PTH110, ASYNC240  a microsecond
            return ()
        return await self._operator_networks().recover(valid)

    async def _attach_router(self, request: NetworkRequest) -> RouterNetwork:
        made: list[RouterParts] = []
        network: RouterNetwork | None = None
        try:
            (begun,) = await to_the_end(self._in_pool(lambda: self._routers.begin(request.policy, made)))
            await self._equip(request, begun)
            network = RouterNetwork(
                request,
                begun.compiled,
                begun.parts,
                self._in_pool,
                backend=begun.firewall.routers.name,
                notes=tuple(_notes(begun)),
                forget=self._open.discard,
            )
            await self._serve(network, begun)
        except BaseException:
            # The first error is the one to tell; closing parts has none of its own.
            if network is not None:
                await network.close()
            for parts in made:
                parts.close()
            raise
        return network

    async def _equip(self, request: NetworkRequest, begun: Begun) -> None:
        """Rules, members and sockets at the same time; the way out when all of it is there."""
        parts, compiled = begun.parts, begun.compiled
        fetch_port = None if compiled.fetch is None else FETCH_PORT
        equip = partial(
            parts.equip,
            0 if request.plumbed else len(request.members),
            fetch_port,
            nflog=begun.firewall.nflog,
            uplink=compiled.uplink,
        )
        works = [self._in_pool(partial(self._routers.enforce, begun)), self._in_pool(equip)]
        if compiled.uplink:
            works.append(self._in_pool(self._routers.share_host))
        await to_the_end(*works)
        if compiled.uplink:
            await to_the_end(self._in_pool(lambda: self._routers.lead_out(parts)))
            self._keep_up()

    async def _serve(self, network: RouterNetwork, begun: Begun) -> None:
        found = begun.upstreams
        upstream = Upstream(found.servers, port=self._settings.dns_port, problem=found.problem)
        policy = begun.compiled.fetch
        if policy is None:
            await network.serve(upstream, None)
            return
        from forgeyard_networks.proxy import FetchProxy
        from forgeyard_networks.proxy_upstream import resolve_by
        from forgeyard_oci.registry.proxies import Proxies

        proxy = self._settings.config.proxy

        def serve(listener: Any, audit: Any) -> FetchProxy:
            return FetchProxy.serve(
                listener, policy=policy, resolve=resolve_by(upstream), proxies=Proxies(proxy, proxy), audit=audit
            )

        await network.serve(upstream, serve)

    def _operator_networks(self) -> OperatorNetworks:
        if self._operators is None:
            from forgeyard_networks.operator_networks import OperatorNetworks

            self._operators = OperatorNetworks(self._settings, self._in_pool)
        return self._operators

    def _keep_up(self) -> None:
        if self._upkeep is None:
            self._upkeep = asyncio.get_running_loop().create_task(self._mend(), name="forgeyard-network-upkeep")

    async def _mend(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP)
            try:
                await to_the_end(self._in_pool(self._routers.mend_host))
            except ForgeyardError as error:
                # Routers enforce by themselves; this is what keeps the host's own side in order.
                log.error("this host's rules for job networks can't be kept in force: %s", error)  # noqa: TRY400  told in one line, again and again


def _refuse_dropped(report: ForwardingReport | None) -> None:
    if report is not None and not report.passes:
        raise SandboxError(
            SandboxErrorKind.NETWORK_SETUP_FAILED,
            "forwarding_dropped",
            "what jobs send outside does not get out of this host",
            details=report.details,
            resolution=report.cure,
        )


def _notes(begun: Begun) -> list[str]:
    found = []
    if not begun.firewall.nflog:
        found.append("connections are not logged: this kernel has no NFLOG")
    if begun.compiled.resolver.forwards or begun.compiled.fetch is not None:
        found += begun.upstreams.notes
        if begun.upstreams.problem:
            found.append(begun.upstreams.problem)
    return found
