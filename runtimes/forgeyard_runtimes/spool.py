"""Output of one job: from its pipes to disk, and from there to any number of readers.

    pipes --(OutputPump, one thread per executor)--> files --> readers

A slow reader holds up nobody, since it reads from disk. A slow disk holds up the job through its pipes, not our
memory: the pump has one buffer, a reader a batch of chunks. A full disk holds up nobody; see `OutputSummary`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import OutputSummary
from forgeyard_runtimes.spool_bell import Bell
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark
from forgeyard_runtimes.spool_intake import Intake
from forgeyard_runtimes.spool_pump import OutputPump
from forgeyard_runtimes.spool_reader import read_spool
from forgeyard_runtimes.spool_store import SpoolStore

DEFAULT_CAP: Final = 512 << 20
"""Bytes over both streams of a job."""

__all__ = ["DEFAULT_CAP", "OutputChunk", "OutputPump", "Spool", "SpoolMark"]


class Spool:
    """One job's output. Methods are called on the event loop; make it with `create`."""

    def __init__(self, store: SpoolStore, pump: OutputPump) -> None:
        self._store = store
        self._pump = pump
        self._bell = Bell()
        self._intake: Intake | None = None

    @classmethod
    def create(cls, directory: Path, pump: OutputPump, cap: int = DEFAULT_CAP) -> Spool:
        """A spool in `directory`, which it makes, keeping at most `cap` bytes: the first half and the last.

        :raises InvalidRequest: for a cap under 16 KiB.
        :raises ExecutorError: when the directory exists or can't be made.
        """
        return cls(SpoolStore(directory, cap), pump)

    def attach(self, stdout_fd: int, stderr_fd: int | None) -> None:
        """Begin to empty these read ends of pipes, and own them from here on. None: stderr goes to stdout's pipe.

        :raises ExecutorError: when it was attached or closed before, or the pump is closed; the fds stay the caller's.
        """
        if self._intake is not None or self._store.closed:
            raise ExecutorError(
                ExecutorErrorKind.INTERNAL,
                "spool_attached",
                "the output spool has its pipes already, or is closed",
                resolution="report this: it is a fault of ours",
            )
        intake = Intake(self._store, self._bell, (stdout_fd, stderr_fd))
        self._pump.register(intake)
        self._intake = intake

    async def drain(self) -> None:
        """Return when all that is in the pipes at this moment is in the spool, so that `mark` counts it."""
        if self._intake is not None:
            await self._pump.drain(self._intake)

    def mark(self) -> SpoolMark:
        """Bytes of each stream so far. After a step's end and `drain`: where the step's output ends."""
        return self._store.mark()

    async def close_input(self, *, idle: float = 0.1, limit: float = 2.0) -> None:
        """Take what is left and close the pipes; readers then come to an end. The container is dead by now.

        Waits for the pipes' end, but not when somebody else holds them open: `idle` seconds without a byte, and
        `limit` seconds in all, are enough.
        """
        if self._intake is None:
            self._store.close()
            self._bell.ring()
        else:
            await self._pump.finish(self._intake, idle=idle, limit=limit)

    def summary(self) -> OutputSummary:
        """Totals so far; final after `close_input`."""
        return self._store.summary()

    def reader(
        self, *, follow: bool = True, from_start: bool = True, after: SpoolMark = START
    ) -> AsyncGenerator[OutputChunk, None]:
        """Chunks of at most 64 KiB, until the input is closed, or with `follow=False` up to this moment.

        The order within a stream is exact; across streams it is that of arrival, as far as two pipes can tell.
        A reader that falls so far behind that its next bytes were deleted finds their number in `dropped_before`.
        Reading works until `remove`.

        :param after: what the reader has of each stream already, where it starts from the start.
        :raises ExecutorError: while reading: the disk failed, the spool was removed, or the pump is closed.
        """
        pool = self._pump.reading_pool
        return read_spool(self._store, self._bell, pool, follow=follow, after=after if from_start else None)

    def remove(self) -> None:
        """Delete the output, closing the pipes first if they are open; idempotent.

        Blocks for the disk, a while where there is much output: for a thread, or a moment when nothing is urgent.

        :raises ExecutorError: when the directory can't be deleted.
        """
        if self._intake is not None:
            self._pump.abandon(self._intake)
        else:
            self._store.close()
        self._store.remove()
