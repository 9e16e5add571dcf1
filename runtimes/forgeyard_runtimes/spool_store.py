"""The disk side of a spool: head and tail under a cap, totals, and what became of bytes that were not kept."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.result import OutputSummary
from forgeyard_runtimes.spool_format import STDERR, STDOUT, SpoolMark
from forgeyard_runtimes.spool_segment import Segment, SegmentView

MIN_CAP: Final = 16 << 10
"""Bytes. Below this the tail would be of segments that cost more to make than to fill."""
_LEAST_SEGMENT: Final = 4096
_MOST_SEGMENTS: Final = 8


class SpoolStore:
    """Segments in one directory. `append` and `close` belong to one thread at a time, the rest to any.

    The first half of `cap` (bytes, both streams) is the head, which stays. What follows goes to the tail: 2 to 8
    segments of equal size, of which the oldest is deleted before a new one is made, so the tail kept is between the
    other half and one segment less.

    :raises InvalidRequest: for a cap under 16 KiB.
    :raises ExecutorError: when the directory can't be made.
    """

    def __init__(self, directory: Path, cap: int) -> None:
        if cap < MIN_CAP:
            raise InvalidRequest("output limit", cap, "write at least 16KiB")
        head = cap // 2
        self._keep = min(max((cap - head) // _LEAST_SEGMENT, 2), _MOST_SEGMENTS)
        self._segment_budget = (cap - head) // self._keep
        self._directory = directory
        self._lock = threading.Lock()
        self._totals = [0, 0]
        self._dropped = 0
        self._error = ""
        self.version = 0
        """Grows with everything a reader could want to see."""
        self.closed = False
        try:
            directory.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise _unusable(directory, error) from error
        self._current = Segment(directory, 0, (0, 0), head)
        self._segments = {0: self._current}

    # The writer's side.

    def append(self, stream: int, data: memoryview, now: int) -> None:
        """Keep `data`, which came at `now` (ns since the epoch). A failing disk is noted, never raised."""
        try:
            while data and not self._error:
                segment = self._with_room()
                written = segment.write(stream, data[: segment.room])
                self._account(segment, stream, written, now)
                data = data[written:]
            if self._current.flush_due and not self._error:
                self._flush(self._current)
        except OSError as error:
            self.fail(error)
        if data:
            self._drop(stream, len(data))

    def fail(self, error: OSError) -> None:
        """Keep nothing more: what comes from now on is counted as dropped. The first error stands."""
        name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
        self._error = self._error or f"{name}: {error.strerror}"

    def close(self) -> None:
        """There is no more to come."""
        if self.closed:
            return
        self._finish(self._current)
        with self._lock:
            self.closed = True
            self.version += 1

    def _account(self, segment: Segment, stream: int, size: int, now: int) -> None:
        with self._lock:
            segment.note(stream, size, now)
            self._totals[stream] += size
            self.version += 1

    def _drop(self, stream: int, size: int) -> None:
        with self._lock:
            self._totals[stream] += size
            self._dropped += size

    def _with_room(self) -> Segment:
        if not self._current.room:
            self._finish(self._current)
            if len(self._segments) > self._keep:
                self._forget_oldest()
            self._begin_segment()
        return self._current

    def _begin_segment(self) -> None:
        bases = (self._totals[STDOUT], self._totals[STDERR])
        segment = Segment(self._directory, self._current.number + 1, bases, self._segment_budget)
        with self._lock:
            self._segments[segment.number] = segment
            self._current = segment

    def _forget_oldest(self) -> None:
        with self._lock:
            oldest = self._segments.pop(min(number for number in self._segments if number))
            oldest.live = False
            self._dropped += oldest.size
        oldest.erase()

    def _finish(self, segment: Segment) -> None:
        with self._lock:
            segment.seal()
        try:
            self._flush(segment)
        except OSError as error:
            # The records stay in memory, a page of them at the most, where readers find them.
            self.fail(error)
        segment.close_files()

    def _flush(self, segment: Segment) -> None:
        while records := segment.write_index():
            with self._lock:
                segment.flushed_more(records)

    # Everybody's side.

    def mark(self) -> SpoolMark:
        """Bytes the job wrote to each stream so far, as far as they were taken out of the pipes."""
        with self._lock:
            return SpoolMark(*self._totals)

    def summary(self) -> OutputSummary:
        """Totals so far, exact also where bytes were dropped."""
        with self._lock:
            return OutputSummary(
                stdout_bytes=self._totals[STDOUT],
                stderr_bytes=self._totals[STDERR],
                log_truncated=self._dropped > 0,
                dropped_bytes=self._dropped,
                spool_error=self._error,
            )

    def tip(self) -> tuple[Segment, int, SpoolMark]:
        """The segment being written, the sealed records in it, and the totals, all of one moment."""
        with self._lock:
            view = self._current.view(0, current=True)
            return self._current, view.sealed_total, SpoolMark(*self._totals)

    def view(self, segment: Segment, done: int) -> SegmentView:
        """What a reader at `done` sealed records of `segment` may see now."""
        with self._lock:
            return segment.view(done, current=segment is self._current)

    def changed_since(self, version: int) -> bool:
        """Whether there is something a reader that saw `version` has not seen."""
        return self.version != version

    def after(self, number: int) -> Segment | None:
        """The next segment after `number` that is still kept."""
        with self._lock:
            later = [kept for kept in self._segments if kept > number]
            return self._segments[min(later)] if later else None

    def remove(self) -> None:
        """Delete the directory; once more does no harm. Blocks for the disk.

        :raises ExecutorError: when it can't be deleted.
        """
        try:
            shutil.rmtree(self._directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unusable(self._directory, error) from error


def _unusable(directory: Path, error: OSError) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "spool_unusable",
        "the output spool can't be made or deleted",
        details=f"{directory}: {error.strerror}",
        resolution="check room, permissions and health of the disk that holds the state directory",
    )
