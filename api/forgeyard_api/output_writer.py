"""Job output to our own stdout and stderr: raw bytes, exact, in the order of their arrival.

The writes block, so they have a thread of their own; a slow reader slows the job down (through the spool), a reader
that went away changes nothing for it. The thread is a daemon: a pipe nobody reads can't keep the program from ending.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_QUEUED: Final = 4 << 20
"""Bytes that wait for the reader before the next chunk is asked for."""


class OutputWriter:
    """Writes to file descriptors from one thread. Use `write` and `drain` on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued = 0
        self._state = threading.Condition()
        self._closed = False
        self._abandoned = False
        self._changed = asyncio.Event()
        self._lost: dict[int, int] = {}
        self._errors: dict[int, OSError] = {}
        self._thread = threading.Thread(target=self._run, name="job output", daemon=True)
        self._thread.start()

    async def write(self, fd: int, data: bytes) -> None:
        """Queue `data`; returns once there is room for more.

        :raises RuntimeError: after `close`: nobody would write it.
        """
        with self._state:
            if self._closed:
                raise RuntimeError("the output writer is closed")
            self._queue.append((fd, data))
            self._queued += len(data)
            self._state.notify()
        await self._until(lambda: self._queued <= MAX_QUEUED)

    async def drain(self) -> None:
        """Until all is written, or the writer was abandoned."""
        await self._until(lambda: self._queued == 0)

    def abandon(self) -> None:
        """Stop waiting for the reader: what is queued, and what follows, is dropped and counted as lost."""
        with self._state:
            self._abandoned = True
            self._state.notify()
        self._wake()

    def close(self) -> None:
        """Let the thread end when its queue is empty."""
        with self._state:
            self._closed = True
            self._state.notify()

    def losses(self) -> list[str]:
        """One line for each descriptor that did not take everything. A reader that went away wants none."""
        names = {1: "stdout", 2: "stderr"}
        return [
            f"{names.get(fd, fd)}: {error.strerror}: {self._lost.get(fd, 0)} bytes of output not written"
            for fd, error in self._errors.items()
            if not isinstance(error, BrokenPipeError)
        ]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            with self._state:
                if self._abandoned or condition():
                    return
            await self._changed.wait()

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._queue and not self._closed:
                    self._state.wait()
                if not self._queue:
                    return
                fd, data = self._queue.popleft()
            self._write_all(fd, data)
            with self._state:
                self._queued -= len(data)
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                # The loop is gone: nobody waits any more.
                return

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd not in self._errors and not self._abandoned:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                # Somebody who shares our stdout made it non-blocking. The time-out lets `abandon` be seen.
                _wait_writable(fd, 500)
            except OSError as error:
                self._errors[fd] = error
        self._lost[fd] = self._lost.get(fd, 0) + len(view)

    def _wake(self) -> None:
        self._changed.set()


def _wait_writable(fd: int, milliseconds: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll(milliseconds)
