"""Job output to our own descriptors: exact, in order, past slow, broken and strange readers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from forgeyard_api.output_writer import MAX_QUEUED, OutputWriter


def run(work: Coroutine[Any, Any, None]) -> None:
    """To its end, within ten seconds."""

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(bounded())


def read_all(fd: int) -> tuple[threading.Thread, bytearray]:
    """A reader in a thread, until the other end closes."""
    found = bytearray()

    def work() -> None:
        while data := os.read(fd, 65536):
            found.extend(data)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


def test_bytes_arrive_exactly_and_in_order() -> None:
    """Five megabytes in uneven pieces of any bytes, through a pipe."""
    pieces = [os.urandom(1 + n * 97 % 70_000) for n in range(150)]

    async def work() -> None:
        read, write = os.pipe()
        thread, found = read_all(read)
        writer = OutputWriter()
        for piece in pieces:
            await writer.write(write, piece)
        await writer.drain()
        writer.close()
        os.close(write)
        await asyncio.to_thread(thread.join)
        os.close(read)
        assert bytes(found) == b"".join(pieces)
        assert writer.losses() == []

    run(work())


def test_streams_keep_the_order_of_arrival() -> None:
    """Both streams into one place, as on a terminal: what came first stands first."""

    async def work() -> None:
        read, write = os.pipe()
        second = os.dup(write)
        writer = OutputWriter()
        for n in range(100):
            await writer.write(write if n % 2 else second, b"%d\n" % n)
        await writer.drain()
        writer.close()
        assert os.read(read, 65536) == b"".join(b"%d\n" % n for n in range(100))
        for fd in (read, write, second):
            os.close(fd)

    run(work())


def test_a_reader_that_goes_away_changes_nothing() -> None:
    """The rest is dropped, the other stream goes on, nobody complains."""

    async def work() -> None:
        read, write = os.pipe()
        os.close(read)
        other_read, other = os.pipe()
        writer = OutputWriter()
        for _ in range(20):
            await writer.write(write, b"x" * 1_000_000)
        await writer.write(other, b"still here")
        await writer.drain()
        writer.close()
        assert os.read(other_read, 100) == b"still here"
        assert writer.losses() == []
        for fd in (write, other_read, other):
            os.close(fd)

    run(work())


def test_a_full_disk_is_told() -> None:
    """Output that could not be written is lost output, and has a number."""

    async def work() -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        writer = OutputWriter()
        await writer.write(full, b"x" * 1000)
        await writer.drain()
        writer.close()
        os.close(full)
        assert writer.losses() == [f"{full}: No space left on device: 1000 bytes of output not written"]

    run(work())


def test_a_slow_reader_holds_the_writer_back_but_not_the_loop() -> None:
    """`write` waits once enough is queued, and the loop goes on meanwhile; abandoning ends the wait."""

    async def work() -> None:
        read, write = os.pipe()
        writer = OutputWriter()
        await writer.write(write, b"x" * MAX_QUEUED)
        blocked = asyncio.ensure_future(writer.write(write, b"x" * (1 << 20)))
        done, _ = await asyncio.wait({blocked}, timeout=0.05)
        assert not done
        writer.abandon()
        await blocked
        await writer.drain()
        # The thread sits in its write to a pipe that is full; it ends when the reader does.
        os.close(read)
        writer.close()
        await asyncio.to_thread(writer._thread.join)
        os.close(write)

    run(work())


def test_a_non_blocking_descriptor_is_waited_for() -> None:
    """Somebody who shares our stdout may have set O_NONBLOCK; not a byte is lost to that."""
    data = os.urandom(1 << 20)

    async def work() -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        writer = OutputWriter()
        await writer.write(write, data)
        thread, found = read_all(read)
        await writer.drain()
        writer.close()
        os.close(write)
        await asyncio.to_thread(thread.join)
        os.close(read)
        assert bytes(found) == data

    run(work())


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_regular_files_work(tmp_path: Path, size: int) -> None:
    """`> file` is the usual case, and epoll can't wait for it."""

    async def work() -> None:
        with (tmp_path / "out").open("wb") as file:
            writer = OutputWriter()
            await writer.write(file.fileno(), b"x" * size)
            await writer.drain()
            writer.close()
        assert (tmp_path / "out").stat().st_size == size

    run(work())
