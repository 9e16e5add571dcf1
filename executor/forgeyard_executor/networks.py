"""The networks of one executor, made ready by the first job that needs one. A job without costs nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forgeyard_executor.networked import Networked, attach, is_networked, is_plumbed
from forgeyard_model.config import NetworkConfig
from forgeyard_model.identity import SandboxId
from forgeyard_model.policy import NetworkMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.services import ServiceNetwork
from forgeyard_networks.firewall.registered import HOST_RULES, abandoned
from forgeyard_runtimes.contract import NetworkJoin, NetworkShare

if TYPE_CHECKING:
    from forgeyard_networks.manager import NetworkCapabilities, NetworkManager
    from forgeyard_networks.pool import PoolMetrics

CLAIMED: Final = frozenset({NetworkMode.FETCH_ONLY, NetworkMode.RESTRICTED, NetworkMode.ALLOW, NetworkMode.CONFLIST})
"""What is held to be possible before anybody looked: a network that can't be enforced is then refused as it is made."""

InPool = Callable[[Callable[[], Any]], asyncio.Future[Any]]


class Networks:
    """Opens the manager of networks when it is first needed, and closes it."""

    def __init__(
        self,
        config: NetworkConfig,
        state_dir: str,
        in_pool: InPool,
        join: NetworkJoin = "inherited",
        share: NetworkShare = "made",
    ) -> None:
        self._config = config
        self._join: NetworkJoin = join
        self._share: NetworkShare = share
        self._state_dir = state_dir
        self._in_pool = in_pool
        self._lock = asyncio.Lock()
        self._manager: NetworkManager | None = None
        self._opened = False
        self.known: NetworkCapabilities | None = None
        """What a look at the host found; None while there was none."""

    def _made(self) -> NetworkManager:
        if self._manager is None:
            from forgeyard_networks.manager import NetworkManager
            from forgeyard_networks.settings import NetworkSettings

            self._manager = NetworkManager(NetworkSettings.of(self._config, self._state_dir), in_pool=self._in_pool)
        return self._manager

    async def open(self) -> NetworkManager:
        """The manager, ready; a configured pool begins to fill.

        :raises ForgeyardError: the configuration can't be used here.
        """
        async with self._lock:
            manager = self._made()
            if not self._opened:
                await manager.open()
                self._opened = True
            return manager

    def pool(self) -> PoolMetrics | None:
        """What became of networks that were made ahead of time; None while there are none."""
        return self._manager.metrics() if self._manager is not None and self._opened else None

    def refuse(self, request: ExecutionRequest) -> None:
        """Refuse a network that no host could make, before anything of it is made.

        :raises InvalidRequest: for a destination. :raises ExecutorError: UNSUPPORTED.
        """
        if is_networked(request):
            own = sum(item.network is ServiceNetwork.OWN for item in request.spec.services)
            self._made().refuse(request.network, own + 1)

    async def attach(self, sandbox: SandboxId, request: ExecutionRequest) -> Networked:
        """A network for `request`.

        :raises ForgeyardError: it can't be made, or not enforced.
        """
        plumbed = is_plumbed(request, self._join, self._share)
        return await attach(await self.open(), sandbox, request, plumbed=plumbed)

    async def capabilities(self) -> NetworkCapabilities:
        """What networks this host can make, by a look at it."""
        self.known = found = await (await self.open()).capabilities()
        return found

    @property
    def modes(self) -> frozenset[NetworkMode]:
        """Those that a job may ask for."""
        return CLAIMED if self.known is None else self.known.modes & CLAIMED

    async def recover(self, alive: Collection[str]) -> tuple[str, ...]:
        """Undo what dead executors attached to operators' networks, and their rules on this host, if there is any.

        :param alive: sandboxes that still are.
        :returns: what went wrong, a line each.
        """
        left = Path(self._state_dir, "cni", "results")
        if self._config.conflists or left.exists() or abandoned(HOST_RULES):  # noqa: ASYNC240  looks of microseconds
            return await (await self.open()).recover(alive)
        return ()

    async def close(self) -> None:
        """Let go of all. Idempotent."""
        async with self._lock:
            manager, self._manager = self._manager, None
            if manager is not None and self._opened:
                self._opened = False
                await manager.close()
