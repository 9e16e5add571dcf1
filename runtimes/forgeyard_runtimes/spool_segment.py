"""One piece of a spool: the bytes of both streams over one stretch of time, and an index of when they came.

Only the pump's thread writes. Readers look through `view`, under the store's lock, at what the disk already has
(`flushed` records) and what it has not (`sealed` and `open` ones), so a batched index hides nothing from them.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_runtimes.spool_format import HEADER, INDEX, MAGIC, RECORD, STREAMS, Record

GRANULARITY: Final = 1_000_000
"""Nanoseconds. What comes on one stream within this time is one record."""
RECORD_LIMIT: Final = 1 << 20
FLUSH_AT: Final = 4096
INDEX_ALLOWANCE: Final = 256 << 10
"""Bytes of index beyond an eighth of the data after which the granularity doubles, and again after as many more."""


@dataclass(slots=True)
class _OpenRecord:
    time: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SegmentView:
    """What a reader that has taken in some records may see: so many on disk, the rest in memory."""

    flushed: int
    sealed: bytes
    open: tuple[Record, ...]
    current: bool

    @property
    def sealed_total(self) -> int:
        """All sealed records of the segment, for a view from record 0."""
        return self.flushed + len(self.sealed) // RECORD.size


class Segment:
    """Files of one segment, each made at its first byte and open for writing until `close_files`."""

    def __init__(self, directory: Path, number: int, bases: tuple[int, int], budget: int) -> None:
        self.number = number
        self.bases = bases
        self.live = True
        self.size = 0
        self.flushed = 0
        self._budget = budget
        self._ends = list(bases)
        self._records = 0
        self._sealed = bytearray()
        self._open: list[_OpenRecord | None] = [None, None]
        self.paths = tuple(str(directory / f"{number}.{suffix}") for suffix in (*STREAMS, "index"))
        """Of stdout, stderr and the index."""
        self._fds: dict[int, int] = {}
        self._made: list[str] = []

    @property
    def room(self) -> int:
        """Bytes it may still take, over both streams."""
        return self._budget - self.size

    def write(self, stream: int, data: memoryview) -> int:
        """Put as much of `data` on disk as one write takes, and say how much that was; `note` makes it visible.

        :raises OSError: when the disk takes none.
        """
        written = os.pwrite(self._file(stream), data, self._ends[stream] - self.bases[stream])
        if not written:
            raise OSError(errno.EIO, "the file took no bytes")
        return written

    def note(self, stream: int, size: int, now: int) -> None:
        """Record that `size` bytes came at `now` (ns since the epoch). Under the store's lock."""
        record = self._open[stream]
        if record is not None and self._joins(record, size, now):
            record.length += size
        else:
            self._seal(stream)
            self._open[stream] = _OpenRecord(now, self._ends[stream], size)
        self._ends[stream] += size
        self.size += size

    def _joins(self, record: _OpenRecord, size: int, now: int) -> bool:
        # A clock set back makes the age negative: that is a new record, not an endless one.
        return 0 <= now - record.time < self._granularity() and record.length + size <= RECORD_LIMIT

    def _granularity(self) -> int:
        excess = self._records * RECORD.size - self.size // 8
        return GRANULARITY << min(max(0, excess) // INDEX_ALLOWANCE, 20)

    def _seal(self, stream: int) -> None:
        mine, theirs = self._open[stream], self._open[1 - stream]
        if mine is None:
            return
        if theirs is not None and theirs.time < mine.time:
            self._push(1 - stream, theirs)
        self._push(stream, mine)

    def _push(self, stream: int, record: _OpenRecord) -> None:
        self._sealed += RECORD.pack(record.time, record.offset, record.length, stream)
        self._records += 1
        self._open[stream] = None

    def seal(self) -> None:
        """No record grows any more. Under the store's lock."""
        for stream in (0, 1):
            self._seal(stream)

    @property
    def flush_due(self) -> bool:
        """Enough records wait for a write to be worth it."""
        return len(self._sealed) >= FLUSH_AT

    def write_index(self) -> int:
        """Put sealed records on disk and say how many; `flushed_more` takes them out of memory.

        :raises OSError: when the disk takes less than one record.
        """
        if not self._sealed:
            return 0
        written = os.pwrite(self._file(INDEX), self._sealed, index_offset(self.flushed)) // RECORD.size
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def flushed_more(self, records: int) -> None:
        """The next `records` sealed ones are on disk. Under the store's lock."""
        del self._sealed[: records * RECORD.size]
        self.flushed += records

    def _file(self, which: int) -> int:
        if which not in self._fds:
            path = self.paths[which]
            self._fds[which] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            self._made.append(path)
            if which == INDEX:
                os.pwrite(self._fds[which], HEADER.pack(MAGIC, *self.bases), 0)
        return self._fds[which]

    def view(self, done: int, *, current: bool) -> SegmentView:
        """What a reader that took in `done` sealed records may see. Under the store's lock."""
        sealed = bytes(self._sealed[max(0, done - self.flushed) * RECORD.size :])
        waiting = [Record(r.time, r.offset, r.length, s) for s, r in enumerate(self._open) if r is not None]
        return SegmentView(self.flushed, sealed, tuple(sorted(waiting)), current)

    def close_files(self) -> None:
        """Close the write ends. Readers have files of their own."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def erase(self) -> None:
        """Take the segment off the disk.

        :raises OSError: when it can't be.
        """
        for path in self._made:
            # Truncated first: a reader that stopped half way would hold the space of a file that is merely unlinked.
            os.truncate(path, 0)
            os.unlink(path)  # noqa: PTH108  strings: these paths are made once and used by open(2) alone


def index_offset(record: int) -> int:
    """Where a record stands in its index file."""
    return HEADER.size + record * RECORD.size
