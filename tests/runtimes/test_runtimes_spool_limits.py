"""A spool at its limits: the cap, memory, the index, a full disk, a disk that hangs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spooling import MIB, collect, joined, with_pump

from forgeyard_runtimes.spool import OutputPump, Spool
from forgeyard_runtimes.spool_store import SpoolStore


def start(spool: Spool, script: str) -> subprocess.Popen[bytes]:
    """A writer on the spool's pipes, which it alone holds."""
    out_read, out = os.pipe()
    err_read, err = os.pipe()
    spool.attach(out_read, err_read)
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    os.close(out)
    os.close(err)
    return process


async def job(spool: Spool, script: str) -> None:
    """One writer from start to end, then the input is closed."""
    assert await asyncio.to_thread(start(spool, script).wait) == 0
    await spool.close_input()


def disk_use(directory: Path, *suffixes: str) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in suffixes)


@pytest.mark.parametrize("cap", [16 << 10, 100_000, 1 << 20])
def test_head_and_tail_are_kept_under_the_cap(tmp_path: Path, cap: int) -> None:
    """Half of the cap is the beginning, near the other half the end; the job ends well and totals are exact."""
    expected = "".join(f"{n}\n" for n in range(1, 300_001)).encode()

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, cap)
        await job(spool, "seq 300000")
        chunks = await collect(spool)
        kept = joined(chunks)
        (gap,) = [chunk.dropped_before for chunk in chunks if chunk.dropped_before]
        head, tail = kept[: cap // 2], kept[cap // 2 :]
        assert expected.startswith(head)
        assert expected.endswith(tail)
        assert cap // 4 - 4096 <= len(tail) <= cap - cap // 2
        summary = spool.summary()
        assert summary.stdout_bytes == len(expected)
        assert summary.log_truncated
        assert summary.dropped_bytes == gap == len(expected) - len(kept)
        assert disk_use(tmp_path / "spool", ".stdout", ".stderr") <= cap

    with_pump(body)


def test_output_of_exactly_the_cap_is_whole(tmp_path: Path) -> None:
    """Nothing is dropped before there is a byte too many; then one segment goes."""

    async def body(pump: OutputPump) -> None:
        whole = Spool.create(tmp_path / "whole", pump, 1 * MIB)
        await job(whole, f"head -c {MIB // 2} /dev/zero; head -c {MIB // 2} /dev/zero >&2")
        assert (whole.summary().log_truncated, whole.summary().dropped_bytes) == (False, 0)
        over = Spool.create(tmp_path / "over", pump, 1 * MIB)
        await job(over, f"head -c {MIB + 1} /dev/zero")
        assert (over.summary().log_truncated, over.summary().dropped_bytes) == (True, MIB // 16)

    with_pump(body)


def test_the_cap_covers_both_streams(tmp_path: Path) -> None:
    """A stream that said one thing before the other flooded is known to have lost it when it is lost."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump, 1 * MIB)
        await job(spool, f"head -c {MIB} /dev/zero; echo lost >&2; head -c {3 * MIB} /dev/zero")
        chunks = await collect(spool)
        assert joined(chunks, "stderr") == b""
        assert [chunk.dropped_before for chunk in chunks if chunk.stream == "stderr"] == [5]
        summary = spool.summary()
        assert (summary.stdout_bytes, summary.stderr_bytes) == (4 * MIB, 5)
        assert len(joined(chunks)) + summary.dropped_bytes == 4 * MIB + 5

    with_pump(body)


def test_a_gigabyte_without_a_newline_leaves_memory_flat(tmp_path: Path) -> None:
    """With a following reader too: our peak resident memory grows by a few MiB, whatever the job prints."""

    async def body(pump: OutputPump) -> None:
        warm = Spool.create(tmp_path / "warm", pump, 16 * MIB)
        await job(warm, "head -c 1M /dev/zero")
        await collect(warm)
        before = reset_peak()
        spool = Spool.create(tmp_path / "spool", pump, 16 * MIB)
        reading = asyncio.create_task(total_of(spool))
        await job(spool, "head -c 1G /dev/zero")
        assert spool.summary().stdout_bytes == await reading == 1 << 30
        grown = memory("VmHWM") - before
        print(f"peak memory grew by {grown >> 10} KiB")
        assert grown < 8 * MIB

    with_pump(body)


async def total_of(spool: Spool) -> int:
    total = 0
    async for chunk in spool.reader():
        total += chunk.dropped_before + len(chunk.data)
    return total


def memory(name: str) -> int:
    """Bytes of one line of /proc/self/status."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def test_the_index_of_a_dripping_job_grows_ever_slower(tmp_path: Path) -> None:
    """A byte each millisecond for two minutes: far fewer records than bytes, and every byte is there."""
    store = SpoolStore(tmp_path / "spool", 512 * MIB)
    for n in range(120_000):
        store.append(n % 2, memoryview(b"x"), n * 1_000_000)
    store.close()
    assert store.mark().stdout == store.mark().stderr == 60_000
    assert disk_use(tmp_path / "spool", ".index") < 1.5 * MIB


def test_a_clock_set_back_loses_nothing(tmp_path: Path) -> None:
    """Arrival times that go backwards make new records, and a reader sees all bytes in order."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(tmp_path / "spool", pump)
        for n in range(200):
            spool._store.append(0, memoryview(b"%03d" % n), 10**18 - n * 10**7)
        await spool.close_input()
        assert joined(await collect(spool)) == b"".join(b"%03d" % n for n in range(200))

    with_pump(body)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.kernel
def test_a_full_disk_neither_blocks_nor_ends_the_job(tmp_path: Path, small_disk: Path) -> None:
    """The job prints to its end; what there was room for is readable, the error is named, totals are exact."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(small_disk / "spool", pump)
        await job(spool, "yes | head -c 20000000; echo end >&2")
        summary = spool.summary()
        assert (summary.stdout_bytes, summary.stderr_bytes) == (20_000_000, 4)
        assert summary.log_truncated
        assert summary.spool_error.startswith("ENOSPC: ")
        chunks = await collect(spool)
        kept = joined(chunks)
        assert 500_000 < len(kept) <= MIB
        assert kept == (b"y\n" * len(kept))[: len(kept)]
        assert summary.dropped_bytes == 20_000_004 - len(kept) == sum(chunk.dropped_before for chunk in chunks)

    with_pump(body)


@pytest.mark.kernel
def test_a_full_disk_of_one_job_is_not_the_others(tmp_path: Path, small_disk: Path) -> None:
    """Another spool of the same pump, elsewhere, has all its bytes."""

    async def body(pump: OutputPump) -> None:
        full = Spool.create(small_disk / "spool", pump)
        good = Spool.create(tmp_path / "spool", pump)
        await asyncio.gather(job(full, "head -c 8M /dev/zero"), job(good, "head -c 8M /dev/zero"))
        assert full.summary().spool_error
        assert good.summary().spool_error == ""
        assert len(joined(await collect(good))) == 8 * MIB

    with_pump(body)


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own, which can be frozen: writes to it then hang."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    disk.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.kernel
def test_a_disk_that_hangs_leaves_the_job_killable(own_disk: Path) -> None:
    """The job waits in its pipe, the event loop goes on, a kill ends the job, and later all bytes are accounted."""

    async def body(pump: OutputPump) -> None:
        spool = Spool.create(own_disk / "spool", pump, 1 * MIB)
        subprocess.run(["fsfreeze", "-f", str(own_disk)], check=True)
        try:
            process = start(spool, "exec yes")
            await asyncio.to_thread(wait_until_blocked, process.pid)
            draining = asyncio.create_task(spool.drain())
            process.kill()
            await asyncio.wait_for(asyncio.to_thread(process.wait), 60)
            assert not draining.done()
            written = spool.summary().stdout_bytes
        finally:
            subprocess.run(["fsfreeze", "-u", str(own_disk)], check=True)
        await draining
        await spool.close_input()
        assert written == 0
        assert len(joined(await collect(spool))) + spool.summary().dropped_bytes == spool.summary().stdout_bytes > 0

    with_pump(body)


def wait_until_blocked(pid: int) -> None:
    """Return when the process sleeps in the write to its pipe."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if "pipe" in Path(f"/proc/{pid}/wchan").read_text():
            return
    pytest.fail("the writer never came to wait for its pipe")
