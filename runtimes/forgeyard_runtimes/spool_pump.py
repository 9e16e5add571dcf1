"""The one thread of an executor that moves job output from pipes to spools.

It reads into one buffer and writes that to disk, rather than splice(2) from pipe to file: splice holds the pipe's
lock for the whole write, and on a disk that hangs, a job writing to that pipe waits for the lock in a sleep that no
SIGKILL ends. With a copy, the job only ever waits for room in its pipe. The extra copy costs nothing measurable.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.spool_intake import PIPE_SIZE, Channel, Intake

NAP_MS: Final = 1
NAP_BELOW: Final = 4096
"""Bytes. After a round that moved fewer the pump naps, so a byte-by-byte writer wakes it a thousand times a second."""
_IDLE: Final = select.EPOLLIN | select.EPOLLET
"""A pipe without writers reports that without end; edge-triggered it does so once, and a new writer still wakes us."""


class OutputPump:
    """Serves any number of spools with one thread, started at the first `register`; `close` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._channels: dict[int, Channel] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._closing: set[Intake] = set()
        self._stopping = False

    # The event loop's side.

    def register(self, intake: Intake) -> None:
        """Begin to empty the pipes of `intake`, whose fds are the pump's from here on.

        :raises ExecutorError: after `close`.
        :raises OSError: when an fd is no pipe.
        """
        with self._lock:
            self._refuse_closed()
            if self._thread is None:
                self._start()
            with ExitStack() as undo:
                for channel in intake.channels:
                    channel.prepare()
                    self._epoll.register(channel.fd, 0)
                    undo.callback(self._epoll.unregister, channel.fd)
                undo.pop_all()
            for channel in intake.channels:
                self._channels[channel.fd] = channel
                self._epoll.modify(channel.fd, select.EPOLLIN)

    async def drain(self, intake: Intake) -> None:
        """Return when all that is in the pipes at this moment is in the spool."""
        await self._ask(intake, lambda done: self._do_drain(intake, done))

    async def finish(self, intake: Intake, *, idle: float, limit: float) -> None:
        """Take what is left, until the pipes end, or `idle` seconds without a byte, or `limit` seconds; then close."""
        await self._ask(intake, lambda done: self._begin_finish(intake, idle, limit, done))

    def abandon(self, intake: Intake) -> None:
        """Close the pipes as they are; for a thread that may block."""
        gone = threading.Event()
        with self._lock:
            if intake.closed or self._closed:
                return
            self._commands.append(lambda: self._do_abandon(intake, gone))
            os.eventfd_write(self._wake, 1)
        gone.wait()

    def reading_pool(self) -> ThreadPoolExecutor:
        """Two threads for reads that would block the event loop.

        :raises ExecutorError: after `close`.
        """
        with self._lock:
            self._refuse_closed()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(2, thread_name_prefix="forgeyard-spool")
            return self._pool

    def close(self) -> None:
        """Close every input still open, as it is, and end the threads. Blocks for a disk write under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread, pool = self._thread, self._pool
        if pool is not None:
            pool.shutdown()
        if thread is not None:
            self._commands.append(self._stop)
            os.eventfd_write(self._wake, 1)
            thread.join()
            os.close(self._wake)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ExecutorError(
                ExecutorErrorKind.INTERNAL,
                "output_pump_closed",
                "the executor is closed, its output can't be read or written any more",
                resolution="read output before leaving the executor",
            )

    def _start(self) -> None:
        self._buffer = bytearray(PIPE_SIZE)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._napper = select.poll()
        self._napper.register(self._wake, select.POLLIN)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="forgeyard-output", daemon=True)
        self._thread.start()

    async def _ask(self, intake: Intake, act: Callable[[Callable[[], None]], None]) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def done() -> None:
            with suppress(RuntimeError):  # the loop is closed, nobody waits
                loop.call_soon_threadsafe(_resolve, answer)

        with self._lock:
            if intake.closed or self._closed:
                return
            self._commands.append(lambda: act(done))
            os.eventfd_write(self._wake, 1)
        await answer

    # The pump's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                moved = self._round(self._epoll.poll(self._patience()))
                self._obey()
                self._close_finished()
                if moved < NAP_BELOW and not self._stopping:
                    self._napper.poll(NAP_MS)
        finally:
            # Also after a fault of ours: nobody may wait for ever for a thread that is gone.
            with self._lock:
                self._closed = True
            self._obey()
            for intake in {channel.intake for channel in self._channels.values()}:
                if not self._stopping:
                    intake.store.fail(OSError(errno.EIO, "the output pump failed"))
                self._shut(intake)
            self._epoll.close()

    def _stop(self) -> None:
        self._stopping = True

    def _round(self, events: list[tuple[int, int]]) -> int:
        moved = 0
        touched: set[Intake] = set()
        for fd, _ in events:
            if fd == self._wake:
                os.eventfd_read(fd)
            elif (channel := self._channels.get(fd)) is not None:
                moved += self._pull(channel)
                touched.add(channel.intake)
        for intake in touched:
            intake.bell.ring()
        return moved

    def _pull(self, channel: Channel) -> int:
        """Move up to one buffer; 0 when there was nothing, with `at_end` when there is no writer either."""
        try:
            size = os.readv(channel.fd, [self._buffer])
        except BlockingIOError:
            return 0
        if not size:
            self._end_reached(channel)
            return 0
        if channel.at_end:
            channel.at_end = False
            self._epoll.modify(channel.fd, select.EPOLLIN)
        channel.intake.store.append(channel.stream, memoryview(self._buffer)[:size], time.time_ns())
        channel.intake.moved = True
        return size

    def _end_reached(self, channel: Channel) -> None:
        if not channel.at_end:
            channel.at_end = True
            self._epoll.modify(channel.fd, _IDLE)

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _do_drain(self, intake: Intake, done: Callable[[], None]) -> None:
        self._empty(intake)
        done()

    def _do_abandon(self, intake: Intake, gone: threading.Event) -> None:
        if not intake.closed:
            self._shut(intake)
        gone.set()

    def _empty(self, intake: Intake) -> None:
        """Move what is in the pipes now. Not until they are empty: a background step may write for ever."""
        if intake.closed:
            return
        for channel in intake.channels:
            left = channel.waiting()
            while left > 0 and (moved := self._pull(channel)):
                left -= moved
        intake.bell.ring()

    def _begin_finish(self, intake: Intake, idle: float, limit: float, done: Callable[[], None]) -> None:
        if intake.closed:
            done()
            return
        intake.on_closed.append(done)
        if intake in self._closing:
            return
        now = time.monotonic()
        intake.idle, intake.idle_until, intake.end_by = idle, now + idle, now + limit
        self._closing.add(intake)
        self._empty(intake)
        for channel in intake.channels:
            self._pull(channel)  # finds the end of a pipe that nobody ever opened, which epoll does not report

    def _patience(self) -> float | None:
        if not self._closing:
            return None
        soonest = min(min(intake.idle_until, intake.end_by) for intake in self._closing)
        return max(0.0, soonest - time.monotonic())

    def _close_finished(self) -> None:
        for intake in tuple(self._closing):
            now = time.monotonic()
            if intake.moved:
                intake.moved, intake.idle_until = False, now + intake.idle
            ended = all(channel.at_end for channel in intake.channels)
            if ended or now >= intake.idle_until or now >= intake.end_by:
                self._shut(intake)

    def _shut(self, intake: Intake) -> None:
        self._empty(intake)
        intake.closed = True
        self._closing.discard(intake)
        for channel in intake.channels:
            self._epoll.unregister(channel.fd)
            del self._channels[channel.fd]
            os.close(channel.fd)
        intake.store.close()
        intake.bell.ring()
        for done in intake.on_closed:
            done()


def _resolve(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)
