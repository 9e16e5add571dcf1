"""Readers of a spool: fast, slow, late, cancelled, too late; each sees exact bytes or the number it missed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from spooling import MIB, collect, with_pump

from forgeyard_model.errors import ExecutorError
from forgeyard_runtimes.spool import OutputChunk, OutputPump, Spool


def piped(spool: Spool) -> int:
    """The write end of the spool's only pipe."""
    read, write = os.pipe()
    spool.attach(read, None)
    return write


async def write_all(spool: Spool, fd: int, data: bytes) -> None:
    """Put `data` through the pipe into the spool."""
    await asyncio.to_thread(write_blocking, fd, data)
    await spool.drain()


def write_blocking(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def counted(size: int) -> bytes:
    """Bytes of which any stretch of eight tells its place."""
    return b"".join(n.to_bytes(8, "big") for n in range(size // 8))


def check(chunks: list[OutputChunk], expected: bytes) -> int:
    """Every chunk holds what the stream has at its place, and none is unaccounted for; returns what is missing."""
    position = dropped = 0
    for chunk in chunks:
        position += chunk.dropped_before
        dropped += chunk.dropped_before
        assert chunk.data == expected[position : position + len(chunk.data)]
        position += len(chunk.data)
    assert position == len(expected)
    return dropped


def open_fds() -> set[str]:
    return {f"{fd}:{target(fd)}" for fd in os.listdir("/proc/self/fd")}


def target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_fast_slow_and_late_readers_see_the_same_bytes(tmp_path: Path) -> None:
    """A slow reader holds up neither the job nor the others, and one that comes after the end has it all."""
    expected = counted(8 * MIB)

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        slow_may_go_on = asyncio.Event()

        async def slow() -> list[OutputChunk]:
            chunks = []
            async for chunk in spool.reader():
                chunks.append(chunk)
                await slow_may_go_on.wait()
            return chunks

        early = spool.reader()
        first = asyncio.create_task(anext(early))
        slow_task = asyncio.create_task(slow())
        fast_task = asyncio.create_task(collect(spool))
        fd = piped(spool)
        await write_all(spool, fd, expected)
        os.close(fd)
        await spool.close_input()
        assert check(await fast_task, expected) == 0
        assert not slow_task.done()
        slow_may_go_on.set()
        assert check(await slow_task, expected) == 0
        assert check(await collect(spool), expected) == 0
        assert (await first).data == expected[: len((await first).data)]
        await early.aclose()

    with_pump(body)


def test_a_following_reader_gets_bytes_without_more_to_come(tmp_path: Path) -> None:
    """A prompt without a newline is delivered at once, and a record that grows is not delivered twice."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        stream = spool.reader()
        for n in range(500):
            os.write(fd, b"%04d" % n)
            async with asyncio.timeout(60):
                assert (await anext(stream)).data == b"%04d" % n
        os.close(fd)
        await spool.close_input()
        assert [chunk async for chunk in stream] == []

    with_pump(body)


def test_from_start_false_begins_with_what_comes_next(tmp_path: Path) -> None:
    """What was there before is neither delivered nor called dropped."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        await write_all(spool, fd, b"before" * 1000)
        stream = spool.reader(from_start=False)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await write_all(spool, fd, b"after")
        chunk = await waiting
        assert (chunk.data, chunk.dropped_before) == (b"after", 0)
        os.close(fd)
        await spool.close_input()
        assert [chunk async for chunk in stream] == []

    with_pump(body)


def test_follow_false_ends_at_the_present(tmp_path: Path) -> None:
    """It delivers what there is while the job goes on writing, and then ends."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        assert await collect(spool, follow=False) == []
        await write_all(spool, fd, b"x" * 300_000)
        stream = spool.reader(follow=False)
        first = await anext(stream)
        await write_all(spool, fd, b"y" * 300_000)
        rest = [chunk async for chunk in stream]
        assert first.data + b"".join(chunk.data for chunk in rest) == b"x" * 300_000
        os.close(fd)
        await spool.close_input()

    with_pump(body)


def test_a_cancelled_reader_leaks_nothing(tmp_path: Path) -> None:
    """Cancelled while it waits, while it opens files, or left with `break`: no fd stays, and others read on."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        await write_all(spool, fd, b"x" * 1000)
        assert len(await collect(spool, follow=False)) == 1  # starts the pool, which stays
        before = open_fds()
        for turns in range(12):
            task = asyncio.create_task(collect(spool))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async for _ in spool.reader():
            break
        await pool_idle(pump)
        assert open_fds() <= before
        os.close(fd)
        await spool.close_input()
        assert len(await collect(spool)) == 1

    with_pump(body)


async def pool_idle(pump: OutputPump) -> None:
    """Both threads of the pool have come to the end of what was asked of them."""
    meeting = threading.Barrier(2)
    pool = pump.reading_pool()
    await asyncio.gather(*(asyncio.wrap_future(pool.submit(meeting.wait)) for _ in range(2)))
    await asyncio.sleep(0)


def test_a_reader_behind_the_tail_is_told_what_it_missed(tmp_path: Path) -> None:
    """It stopped early on, the middle was deleted meanwhile: exact bytes on both sides, and the gap as a number."""
    expected = counted(6 * MIB)

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, 1 * MIB)
        fd = piped(spool)
        await write_all(spool, fd, expected[: MIB - 100_000])
        stream = spool.reader()
        chunks = [await anext(stream)]
        while sum(len(chunk.data) for chunk in chunks) <= 512 << 10:  # until in a tail segment, its files open
            chunks.append(await anext(stream))
        await write_all(spool, fd, expected[MIB - 100_000 :])
        os.close(fd)
        await spool.close_input()
        chunks += [chunk async for chunk in stream]
        dropped = check(chunks, expected)
        assert 0 < dropped <= spool.summary().dropped_bytes
        assert check(await collect(spool), expected) == spool.summary().dropped_bytes

    with_pump(body)


def test_a_reader_that_races_deletion_never_sees_wrong_bytes(tmp_path: Path) -> None:
    """With a tiny tail turning over under a reader, every chunk is still what the stream had at its place."""
    expected = counted(4 * MIB)

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, 64 << 10)
        readings = [asyncio.create_task(collect(spool)) for _ in range(3)]
        fd = piped(spool)
        await write_all(spool, fd, expected)
        os.close(fd)
        await spool.close_input()
        for reading in readings:
            check(await reading, expected)

    with_pump(body)


def test_a_deleted_segment_held_by_a_reader_gives_back_its_space(tmp_path: Path) -> None:
    """A reader that stopped for good in a tail segment does not keep the disk's space beyond the cap."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, 1 * MIB)
        fd = piped(spool)
        await write_all(spool, fd, b"a" * (600 << 10))
        stream = spool.reader()
        seen = 0
        while seen <= 512 << 10:
            seen += len((await anext(stream)).data)
        held = [fd for fd in os.listdir("/proc/self/fd") if re.search(r"/spool/[1-9]\.stdout$", target(fd))]
        (held_by_reader,) = [
            int(fd) for fd in held if fcntl.fcntl(int(fd), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        ]
        assert os.fstat(held_by_reader).st_size > 0
        await write_all(spool, fd, b"b" * (4 * MIB))
        assert "(deleted)" in target(str(held_by_reader))
        assert os.fstat(held_by_reader).st_size == 0
        await stream.aclose()
        os.close(fd)
        await spool.close_input()

    with_pump(body)


def test_the_event_loop_stays_free_while_a_backlog_is_read(tmp_path: Path) -> None:
    """Reading 64 MiB from the page cache lets other tasks have their turn all along."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        await write_all(spool, fd, bytes(64 * MIB))
        os.close(fd)
        await spool.close_input()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await collect(spool)
        task.cancel()
        assert turns >= 256

    with_pump(body)


def test_reading_a_removed_spool_is_a_named_error(tmp_path: Path) -> None:
    """Not an empty output, and not a bare OSError."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        await write_all(spool, fd, b"gone")
        os.close(fd)
        await spool.close_input()
        spool.remove()
        with pytest.raises(ExecutorError) as caught:
            await collect(spool)
        assert caught.value.reason == "spool_removed"

    with_pump(body)


def test_a_cold_spool_is_read_exactly(tmp_path: Path) -> None:
    """What the page cache has lost is read from disk by the pool."""
    expected = counted(4 * MIB)

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        await write_all(spool, fd, expected)
        os.close(fd)
        await spool.close_input()
        for path in (tmp_path / "spool").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert check(await collect(spool), expected) == 0

    with_pump(body)


def test_a_subprocess_is_followed_to_its_end(tmp_path: Path) -> None:
    """The reader of a live job ends when the input is closed, with all bytes, and not before."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        fd = piped(spool)
        reading = asyncio.create_task(collect(spool))
        with subprocess.Popen(["seq", "200000"], stdout=fd) as process:
            os.close(fd)
            await asyncio.to_thread(process.wait)
        await spool.drain()
        assert not reading.done()
        await spool.close_input()
        check(await reading, "".join(f"{n}\n" for n in range(1, 200_001)).encode())

    with_pump(body)
