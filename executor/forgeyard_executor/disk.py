"""Watches the writable layer of a job with a disk limit: whether it was ever full can't be told afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from forgeyard_host.host import Host
from forgeyard_model.result import DiskEvidence

INTERVAL = 0.1
"""Seconds between two looks. The limit itself is the filesystem's; this is only for the verdict."""


class DiskWatch:
    """Samples usage while the job runs. Without a limit there is nothing to watch."""

    def __init__(self, host: Host, directory: str, limit: int | None) -> None:
        self._host = host
        self._directory = directory
        self._evidence = DiskEvidence(limit=limit)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin sampling."""
        if self._evidence.limit is not None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> DiskEvidence:
        """One last look, and what was seen."""
        if self._task is None:
            return self._evidence
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        self._look()
        return self._evidence

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(INTERVAL)

    def _look(self) -> None:
        now = self._host.disk_usage(self._directory)
        peak = max(now.peak or 0, self._evidence.peak or 0)
        self._evidence = replace(self._evidence, peak=peak, full=self._evidence.full or now.full)
