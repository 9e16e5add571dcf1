"""Looks at the writable layer of a job while it runs: whether it was ever full can't be told afterwards.

With a disk limit the layer is a filesystem of that size, which holds the limit, and looking is for the verdict alone.
Without one the profile's default is watched: that costs a job nothing at its start, and is a softer promise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from forgeyard_host.host import Host
from forgeyard_host.tree_usage import FilesystemUsage, TreeUsage
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.profile import PROFILES
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.result import DiskEvidence

log: Final = logging.getLogger("forgeyard.executor")

INTERVAL: Final = 0.1
"""Seconds between two looks at a layer with a filesystem of its own."""
FIRST_LOOK: Final = 1.0
"""Seconds between two looks at the host's filesystem, and before the first: a short job is never looked at."""
_IDLE: Final = 30.0
"""Seconds after which a watched tree is counted although its filesystem has not grown: others may have freed room."""
_COUNTING: Final = 10.0
"""Seconds that one count may take."""
_SHARE_BUSY, _SHARE_IDLE = 4, 20
"""Least time between two counts, as a multiple of what the last one took."""
_BYTES_PER_FILE: Final = 8192
"""A filesystem made for a disk limit has one inode for as many bytes: a watched layer may have as many files."""

Kill = Callable[[], Awaitable[None]]


def watch_disk(host: Host, directory: str, request: ExecutionRequest) -> SampledDisk | WatchedDisk:
    """What looks at the writable layer of the attempt in `directory`."""
    return watch_layer(host, directory, request.limits.disk, watched=PROFILES[request.profile].disk_watched)


def watch_layer(host: Host, directory: str, limit: int | None, *, watched: int | None) -> SampledDisk | WatchedDisk:
    """What looks at a writable layer that has the disk limit `limit`, or with none is bounded to `watched`."""
    return WatchedDisk(host, directory, watched) if limit is None else SampledDisk(host, directory, limit)


class _Watch:
    """A task that looks until it is stopped."""

    def __init__(self, host: Host, directory: str, evidence: DiskEvidence) -> None:
        self._host = host
        self._directory = directory
        self._evidence = evidence
        self._task: asyncio.Task[None] | None = None

    @property
    def seen(self) -> DiskEvidence:
        """What was seen up to now."""
        return self._evidence

    async def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


class SampledDisk(_Watch):
    """Samples the use of a filesystem that holds the limit itself."""

    def __init__(self, host: Host, directory: str, limit: int) -> None:
        super().__init__(host, directory, DiskEvidence(limit=limit))

    def start(self, kill: Kill) -> None:
        """Begin sampling."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> DiskEvidence:
        """One last look, and what was seen."""
        if self._task is not None:
            await self._end()
            self._look()
        return self._evidence

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(INTERVAL)

    def _look(self) -> None:
        now, seen = self._host.disk_usage(self._directory), self._evidence
        self._evidence = replace(
            seen,
            peak=max(now.peak or 0, seen.peak or 0),
            full=seen.full or now.full,
            out_of_files=seen.out_of_files or now.out_of_files,
        )


class WatchedDisk(_Watch):
    """Kills a job that has written more than `limit` bytes (None: nothing is watched).

    Counting a tree is slow, asking its filesystem is not: so the tree is counted only when the filesystem has taken in
    half of what the job has left, or after a while.
    """

    def __init__(self, host: Host, directory: str, limit: int | None) -> None:
        super().__init__(host, directory, DiskEvidence(limit=limit, watched=limit is not None))
        self._limit = limit or 0
        self._most_files = self._limit // _BYTES_PER_FILE

    def start(self, kill: Kill) -> None:
        """Begin watching. `kill` ends the job."""
        if self._limit:
            begin = self._host.filesystem_usage(self._directory)
            self._task = asyncio.get_running_loop().create_task(self._watch(begin, kill))

    async def stop(self) -> DiskEvidence:
        """What was seen."""
        await self._end()
        return self._evidence

    async def _watch(self, begin: FilesystemUsage, kill: Kill) -> None:
        counted, known = begin, TreeUsage(0, 0, whole=True)
        took, last = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(FIRST_LOOK)
            now, waited = self._host.filesystem_usage(self._directory), time.monotonic() - last
            idle = waited >= max(_IDLE, _SHARE_IDLE * took)
            if not idle and not (self._grown(counted, now, known) and waited >= _SHARE_BUSY * took):
                continue
            started = time.monotonic()
            known, counted = await asyncio.to_thread(self._count), now
            last = time.monotonic()
            took = last - started
            if self._exceeded(known, begin, now):
                await self._kill(kill)
                return

    def _grown(self, counted: FilesystemUsage, now: FilesystemUsage, known: TreeUsage) -> bool:
        left = max(self._limit - known.bytes, self._limit // 32)
        left_files = max(self._most_files - known.files, self._most_files // 32)
        return now.bytes - counted.bytes >= left / 2 or now.files - counted.files >= left_files / 2

    def _count(self) -> TreeUsage:
        return self._host.tree_usage(
            self._directory, most_bytes=self._limit, most_files=self._most_files, seconds=_COUNTING
        )

    def _exceeded(self, known: TreeUsage, begin: FilesystemUsage, now: FilesystemUsage) -> bool:
        used = known.bytes
        if not known.whole:
            # Too deep or too large to count. What the whole filesystem took in since the start has to stand in for it.
            used = max(used, now.bytes - begin.bytes)
        self._evidence = replace(self._evidence, peak=max(used, self._evidence.peak or 0))
        files = known.files > self._most_files
        if used > self._limit or files:
            self._evidence = replace(self._evidence, full=True, out_of_files=files and used <= self._limit)
        return self._evidence.full

    async def _kill(self, kill: Kill) -> None:
        log.info("disk limit exceeded: the job is killed", extra={"directory": self._directory})
        try:
            await kill()
        except ForgeyardError as error:
            # The attempt's own end kills again, and reports what that meets.
            log.warning("could not kill the job past its disk limit: %s", error)
