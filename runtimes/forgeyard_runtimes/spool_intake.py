"""The pipes of one spool, as the pump sees them."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from forgeyard_runtimes.spool_bell import Bell
from forgeyard_runtimes.spool_store import SpoolStore

PIPE_SIZE: Final = 512 << 10
"""Bytes, of a pipe and of a read. Pipe pages are charged to the job, so no more than helps."""


class Channel:
    """One read end."""

    __slots__ = ("at_end", "fd", "intake", "stream")

    def __init__(self, intake: Intake, stream: int, fd: int) -> None:
        self.intake = intake
        self.stream = stream
        self.fd = fd
        self.at_end = False

    def prepare(self) -> None:
        """Make reads return at once, and the pipe large."""
        os.set_blocking(self.fd, False)
        with suppress(OSError):  # over the user's share of pipe memory: the pipe stays at its size, and works
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    def waiting(self) -> int:
        """Bytes in the pipe now."""
        reply = fcntl.ioctl(self.fd, termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", reply)[0])


class Intake:
    """The pipes of one spool. Once registered, the pump's thread alone changes it.

    idle_until, end_by: seconds of the monotonic clock, of a close that waits for the pipes' end.
    """

    def __init__(self, store: SpoolStore, bell: Bell, fds: tuple[int, int | None]) -> None:
        self.store = store
        self.bell = bell
        self.channels = [Channel(self, stream, fd) for stream, fd in enumerate(fds) if fd is not None]
        self.closed = False
        self.moved = False
        self.idle = 0.0
        self.idle_until = 0.0
        self.end_by = 0.0
        self.on_closed: list[Callable[[], None]] = []
