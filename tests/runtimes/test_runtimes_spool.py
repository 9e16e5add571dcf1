"""The output path with real pipes and writers: exact bytes, marks, ends of input, threads and fds."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spooling import MIB, collect, joined, with_pump

from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_runtimes.spool import OutputPump, Spool, SpoolMark


class Pipes:
    """Pipes of a spool, their write ends still in our hands."""

    def __init__(self, spool: Spool, *, merged: bool = False) -> None:
        out_read, self.out = os.pipe()
        err_read, self.err = (None, None) if merged else os.pipe()
        spool.attach(out_read, err_read)

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        err = subprocess.STDOUT if self.err is None else self.err
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.out, stderr=err)

    def close(self) -> None:
        os.close(self.out)
        if self.err is not None:
            os.close(self.err)


async def end_of(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait)


async def job(spool: Spool, *argv: str, merged: bool = False) -> None:
    """One writer from start to end, then the input is closed."""
    pipes = Pipes(spool, merged=merged)
    process = pipes.start(*argv)
    pipes.close()
    assert await end_of(process) == 0
    await spool.close_input()


def test_binary_bytes_of_both_streams_are_exact(tmp_path: Path) -> None:
    """NULs, bytes that are no UTF-8, a character across chunk borders: every byte comes out as it went in."""
    out = b"\xfe\xff\x00\r" + b"a" * (65536 - 5) + "€".encode() * 50_000 + os.urandom(300_000)
    err = bytes(range(256)) * 2000
    (tmp_path / "out").write_bytes(out)
    (tmp_path / "err").write_bytes(err)

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        await job(spool, "sh", "-c", f"cat {tmp_path}/out & cat {tmp_path}/err >&2; wait")
        chunks = await collect(spool)
        assert joined(chunks) == out
        assert joined(chunks, "stderr") == err
        assert max(len(chunk.data) for chunk in chunks) <= 65536
        summary = spool.summary()
        assert (summary.stdout_bytes, summary.stderr_bytes) == (len(out), len(err))
        assert (summary.log_truncated, summary.dropped_bytes, summary.spool_error) == (False, 0, "")

    with_pump(body)


def test_a_writer_that_exits_at_once_loses_nothing(tmp_path: Path) -> None:
    """100 MB, then the end: all of it is there."""
    script = "import sys; block = bytes(range(250)) * 4000\nfor _ in range(100): sys.stdout.buffer.write(block)"
    expected = hashlib.sha256()
    for _ in range(100):
        expected.update(bytes(range(250)) * 4000)

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        reading = asyncio.create_task(digest(spool))
        await job(spool, sys.executable, "-c", script)
        assert spool.mark() == SpoolMark(100_000_000, 0)
        assert await reading == (100_000_000, expected.hexdigest())

    with_pump(body)


async def digest(spool: Spool) -> tuple[int, str]:
    total, value = 0, hashlib.sha256()
    async for chunk in spool.reader():
        total += len(chunk.data)
        value.update(chunk.data)
    return total, value.hexdigest()


def test_a_byte_by_byte_writer_costs_little_index(tmp_path: Path) -> None:
    """Single bytes are coalesced by time: the index stays smaller than the data, and the bytes are exact."""
    script = "import os\nfor i in range(50000): os.write(1, bytes([i % 251]))"

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        await job(spool, sys.executable, "-c", script)
        assert joined(await collect(spool)) == bytes(i % 251 for i in range(50000))
        assert (tmp_path / "spool" / "0.index").stat().st_size < 50_000

    with_pump(body)


def test_merged_output_is_one_exact_stream(tmp_path: Path) -> None:
    """With stderr in stdout's pipe the order of the two is exact."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        script = "i=0; while [ $i -lt 1000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done"
        await job(spool, "sh", "-c", script, merged=True)
        expected = "".join(f"o{i}\ne{i}\n" for i in range(1000))
        assert joined(await collect(spool)).decode() == expected

    with_pump(body)


