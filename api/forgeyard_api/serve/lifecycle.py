"""The life of a server's process: what signals do, and what its service manager is told.

TERM, INT   take no more in, hand the queue back, give what runs time to end, then stop; a second one stops at once
HUP         read the configuration again: who may connect, capacity, tenants, roots
USR1        stop and leave what runs to its keepers, for whoever is started next
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.result import CancellationReason

log: Final = logging.getLogger("forgeyard.serve")

STOP_SECONDS: Final = 60.0
"""What attempts have to end once they are told to."""


class Lifecycle:
    """Waits for what ends a server, and ends its attempts in order.

    :param reload: reads the configuration again.
    :param drain: seconds that running attempts have to end by themselves.
    """

    def __init__(self, table: AttemptTable, reload: Callable[[], None], drain: float) -> None:
        self._table = table
        self._reload = reload
        self._drain = drain
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._leave = False

    async def run(self) -> None:
        """Until the server is to end; its attempts have ended by then, or are left to their keepers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._asked_to_reload)
        loop.add_signal_handler(signal.SIGUSR1, self._asked_to_leave)
        notify("READY=1")
        beating = asyncio.ensure_future(_watchdog())
        try:
            await self._stop.wait()
        finally:
            beating.cancel()
        notify("STOPPING=1")
        if not self._leave:
            await self._end_attempts()

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    def _asked_to_leave(self) -> None:
        self._leave = True
        self._stop.set()

    def _asked_to_reload(self) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._reload()
            log.info("the configuration was read again")
        except ForgeyardError as error:
            log.error("the configuration stays as it was: %s", error)  # noqa: TRY400  # its message is all there is to it
        notify("READY=1")

    async def _end_attempts(self) -> None:
        """The queue first: whoever asked may ask another host."""
        table = self._table
        table.drain()
        await table.stop_all(CancellationReason.RUNNER_DRAIN, queued_only=True)
        running, _ = table.counts
        log.info("draining: %d attempts run, for at most %g s", running, self._drain)
        if await self._idle_within(self._drain):
            return
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


async def _watchdog() -> None:
    """Tell the service manager that the event loop turns, twice as often as it wants to hear it."""
    interval = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    if interval <= 0 or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)


def notify(state: str) -> None:
    """Tell the service manager, where there is one (sd_notify(3)). One that does not listen is no error of ours."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.setblocking(False)
            told.sendto(state.encode(), address)
    except OSError as error:
        log.warning("the service manager at NOTIFY_SOCKET can't be told %s: %s", state.partition("\n")[0], error)
