"""The watch over an attempt's connections, on the event loop: what the router logs, and connections that end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from forgeyard_host.netfilter import Flows, LoggedPacket, PacketLog
from forgeyard_networks.attempt_network import Lines
from forgeyard_networks.evidence import Traffic
from forgeyard_networks.firewall.hub import ALLOWED_PREFIX

log: Final = logging.getLogger("forgeyard.networks")

_MANY: Final = 512
_PAUSE: Final = 0.25
_MOST_READS: Final = 4096


class Watch:
    """Reads until stopped.

    :param packets, flows: None where there is none.
    :param failed: called once with what made it stop by itself. `broken`: whether that happened.
    """

    def __init__(
        self,
        packets: PacketLog | None,
        flows: Flows | None,
        traffic: Traffic,
        *,
        lines: Lines | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._packets, self._flows, self.traffic = packets, flows, traffic
        self._lines, self._failed = lines, failed
        self._pause: asyncio.TimerHandle | None = None
        self._fds: list[int] = []
        self.broken = False

    def start(self) -> None:
        """Begin to read."""
        if self._packets is not None:
            self._add(self._packets.fileno(), self._guarded(self._read_packets))
        if self._flows is not None:
            self._add(self._flows.fileno(), self._guarded(self._read_flows))

    def stop(self) -> None:
        """Read no more. Idempotent; to be called before the descriptors are closed."""
        if self._pause is not None:
            self._pause.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._fds.clear()

    def catch_up(self) -> None:
        """Read what has come by now. Nothing, once it had to stop."""
        if not self.broken:
            self._guarded(self._read_all)()

    def tell(self, kind: str, document: Mapping[str, Any]) -> None:
        """Pass one line on to who wants to see it. A reader that fails is told no more, and harms nobody else."""
        if self._lines is None:
            return
        try:
            self._lines({"kind": kind, "at": round(time.time(), 3), **document})
        except Exception:
            log.exception("lines of network evidence are no longer passed on")
            self._lines = None

    def _add(self, fd: int, read: Callable[[], None]) -> None:
        self._loop.add_reader(fd, read)
        self._fds.append(fd)

    def _guarded(self, read: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                read()
            except Exception as error:  # noqa: BLE001  without its watch an attempt has no evidence: it must end
                self.broken = True
                self.stop()
                self._failed(error)

        return run

    def _read_all(self) -> None:
        for _ in range(_MOST_READS):
            if not self._read_packets():
                break
        self._read_flows()

    def _read_packets(self) -> bool:
        found = [] if self._packets is None else self._packets.read()
        self.traffic.logged(found)
        for packet in found:
            self.tell("connection", _line(packet))
        return bool(found)

    def _read_flows(self) -> None:
        if self._flows is None:
            return
        found = self._flows.ended()
        self.traffic.ended(found)
        if len(found) >= _MANY and self._fds:
            # A storm of short connections: what the kernel's buffer holds until then is enough to work on.
            self._loop.remove_reader(self._flows.fileno())
            self._fds.remove(self._flows.fileno())
            self._pause = self._loop.call_later(_PAUSE, self._resume)

    def _resume(self) -> None:
        if self._flows is not None:
            self._add(self._flows.fileno(), self._guarded(self._read_flows))


def _line(packet: LoggedPacket) -> dict[str, Any]:
    allowed = packet.prefix.startswith(ALLOWED_PREFIX)
    return {
        "verdict": "allowed" if allowed else "refused",
        "protocol": packet.protocol,
        "source": packet.source,
        "address": packet.destination,
        "port": packet.port,
        "destination": int(packet.prefix[1:]) if allowed and packet.prefix[1:].isdigit() else None,
    }
