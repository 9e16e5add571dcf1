"""The executor's end of the pipe that probes write to: bounded in memory and in time, whatever goes on writing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from forgeyard_process_shim.protocol import Exited, NoExec

PROBE_TAIL: Final = 4096
"""Bytes kept of what a probe wrote, the last ones."""
_PIECE: Final = 64 << 10
_MOST_PIECES: Final = 16
"""Taken in one go. A service can find the pipe through its probe and write to it without an end."""


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """How a probe ended. `output`: what it wrote, both streams, the last PROBE_TAIL bytes."""

    end: Exited | NoExec
    output: bytes
    timed_out: bool


class ProbePipe:
    """Read end of a probe FIFO, which it owns. Read only while a probe runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._written = bytearray()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Empty it meanwhile, so that no probe waits for us. What an earlier one left in it is dropped."""
        loop = asyncio.get_running_loop()
        self.drain()
        self._written.clear()
        loop.add_reader(self._fd, self._read)
        try:
            yield
        finally:
            if self._fd >= 0:
                loop.remove_reader(self._fd)

    def _read(self) -> int:
        if self._fd < 0:
            return 0
        try:
            data = os.read(self._fd, _PIECE)
        except BlockingIOError:
            return 0
        self._written += data
        del self._written[:-PROBE_TAIL]
        return len(data)

    def drain(self) -> bytes:
        """Take what is in it now; the end of all that came since `reading` began."""
        for _ in range(_MOST_PIECES):
            if not self._read():
                break
        return bytes(self._written)

    def close(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Close it. `loop`: that of a `reading` that may be under way."""
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
