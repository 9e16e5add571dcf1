"""What pretended containers write: a spool in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import OutputSummary
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark, StreamName

_CHUNK: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class _Piece:
    chunk: OutputChunk
    offset: int


class FakeOutput:
    """Written by one, read by any number. Keeps everything."""

    def __init__(self) -> None:
        self.removed = False
        self._pieces: list[_Piece] = []
        self._totals: dict[StreamName, int] = {"stdout": 0, "stderr": 0}
        self._closed = False
        self._changed = asyncio.Event()

    def write(self, stream: StreamName, data: bytes) -> None:
        """Append, in pieces of at most 64 KiB."""
        for at in range(0, len(data), _CHUNK):
            piece = data[at : at + _CHUNK]
            self._pieces.append(_Piece(OutputChunk(stream, datetime.now(UTC), piece), self._totals[stream]))
            self._totals[stream] += len(piece)
        self._tell()

    def close(self) -> None:
        """There is no more to come: readers come to their end."""
        self._closed = True
        self._tell()

    def remove(self) -> None:
        """Forget all of it."""
        self.removed = True
        self._tell()

    def summary(self) -> OutputSummary:
        """How much was written."""
        return OutputSummary(self._totals["stdout"], self._totals["stderr"])

    @property
    def data(self) -> bytes:
        """All of it, both streams in order of arrival."""
        return b"".join(piece.chunk.data for piece in self._pieces)

    async def reader(self, *, after: SpoolMark = START, follow: bool = True) -> AsyncGenerator[OutputChunk, None]:
        """What came after `after`; with `follow` until it is closed.

        :raises ExecutorError: IO_FAILED, spool_removed.
        """
        have = {"stdout": after.stdout, "stderr": after.stderr}
        done, end = 0, len(self._pieces)
        while True:
            if self.removed:
                raise ExecutorError(
                    ExecutorErrorKind.IO_FAILED, "spool_removed", "the output was removed while it was being read"
                )
            changed, closed = self._changed, self._closed
            for piece in self._pieces[done : None if follow else end]:
                skip = max(0, have[piece.chunk.stream] - piece.offset)
                if skip < len(piece.chunk.data):
                    yield OutputChunk(piece.chunk.stream, piece.chunk.time, piece.chunk.data[skip:])
                done += 1
            if (done == len(self._pieces) and closed) or not follow:
                return
            if changed is self._changed:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
