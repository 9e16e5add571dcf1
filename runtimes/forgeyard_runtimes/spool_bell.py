"""Wakes readers on the event loop from the pump's thread, with at most one call to the loop under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Readers `wait` on the event loop, the pump's thread does `ring`. One spool's readers share one loop.

    No wake-up is lost without a lock: a reader joins first and then looks whether something changed, the pump changes
    it first and then looks for readers.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ringing = False

    async def wait(self, changed: Callable[[], bool]) -> None:
        """Return once `changed` may hold."""
        self._loop = asyncio.get_running_loop()
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            if not changed():
                await waiter
        finally:
            self._waiters.discard(waiter)

    def ring(self) -> None:
        """Wake every reader that waits. Any thread."""
        if self._loop is None or self._ringing or not self._waiters:
            return
        self._ringing = True
        with suppress(RuntimeError):  # the loop is closed, and its readers with it
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        # Cleared first: whoever joins from here on is served by the next ring.
        self._ringing = False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
