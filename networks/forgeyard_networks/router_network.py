"""An attempt's own network while it is open: resolver, fetch proxy, and the watch over its connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from forgeyard_host.netns import namespace_of, stream_socket
from forgeyard_model.errors import ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.network import NetworkEvidence
from forgeyard_networks.attempt_network import MemberNetwork, NetworkRequest, connected, member_names
from forgeyard_networks.etc_files import hosts_text, resolv_text
from forgeyard_networks.evidence import Traffic, fetch_records, name_records, names_by_address
from forgeyard_networks.names import MemberNames, name_table
from forgeyard_networks.policy import FETCH_PORT, CompiledPolicy
from forgeyard_networks.publish import Published
from forgeyard_networks.resolver import Resolver
from forgeyard_networks.resolver_upstream import Upstream
from forgeyard_networks.router_parts import RouterParts
from forgeyard_networks.tasks import InPool, to_the_end
from forgeyard_networks.watch import Watch

if TYPE_CHECKING:
    from forgeyard_networks.proxy import FetchProxy

log: Final = logging.getLogger("forgeyard.networks")

RENEWAL: Final = 30.0
"""Seconds between two looks at which addresses are in use and have to stay open."""
_UNSEEN: Final = "connections were not watched to the end: what is listed is what was seen before"


class RouterNetwork:
    """See AttemptNetwork. `serve`, then `close`.

    :param parts: with the rules in force, and closed with the network.
    :param forget: called when it is closed.
    """

    def __init__(
        self,
        request: NetworkRequest,
        compiled: CompiledPolicy,
        parts: RouterParts,
        in_pool: InPool,
        *,
        backend: str,
        notes: tuple[str, ...],
        forget: Callable[[RouterNetwork], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.notes = notes
        self._request, self._compiled, self._parts = request, compiled, parts
        self._in_pool, self._backend, self._forget = in_pool, backend, forget
        self._names = member_names(
            request.members, [parts.topology.block.member(n) for n in range(len(request.members))]
        )
        self.members: Mapping[str, MemberNetwork] = MappingProxyType(dict(self._described()))
        self._watch = Watch(
            parts.log,
            parts.flows,
            Traffic(parts.topology.block.inside),
            lines=request.lines,
            failed=partial(self._fail, "evidence_stopped", "the watch over a job's connections stopped"),
        )
        self._resolver: Resolver | None = None
        self._proxy: FetchProxy | None = None
        self._published = Published(self.connect)
        self._renewing: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    async def serve(self, upstream: Upstream, proxy: Callable[[Any, Any], FetchProxy] | None) -> None:
        """Start everything that serves the members. `close` is to be called also when this fails.

        :param proxy: makes the fetch proxy of a listening socket and a callback for its records.
        """
        listeners = self._parts.listeners
        assert listeners is not None  # noqa: S101  `equip` made them
        self._watch.start()
        if proxy is not None and listeners.fetch is not None:
            self._proxy = proxy(listeners.fetch, lambda record: self._watch.tell("fetch", record.document()))
            self._proxy.failed.add_done_callback(self._part_failed)
        names = name_table(self._names)
        self._resolver = await Resolver.serve(
            listeners.dns_udp,
            listeners.dns_tcp,
            names=names,
            policy=self._compiled.resolver,
            upstream=upstream,
            open_addresses=self._open_address,
            audit=lambda record: self._watch.tell("dns", asdict(record)),
        )
        self._resolver.failed.add_done_callback(self._part_failed)
        publish = (*self._request.policy.publish, *self._request.publish)
        if publish:
            await self._published.open(publish, {name: str(address) for name, address in names.items()})
        if self._compiled.resolver.opens:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def connect(
        self, address: str, port: int, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See AttemptNetwork."""
        topology = self._parts.topology
        where = topology.member(0) if IPv4Address(address).is_loopback else topology.router
        if where is None:
            raise ConnectionRefusedError("the job's container has yet to be made")
        return await connected(partial(stream_socket, where.fd), address, port, timeout)

    @property
    def settled(self) -> bool:
        """See AttemptNetwork: they are ours to give."""
        return True

    async def plumb(self, member: str, pid: int) -> None:
        """See AttemptNetwork."""
        number = [own.name for own in self._names].index(member)
        namespace = namespace_of(pid)
        await to_the_end(self._in_pool(lambda: self._parts.topology.plumb(number, namespace)))

    async def evidence(self) -> NetworkEvidence:
        """See AttemptNetwork."""
        if self._closing is None:
            self._watch.catch_up()
        traffic = self._watch.traffic.copy()
        if self._parts.flows is not None and self._closing is None:
            (still_open,) = await to_the_end(self._in_pool(self._parts.flows.open))
            traffic.ended(still_open)
        questions = () if self._resolver is None else self._resolver.records()
        return NetworkEvidence(
            mode=self._request.policy.mode,
            backend=self._backend,
            audit=self._compiled.hub.audit,
            destinations=traffic.records(names_by_address(questions)),
            dns=name_records(questions),
            fetches=() if self._proxy is None else fetch_records(self._proxy.totals()),
            truncated=traffic.truncated,
            notes=(*self.notes, _UNSEEN) if self._watch.broken else self.notes,
        )

    async def close(self) -> None:
        """See AttemptNetwork."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            self._watch.stop()
            if self._renewing is not None:
                self._renewing.cancel()
                await asyncio.wait([self._renewing])
            await self._published.close()
            for part in (self._proxy, self._resolver):
                if part is not None:
                    await part.close()
        finally:
            self._parts.close()
            self._forget(self)
            if not self.failed.cancel() and not self.failed.cancelled():
                self.failed.exception()  # whoever wanted to know has looked

    def _described(self) -> list[tuple[str, MemberNetwork]]:
        topology, names = self._parts.topology, self._names
        gateway = topology.block.gateway
        environment, files = self._proxy_settings(str(gateway))
        return [
            (
                own.name,
                MemberNetwork(
                    netns=None if self._request.plumbed else topology.members[number].path,
                    address=str(own.address),
                    hosts=hosts_text(own, names),
                    resolv_conf=resolv_text(gateway),
                    hostname=own.hostname or own.name,
                    environment=environment,
                    home_files=files,
                ),
            )
            for number, own in enumerate(names)
        ]

    def _proxy_settings(self, gateway: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
        if self._compiled.fetch is None:
            return MappingProxyType({}), MappingProxyType({})
        from forgeyard_networks.proxy_environment import jvm_files, proxy_environment

        spared = _spared_names(self._names)
        return proxy_environment(gateway, FETCH_PORT, spared), jvm_files(gateway, FETCH_PORT, spared)

    async def _open_address(self, index: int, address: IPv4Address, seconds: int) -> None:
        sets = self._parts.sets
        if sets is not None:
            await to_the_end(self._in_pool(lambda: sets.add(f"h{index}", address, seconds)))

    async def _renew(self) -> None:
        flows, resolver = self._parts.flows, self._resolver
        try:
            while flows is not None and resolver is not None:
                await asyncio.sleep(RENEWAL)
                (found,) = await to_the_end(self._in_pool(flows.open))
                await resolver.renew(found)
        except ForgeyardError as error:
            self._fail("renewal_failed", "addresses that a job uses can't be kept open", error)

    def _part_failed(self, future: asyncio.Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception):
            self._fail("network_part_died", "a part of the job's network died", error)

    def _fail(self, reason: str, brief: str, error: Exception) -> None:
        """Tell whoever watches `failed`; what is left stays closed, since nothing here ever opens on failure."""
        log.error("%s: %s", brief, error, exc_info=error)
        if not self.failed.done():
            told = SandboxError(SandboxErrorKind.NETWORK_SETUP_FAILED, reason, brief, details=str(error))
            told.__cause__ = error
            self.failed.set_exception(told)


def _spared_names(members: tuple[MemberNames, ...]) -> list[str]:
    """What is reached without the proxy: members by name and address."""
    return [text for member in members for text in (*member.all(), str(member.address))]
