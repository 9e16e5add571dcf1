"""What a server tells the service manager that started it (sd_notify(3)); nothing where none did."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final, Self

log: Final = logging.getLogger("forgeyard.serve")

SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where it listens, and how often it wants to hear that we live.

    :param watchdog: seconds; 0 for never.
    """

    address: str = ""
    watchdog: float = 0.0

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Self:
        """The one that `environ` names, and takes it out of there.

        A runtime that inherits NOTIFY_SOCKET would put it into its containers: runc mounts it there.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        ours = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if ours and address else 0.0)

    def ready(self) -> None:
        """Callers are answered from now on."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """Until `ready` is said again."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, seconds: float) -> None:
        """The end has begun, and may take that long: it is not cut short by a smaller TimeoutStopSec."""
        self._tell(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def status(self, text: str) -> None:
        """A line that `systemctl status` shows."""
        self._tell(f"STATUS={text}")

    async def beat(self) -> None:
        """Say that the event loop turns, twice as often as it is wanted. Never ends by itself."""
        while self.watchdog > 0:
            self._tell("WATCHDOG=1", 0.0)
            await asyncio.sleep(self.watchdog / 2)

    def _tell(self, state: str, patience: float = SECONDS) -> None:
        """One that does not listen is no error of ours.

        :param patience: seconds for one that is behind with listening.
        """
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
                told.settimeout(patience)
                told.sendto(state.encode(), address)
        except OSError as error:
            log.warning("the service manager can't be told %s: %s", state.partition("\n")[0], error)
