"""Bring what CNI has attached in line with the jobs that live, at the start of an executor and by `gc`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from forgeyard_model.errors import ForgeyardError
from forgeyard_networks.cni.attachment import OURS, Attachment
from forgeyard_networks.cni.cache import DEFAULT_CACHE, Cache, Entry
from forgeyard_networks.cni.claims import DEFAULT_CLAIMS, Claims
from forgeyard_networks.cni.config import Conflist
from forgeyard_networks.cni.detach import Detacher
from forgeyard_networks.cni.leases import Lease, lease_directories, release
from forgeyard_networks.cni.plugins import DEFAULT_SECONDS, Call, Plugins, explain, plugin_dirs


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What was found. `leases`: addresses given back besides. `problems`: what is still to be done, in words."""

    deleted: tuple[Attachment, ...]
    leases: tuple[str, ...]
    problems: tuple[str, ...]


async def reconcile(
    valid: Collection[str],
    *,
    networks: Sequence[Conflist] = (),
    dirs: Sequence[str] | None = None,
    cache_dir: str = DEFAULT_CACHE,
    claims_dir: str = DEFAULT_CLAIMS,
    seconds: float = DEFAULT_SECONDS,
) -> Reconciled:
    """Take off every attachment of a container that lives no more.

    DEL for each that the cache has, then GC for plugins that know it, then host-local's leases for our names. What a
    living process claims is left alone, whichever executor's it is.

    :param valid: ids of containers that live.
    :param networks: the configured ones; those of the cache come on top.
    :raises SandboxError: NETWORK_SETUP_FAILED, when the cache can't be read.
    """
    plugins = Plugins(plugin_dirs() if dirs is None else dirs, seconds)
    work = _Reconciliation(frozenset(valid), plugins, Cache(cache_dir), Claims(claims_dir))
    await work.delete_attachments({config.name: config for config in networks})
    for config in work.networks.values():
        await work.collect_garbage(config)
        await asyncio.to_thread(work.release_leases, config)
    work.claims.sweep()
    return Reconciled(tuple(work.deleted), tuple(work.leases), tuple(work.problems))


@dataclass(slots=True)
class _Reconciliation:
    valid: frozenset[str]
    plugins: Plugins
    cache: Cache
    claims: Claims
    networks: dict[str, Conflist] = field(default_factory=dict)
    deleted: list[Attachment] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def delete_attachments(self, configured: dict[str, Conflist]) -> None:
        entries = self.cache.entries()
        known = {entry.config.name: entry.config for entry in entries if entry.config is not None}
        self.networks = known | configured
        detacher = Detacher(self.plugins, self.cache)
        for entry in entries:
            if self._lives(entry.attachment):
                continue
            try:
                await detacher.detach(self._readable(entry))
                self.deleted.append(entry.attachment)
            except ForgeyardError as error:
                self.problems.append(explain(error))

    async def collect_garbage(self, config: Conflist) -> None:
        """GC (specification 1.1): only where the configuration speaks it, since older plugins refuse the command."""
        try:
            config = await self.plugins.negotiate(config)
            if not config.speaks("1.1.0") or config.disable_gc:
                return
        except ForgeyardError as error:
            self.problems.append(explain(error))
            return
        attached = [{"containerID": at.container, "ifname": at.ifname} for at in self._attached(config.name)]
        for plugin in config.plugins:
            document = config.document(plugin, {}, **{"cni.dev/valid-attachments": attached})
            try:
                await self.plugins.run(plugin.kind, Call("GC"), document)
            except ForgeyardError as error:
                self.problems.append(explain(error))

    def release_leases(self, config: Conflist) -> None:
        """Leases of our containers that no entry told of. Those of other programs are not ours to judge. Blocking."""
        # By container and not by interface, which old files do not name.
        kept = self.valid | {at.container for at in self._attached(config.name)}

        def stale(lease: Lease) -> bool:
            return lease.container.startswith(OURS) and lease.container not in kept

        for directory in lease_directories(config):
            try:
                self.leases += [lease.address for lease in release(directory, stale)]
            except OSError as error:
                self.problems.append(f"the leases in {directory} can't be checked: {error}")

    def _attached(self, network: str) -> list[Attachment]:
        """What is there: entries that stay, and what other executors claim."""
        found = {entry.attachment for entry in self.cache.entries() if entry.attachment.network == network}
        found |= set(self.claims.all_live(network))
        return sorted(found, key=lambda at: at.key)

    def _lives(self, attachment: Attachment) -> bool:
        return attachment.container in self.valid or self.claims.live(attachment)

    def _readable(self, entry: Entry) -> Entry:
        """An entry that can't be read gets the configuration that its network has now."""
        if entry.config is None:
            return replace(entry, config=self.networks.get(entry.attachment.network))
        return entry
