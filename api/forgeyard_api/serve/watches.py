"""What ends an attempt from outside: its lease, and the death of the process that prepared it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from forgeyard_host.processes import start_time
from forgeyard_model.result import CancellationReason

Key = tuple[int, str]
Expired = Callable[[Key, CancellationReason], Awaitable[None]]

NOBODY: Final = (0, 0)


class Watches:
    """Timers and process descriptors, by attempt. Used on the event loop only."""

    def __init__(self, expired: Expired) -> None:
        self._expired = expired
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._owners: dict[Key, int] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    def watch(self, key: Key, *, lease: float | None = None, owner: tuple[int, int] = NOBODY) -> None:
        """Begin, or begin anew: a lease runs from now on.

        :param lease: seconds. owner: a process, by pid and start time; NOBODY watches nobody.
        """
        loop = asyncio.get_running_loop()
        if lease is not None:
            if key in self._timers:
                self._timers[key].cancel()
            self._timers[key] = loop.call_later(lease, self._end, key, CancellationReason.LEASE_EXPIRED)
        if owner != NOBODY and key not in self._owners:
            self._watch_process(key, owner)

    def unwatch(self, key: Key) -> None:
        """Nothing ends it any more. Repeating it is no error."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        pidfd = self._owners.pop(key, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Watch nothing any more."""
        for key in [*self._timers, *self._owners]:
            self.unwatch(key)

    @staticmethod
    def identity(pid: int) -> tuple[int, int]:
        """A living process, so that another one that is given its number is told from it; NOBODY once it is dead."""
        try:
            return pid, start_time(pid)
        except ProcessLookupError:
            return NOBODY

    def _watch_process(self, key: Key, owner: tuple[int, int]) -> None:
        try:
            pidfd = os.pidfd_open(owner[0])
        except ProcessLookupError:
            self._end(key, CancellationReason.USER)
            return
        if self.identity(owner[0]) != owner:
            os.close(pidfd)
            self._end(key, CancellationReason.USER)
            return
        self._owners[key] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, partial(self._end, key, CancellationReason.USER))

    def _end(self, key: Key, reason: CancellationReason) -> None:
        self.unwatch(key)
        task = asyncio.ensure_future(self._expired(key, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