def test_chunks_carry_their_time_of_arrival(tmp_path: Path) -> None:
    """What was written before and after a moment is told apart by time, across streams too."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        pipes = Pipes(spool)
        before = datetime.now(UTC)
        os.write(pipes.err, b"first")
        await spool.drain()
        between = datetime.now(UTC)
        while datetime.now(UTC) - between < timedelta(milliseconds=2):
            await asyncio.sleep(0)
        os.write(pipes.out, b"second")
        pipes.close()
        await spool.close_input()
        first, second = await collect(spool)
        assert (first.stream, first.data) == ("stderr", b"first")
        assert (second.stream, second.data) == ("stdout", b"second")
        assert before <= first.time <= between < second.time <= datetime.now(UTC)

    with_pump(body)


def test_drain_marks_are_exact_after_each_step(tmp_path: Path) -> None:
    """When a step's writers are dead, `drain` and `mark` give the offset where its output ends."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        pipes = Pipes(spool)
        out = err = 0
        for size in (1, 4096, 0, 70_000, 262_144, 5):
            process = pipes.start("sh", "-c", f"head -c {size} /dev/zero; head -c {size // 2} /dev/zero >&2")
            assert await end_of(process) == 0
            await spool.drain()
            out, err = out + size, err + size // 2
            assert spool.mark() == SpoolMark(out, err)
        for _ in range(300):
            os.write(pipes.out, b"x" * 100)
            out += 100
            await spool.drain()
            assert spool.mark() == SpoolMark(out, err)
        pipes.close()
        await spool.close_input()

    with_pump(body)


def test_drain_returns_while_a_background_step_writes(tmp_path: Path) -> None:
    """It takes what is in the pipe at that moment and does not chase a writer that never stops."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, 1 * MIB)
        pipes = Pipes(spool)
        process = pipes.start("yes")
        try:
            for _ in range(20):
                async with asyncio.timeout(60):
                    await spool.drain()
        finally:
            process.kill()
            process.wait()
        pipes.close()
        await spool.close_input()

    with_pump(body)


def test_close_input_does_not_wait_for_an_idle_holder(tmp_path: Path) -> None:
    """A write end that somebody still holds ends the wait after a short idle time; what was written is kept."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        pipes = Pipes(spool)
        os.write(pipes.out, b"last words")
        async with asyncio.timeout(60):
            await asyncio.gather(*(spool.close_input(idle=0.05, limit=600) for _ in range(2)))
        with pytest.raises(BrokenPipeError):
            os.write(pipes.out, b"too late")
        pipes.close()
        await spool.close_input()
        assert joined(await collect(spool)) == b"last words"

    with_pump(body)


def test_close_input_does_not_wait_for_a_writer_that_never_stops(tmp_path: Path) -> None:
    """The absolute limit holds against a holder that keeps printing."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, 1 * MIB)
        pipes = Pipes(spool)
        process = pipes.start("yes")
        pipes.close()
        async with asyncio.timeout(60):
            await spool.close_input(idle=0.2, limit=0.3)
        assert await end_of(process) != 0

    with_pump(body)


def test_fifos_never_opened_by_a_writer_close_at_once(tmp_path: Path) -> None:
    """A container that never came up leaves FIFOs without writers: nothing to wait for."""

    async def body(pump: OutputPump) -> None:
        fds = []
        for name in ("out", "err"):
            os.mkfifo(tmp_path / name)
            fds.append(os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK))
        spool = Spool.create(tmp_path / "spool", pump)
        spool.attach(fds[0], fds[1])
        async with asyncio.timeout(60):
            await spool.close_input(idle=600, limit=600)
        assert await collect(spool) == []

    with_pump(body)


def test_writers_may_come_and_go(tmp_path: Path) -> None:
    """A FIFO whose last writer left is not at its end until the input is closed: the next writer is heard."""

    async def body(pump: OutputPump) -> None:
        os.mkfifo(tmp_path / "out")
        spool = Spool.create(tmp_path / "spool", pump)
        spool.attach(os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK), None)
        stream = spool.reader()
        for text in (b"one", b"two", b"three" * 100_000):
            await asyncio.to_thread((tmp_path / "out").write_bytes, text)
            got = b""
            while len(got) < len(text):
                got += (await anext(stream)).data
            assert got == text
        await spool.close_input()
        await stream.aclose()

    with_pump(body)


def test_a_job_may_turn_its_pipe_into_packets(tmp_path: Path) -> None:
    """O_DIRECT on the write end, which a job can set, changes nothing about the bytes."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        pipes = Pipes(spool)
        fcntl.fcntl(pipes.out, fcntl.F_SETFL, os.O_DIRECT)
        for _ in range(40):
            os.write(pipes.out, b"packet")
        await spool.drain()
        assert spool.mark().stdout == 240
        pipes.close()
        await spool.close_input()
        assert joined(await collect(spool)) == b"packet" * 40

    with_pump(body)


