"""The operators' networks of one executor: opened by name, shared by its attempts, and what crashes left on them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from forgeyard_host.netns import unpin
from forgeyard_model.errors import ForgeyardError
from forgeyard_networks.attempt_network import AttemptNetwork, NetworkRequest
from forgeyard_networks.cni.load import list_networks
from forgeyard_networks.cni.network import CniNetwork
from forgeyard_networks.cni.reconcile import reconcile
from forgeyard_networks.ipam import MAX_MEMBERS
from forgeyard_networks.operator_network import OperatorNetwork, container_id, is_dead
from forgeyard_networks.settings import NetworkSettings
from forgeyard_networks.tasks import InPool, to_the_end


class OperatorNetworks:
    """Of one executor."""

    def __init__(self, settings: NetworkSettings, in_pool: InPool) -> None:
        self._settings, self._in_pool = settings, in_pool
        self._pins = Path(settings.run_dir) / "netns"
        self._claims = f"{settings.run_dir}/cni"
        self._networks: dict[str, CniNetwork] = {}

    async def attach(self, request: NetworkRequest, forget: Callable[[AttemptNetwork], None]) -> OperatorNetwork:
        """Attach every member.

        :raises ForgeyardError: typed; what could not be taken back is in a note of the error, and found by `recover`.
        """
        made = OperatorNetwork(request, self._network(request.policy.conflist), self._pins, self._in_pool, forget)
        try:
            await made.attach()
        except BaseException as error:
            try:
                await made.close()
            except ForgeyardError as left:
                error.add_note(str(left))
            raise
        return made

    async def recover(self, valid: Collection[str]) -> tuple[str, ...]:
        """See NetworkManager.recover."""
        settings = self._settings
        configured, broken = list_networks(settings.config.conflist_dirs)
        ours = [found for found in configured if found.name in settings.config.conflists]
        living = {container_id(sandbox, number) for sandbox in valid for number in range(MAX_MEMBERS)}
        found = await reconcile(
            living,
            networks=ours,
            dirs=settings.config.plugin_dirs,
            cache_dir=settings.cni_cache,
            claims_dir=self._claims,
        )
        (unpinned,) = await to_the_end(self._in_pool(self._unpin_dead))
        return (*(str(error) for error in broken if ours), *found.problems, *unpinned)

    def close(self) -> None:
        """Let go of the locks."""
        for network in self._networks.values():
            network.close()
        self._networks.clear()

    def _network(self, name: str) -> CniNetwork:
        if name not in self._networks:
            config = self._settings.config
            self._networks[name] = CniNetwork.named(
                name,
                config.conflist_dirs,
                dirs=config.plugin_dirs,
                cache_dir=self._settings.cni_cache,
                claims_dir=self._claims,
            )
        return self._networks[name]

    def _unpin_dead(self) -> list[str]:
        """Take the names of namespaces away whose executors are gone."""
        problems = []
        for path in sorted(self._pins.iterdir()) if self._pins.is_dir() else ():
            if is_dead(path):
                try:
                    unpin(path)
                except ForgeyardError as error:
                    problems.append(str(error))
        return problems
