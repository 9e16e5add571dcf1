"""What is kept between jobs, images, caches and outputs: the room that it may take, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from shutil import disk_usage
from typing import TYPE_CHECKING, Final

from forgeyard_executor.images import Images
from forgeyard_executor.pressure import Collector, DiskPressure
from forgeyard_executor.state import StatePaths
from forgeyard_model.config import ExecutorConfig, Retention

if TYPE_CHECKING:
    from forgeyard_executor.caches import CacheStore
    from forgeyard_executor.kept_failures import FailureKeeper
    from forgeyard_executor.retention import Keepers

_SETTLED: Final = 5.0
"""Seconds an executor without a retention has to be open before it looks: one that runs a single job never pays."""


class Kept:
    """The stores of one state directory, under the bounds of one configuration."""

    def __init__(self, paths: StatePaths, config: ExecutorConfig, images: Images) -> None:
        self._paths = paths
        self._config = config
        self._images = images
        places = (
            ("images", paths.images),
            ("caches", paths.caches),
            ("sandboxes", paths.sandboxes),
            ("spool", paths.spools),
        )
        self._pressure = DiskPressure(places, config.watermarks, self._collectors)

    def caches(self) -> CacheStore:
        """Made anew for each use: it holds nothing, and most jobs have none."""
        from forgeyard_executor.caches import CacheStore

        return CacheStore.configured(self._paths.caches, self._config.caches, self._config.watermarks.refuse_below)

    def failures(self) -> FailureKeeper | None:
        """Keeps workspaces of failed attempts; None where the operator has none kept."""
        from forgeyard_executor.kept_failures import FailureKeeper

        seconds, marks = self._config.serve.keep_failed, self._config.watermarks

        def enough_room(size: int) -> bool:
            room = disk_usage(self._paths.root)
            return room.free - size >= marks.gc_below.of(room.total)

        return None if seconds is None else FailureKeeper(self._paths.kept, seconds, enough_room)

    async def make_room(self) -> None:
        """Before a job: collect where space is short.

        :raises ExecutorError: PREPARE, disk_pressure, where that was not enough.
        """
        if not self._pressure.ample():
            await self._images.work(lambda _: self._pressure.admit())

    async def retain(self) -> tuple[str, ...]:
        """Remove what the configuration keeps no longer; what went wrong, a line each."""
        from forgeyard_executor.retention import apply_retention

        return await self._images.work(lambda _: apply_retention(self._config.retention, self._keepers()))

    @asynccontextmanager
    async def retaining(self) -> AsyncIterator[None]:
        """For the block, do so now and every hour. What runs at its end is waited for."""
        task = asyncio.get_running_loop().create_task(self._keep(), name="forgeyard retention")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _keep(self) -> None:
        if self._config.retention == Retention():
            # Only what was left half done can be there to remove, and that can wait.
            await asyncio.sleep(_SETTLED)
        from forgeyard_executor.retention import keep_retention

        await keep_retention(self.retain)

    def _collectors(self) -> Sequence[Collector]:
        return self._keepers().collectors()

    def _keepers(self) -> Keepers:
        from forgeyard_executor.retention import Keepers

        return Keepers(self._paths, self.caches, self._prune_images)

    def _prune_images(self, unused_for: float | None, free: int | None) -> object:
        return self._images.store.prune(unused_for=unused_for, keep_bytes=None, free_bytes=free)
