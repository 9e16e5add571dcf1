"""Reads a spool while it is being written, and after.

Bytes just written are in the page cache, and reading them there (RWF_NOWAIT) never waits for a disk, so that happens
on the event loop. What would wait (a late reader under memory pressure, the opening of files) goes to a pool of two
threads that all readers share.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.spool_bell import Bell
from forgeyard_runtimes.spool_format import INDEX, RECORD, STREAMS, OutputChunk, Record, SpoolMark, unpack_records
from forgeyard_runtimes.spool_segment import Segment, index_offset
from forgeyard_runtimes.spool_store import SpoolStore

CHUNK: Final = 64 << 10
_BATCH: Final = 256 << 10
_INDEX_BATCH: Final = 170
_END_OF_TIME: Final = 1 << 62
_T = TypeVar("_T")
PoolSource = Callable[[], ThreadPoolExecutor]


async def read_spool(
    store: SpoolStore, bell: Bell, pool: PoolSource, *, follow: bool, after: SpoolMark | None
) -> AsyncGenerator[OutputChunk, None]:
    """Chunks in order of arrival, those of one stream exactly in order. See `Spool.reader`.

    :param after: what the reader has; None is all that is there now.
    """
    reader = _Reader(store, pool, follow=follow, after=after)
    try:
        while True:
            closed, version = store.closed, store.version
            chunks = await reader.batch()
            for chunk in chunks:
                yield chunk
            if chunks:
                await asyncio.sleep(0)  # a long backlog in the page cache must not keep the loop from others
            elif closed or not follow:
                break
            else:
                await bell.wait(partial(store.changed_since, version))
        for chunk in reader.missing_at_end():
            yield chunk
    finally:
        reader.close()


class _Reader:
    """Where one reader is: a segment, the sealed records taken in from it, and an offset in each stream."""

    def __init__(self, store: SpoolStore, pool: PoolSource, *, follow: bool, after: SpoolMark | None) -> None:
        self._store = store
        self._files = _Files(pool)
        segment, sealed, totals = store.tip()
        self._segment: Segment | None = None if after is not None else segment
        self._done = 0 if after is not None else sealed
        begin = totals if after is None else after
        self._position = [begin.stdout, begin.stderr]
        self._stop = SpoolMark(_END_OF_TIME, _END_OF_TIME) if follow else totals
        self._queue: deque[Record] = deque()

    def close(self) -> None:
        self._files.close()

    async def batch(self) -> list[OutputChunk]:
        """What can be had now, at most 256 KiB of it; nothing only when the reader has all there is."""
        chunks: list[OutputChunk] = []
        room = _BATCH
        while room > 0 and (record := await self._next_record()) is not None:
            data = await self._read(record, min(record.length, room))
            if data is None:
                self._queue.clear()  # the segment was deleted under us; the next one says how much that was
                continue
            time = datetime.fromtimestamp(record.time / 1e9, UTC)
            offsets = range(0, len(data), CHUNK)
            chunks += [self._chunk(record, time, at, bytes(data[at : at + CHUNK])) for at in offsets]
            room -= len(data)
        return chunks

    def missing_at_end(self) -> list[OutputChunk]:
        """An empty chunk for each stream whose last bytes were not kept."""
        totals = self._store.mark()
        now = datetime.now(UTC)
        ends = (min(totals.stdout, self._stop.stdout), min(totals.stderr, self._stop.stderr))
        gaps = zip(STREAMS, ends, self._position, strict=True)
        return [OutputChunk(name, now, b"", end - have) for name, end, have in gaps if end > have]

    def _chunk(self, record: Record, time: datetime, at: int, data: bytes) -> OutputChunk:
        gap = record.offset + at - self._position[record.stream]
        self._position[record.stream] = record.offset + at + len(data)
        return OutputChunk(STREAMS[record.stream], time, data, gap)

    async def _next_record(self) -> Record | None:
        while True:
            while self._queue:
                if (record := self._unread(self._queue[0])) is not None:
                    return record
                self._queue.popleft()
            if not await self._load():
                return None

    def _unread(self, record: Record) -> Record | None:
        start = max(record.offset, self._position[record.stream])
        end = min(record.end, self._stop.stdout if record.stream == 0 else self._stop.stderr)
        return record._replace(offset=start, length=end - start) if start < end else None

    async def _load(self) -> bool:
        """Queue more records, or move to the next segment; False when there is nothing new."""
        segment = self._segment
        if segment is None or not segment.live:
            return self._enter(self._store.after(-1 if segment is None else segment.number))
        view = self._store.view(segment, self._done)
        if view.flushed > self._done:
            await self._load_index(segment, min(view.flushed - self._done, _INDEX_BATCH))
            return True
        if view.sealed:
            self._queue.extend(unpack_records(view.sealed))
            self._done += len(view.sealed) // RECORD.size
            return True
        # Open records still grow: they are read as far as they go, and met again, longer, when they are sealed.
        self._queue.extend(record for record in view.open if self._unread(record) is not None)
        return bool(self._queue) or (not view.current and self._enter(self._store.after(segment.number)))

    def _enter(self, segment: Segment | None) -> bool:
        if segment is None:
            return False
        self._segment = segment
        self._done = 0
        return True

    async def _load_index(self, segment: Segment, count: int) -> None:
        data = await self._files.read(segment, INDEX, index_offset(self._done), count * RECORD.size)
        if data is not None:
            self._queue.extend(unpack_records(data))
            self._done += count

    async def _read(self, record: Record, size: int) -> memoryview | None:
        segment = self._segment
        if segment is None:
            return None
        return await self._files.read(segment, record.stream, record.offset - segment.bases[record.stream], size)


class _Files:
    """The files of the segment being read, open for this reader alone, so that no other can close them under it."""

    def __init__(self, pool: PoolSource) -> None:
        self._pool = pool
        self._segment: Segment | None = None
        self._fds: dict[int, int] = {}
        self._pending: Future[Any] | None = None
        self._buffer = memoryview(bytearray(_BATCH))

    async def read(self, segment: Segment, which: int, offset: int, size: int) -> memoryview | None:
        """Exactly `size` bytes (256 KiB at the most) of one of the segment's files, until the next call.

        :returns: None when the segment was deleted meanwhile.

        :raises ExecutorError: when the disk fails, or the spool was removed.
        """
        try:
            await self._open(segment, which)
            data = await self._read(self._fds[which], offset, size)
        except OSError as error:
            if segment.live:
                raise _unreadable(error) from error
            return None
        # Asked after the read: a deleted segment is cut to nothing first, and what was read may be of either time.
        if not segment.live:
            return None
        if len(data) < size:
            raise _unreadable(OSError(errno.ENODATA, "a spool file is shorter than its index says"))
        return data

    async def _open(self, segment: Segment, which: int) -> None:
        if segment is not self._segment:
            self._close_fds()
            self._segment = segment
        if which not in self._fds:

            def open_here() -> None:  # kept by the thread itself: a cancelled reader would lose a returned fd
                self._fds[which] = os.open(segment.paths[which], os.O_RDONLY | os.O_NOFOLLOW)

            await self._in_pool(open_here)

    async def _read(self, fd: int, offset: int, size: int) -> memoryview:
        done = _read_cached(fd, self._buffer[:size], offset)
        while done < size:
            rest = self._buffer[done:size]
            more = await self._in_pool(partial(os.preadv, fd, [rest], offset + done))
            if not more:
                break
            done += more
        return self._buffer[:done]

    async def _in_pool(self, call: Callable[[], _T]) -> _T:
        pending = self._pool().submit(call)
        self._pending = pending
        return await asyncio.wrap_future(pending)

    def close(self) -> None:
        """Close the files, once no thread of the pool uses them any more."""
        if self._pending is None:
            self._close_fds()
        else:
            self._pending.add_done_callback(lambda _: self._close_fds())

    def _close_fds(self) -> None:
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)


def _read_cached(fd: int, buffer: memoryview, offset: int) -> int:
    """Read what the page cache has; 0 when it has nothing or the file system can't tell."""
    try:
        return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return 0
        raise


def _unreadable(error: OSError) -> ExecutorError:
    gone = error.errno == errno.ENOENT
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "spool_removed" if gone else "spool_unreadable",
        "the output was removed while it was being read" if gone else "the output spool can't be read",
        details=error.strerror or "",
        resolution="" if gone else "check the disk that holds the state directory",
    )