def test_32_spools_at_once_are_served_fairly(tmp_path: Path) -> None:
    """Jobs that print a little are done long before those that flood, and all bytes are exact."""

    async def body(pump: OutputPump) -> None:
        spools = [Spool.create(tmp_path / f"spool{n}", pump, 1 * MIB) for n in range(32)]
        pipes = [Pipes(spool) for spool in spools]
        floods = [pipes[n].start("yes") for n in range(2)]
        try:
            while any(spool.mark().stdout < 2 * MIB for spool in spools[:2]):
                await spools[0].drain()
            for n in range(2, 32):
                os.write(pipes[n].out, b"x" * (1000 + n))
            async with asyncio.timeout(60):
                firsts = await asyncio.gather(*(anext(spool.reader()) for spool in spools[2:]))
            assert [len(chunk.data) for chunk in firsts] == [1000 + n for n in range(2, 32)]
        finally:
            for flood in floods:
                flood.kill()
                flood.wait()
        for pipe in pipes:
            pipe.close()
        await asyncio.gather(*(spool.close_input() for spool in spools))

    with_pump(body)


def test_close_leaves_no_fd_and_no_thread(tmp_path: Path) -> None:
    """After the pump is closed, also with an input still open, every fd and thread it had is gone."""

    def held() -> tuple[set[str], set[str]]:
        return set(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}

    async def body() -> None:
        pump = OutputPump()
        spools = [Spool.create(tmp_path / f"spool{n}", pump) for n in range(3)]
        pipes = [Pipes(spool) for spool in spools]
        for pipe in pipes:
            os.write(pipe.out, b"x" * 1000)
        await spools[0].drain()
        half_read = spools[0].reader()
        await anext(half_read)
        await spools[1].close_input(idle=0.01)
        await collect(spools[1])
        await half_read.aclose()
        await asyncio.to_thread(pump.close)
        pump.close()
        assert spools[2].mark().stdout == 1000
        assert not [t for t in threading.enumerate() if t.name.startswith(("forgeyard-output", "forgeyard-spool"))]
        for pipe in pipes:
            pipe.close()

    before = held()
    asyncio.run(body())
    descriptors, threads = held()
    assert descriptors <= before[0]
    assert threads <= before[1]


def test_a_closed_pump_refuses_new_pipes(tmp_path: Path) -> None:
    """After `close`, attach says so and leaves the fds to the caller; ending a spool is no error."""

    async def body(pump: OutputPump) -> None:
        pump.close()
        spool = Spool.create(tmp_path / "spool", pump)
        read, write = os.pipe()
        with pytest.raises(ExecutorError, match="executor is closed"):
            spool.attach(read, None)
        os.close(read)
        os.close(write)
        await spool.drain()
        await spool.close_input()

    with_pump(body)


def test_attach_is_done_once(tmp_path: Path) -> None:
    """A second pair of pipes is refused and stays the caller's."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        pipes = Pipes(spool)
        read, write = os.pipe()
        with pytest.raises(ExecutorError) as caught:
            spool.attach(read, None)
        assert caught.value.reason == "spool_attached"
        for fd in (read, write):
            os.close(fd)
        pipes.close()
        await spool.close_input()

    with_pump(body)


def test_an_fd_that_is_no_pipe_is_refused_whole(tmp_path: Path) -> None:
    """The good fd of the pair is not kept either: it can be attached again."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        read, write = os.pipe()
        with (tmp_path / "plain").open("wb") as plain, pytest.raises(OSError, match="not permitted"):
            spool.attach(read, plain.fileno())
        spool.attach(read, None)
        os.write(write, b"works")
        os.close(write)
        await spool.close_input()
        assert joined(await collect(spool)) == b"works"

    with_pump(body)


def test_remove_deletes_the_directory_and_stops_the_job(tmp_path: Path) -> None:
    """Also while the pipes are open, for a failed attempt's cleanup; a second time does no harm."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "deep" / "spool", pump)
        pipes = Pipes(spool)
        process = pipes.start("yes")
        pipes.close()
        await asyncio.to_thread(spool.remove)
        assert await end_of(process) != 0
        assert not (tmp_path / "deep" / "spool").exists()
        spool.remove()
        await spool.close_input()

    with_pump(body)


def test_output_is_for_the_executor_alone(tmp_path: Path) -> None:
    """Directory and files are closed to other users."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        await job(spool, "sh", "-c", "echo out; echo err >&2")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "spool").iterdir()}
        assert modes == {"0.stdout": 0o600, "0.stderr": 0o600, "0.index": 0o600}
        assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700

    with_pump(body)


def test_a_spool_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    """An existing directory is never reused, and a cap too small to keep a tail is refused by name."""
    (tmp_path / "there").mkdir()

    async def body(pump: OutputPump) -> None:
        with pytest.raises(ExecutorError) as caught:
            Spool.create(tmp_path / "there", pump)
        assert caught.value.reason == "spool_unusable"
        with pytest.raises(InvalidRequest, match="16KiB"):
            Spool.create(tmp_path / "small", pump, 1000)
        assert not (tmp_path / "small").exists()

    with_pump(body)
