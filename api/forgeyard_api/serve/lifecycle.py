"""The life of a server's process: what signals do, and in which order it ends.

TERM, INT   take no more in, hand the queue back, give what runs time to end, then stop; a second one stops at once
HUP         read the configuration again: who may connect, capacity, tenants, roots
USR1        stop and leave what runs to its keepers, for whoever is started next
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.service_manager import ServiceManager
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.result import CancellationReason

log: Final = logging.getLogger("forgeyard.serve")

STOP_SECONDS: Final = 60.0
"""What attempts have to end once they are told to."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Lifecycle:
    """Waits for what ends a server, and ends its attempts in order.

    :param reload: reads the configuration again.
    :param drain: seconds that running attempts have to end by themselves.
    """

    def __init__(
        self,
        table: AttemptTable,
        reload: Callable[[], None],
        drain: float,
        manager: ServiceManager = ServiceManager(),  # noqa: B008  # it can't be changed
    ) -> None:
        self._table = table
        self._reload = reload
        self._drain = drain
        self._manager = manager
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._leave = False

    async def run(self) -> None:
        """Until the server is to end; its attempts have ended by then, or are left to their keepers."""
        self._listen()
        beating = asyncio.ensure_future(self._manager.beat())
        self._manager.ready()
        try:
            await self._stop.wait()
            if self._leave:
                self._manager.stopping(STOP_SECONDS)
            else:
                self._manager.stopping(self._drain + 3 * STOP_SECONDS)
                await self._end_attempts()
        finally:
            beating.cancel()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        acts = (self._asked_to_stop, self._asked_to_stop, self._asked_to_reload, self._asked_to_leave)
        for number, act in zip(_SIGNALS, acts, strict=True):
            loop.add_signal_handler(number, act)

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    def _asked_to_leave(self) -> None:
        """Once it ends its attempts it is too late for that."""
        self._leave = self._leave or not self._stop.is_set()
        self._stop.set()

    def _asked_to_reload(self) -> None:
        self._manager.reloading()
        try:
            self._reload()
            log.info("the configuration was read again")
        except ForgeyardError as error:
            log.error("the configuration stays as it was: %s", error)  # noqa: TRY400  # its message is all there is to it
        self._manager.ready()

    async def _end_attempts(self) -> None:
        """The queue first: whoever asked may ask another host."""
        table = self._table
        table.drain()
        await table.stop_all(CancellationReason.RUNNER_DRAIN, queued_only=True)
        running, _ = table.counts
        log.info("draining: %d attempts run, for at most %g s", running, self._drain)
        self._manager.status(f"draining: {running} attempts run")
        if await self._idle_within(self._drain):
            return
        if not self._at_once.is_set():
            await table.stop_all(CancellationReason.RUNNER_DRAIN)
            if await self._idle_within(STOP_SECONDS):
                return
        await table.stop_all(CancellationReason.SHUTDOWN, kill=True)
        if not await self._idle_within(STOP_SECONDS, patient=True):
            log.error("attempts did not end; the next start finds them")

    async def _idle_within(self, seconds: float, *, patient: bool = False) -> bool:
        """Whether all end in time. A second signal cuts it short, unless `patient`."""
        idle = asyncio.ensure_future(self._table.until_idle())
        hurry = asyncio.ensure_future(self._at_once.wait())
        waited = (idle,) if patient else (idle, hurry)
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return idle.done()
        finally:
            idle.cancel()
            hurry.cancel()
