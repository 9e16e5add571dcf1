"""Watermarks on real, small file systems: when room is made, out of what, and when no job is taken."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import collect, sh

from forgeyard_executor import Executor, Job
from forgeyard_executor.caches import CacheStore, Left
from forgeyard_executor.pressure import (
    Collector,
    DiskPressure,
    check_pressure,
    filesystems,
    relieve,
    short_of_space,
)
from forgeyard_model.cache import CacheRequest
from forgeyard_model.config import ExecutorConfig, Retention, Space, Watermarks
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, RetryRule

pytestmark = pytest.mark.kernel
MIB = 1 << 20
MARKS = Watermarks(Space(8 * MIB), Space(4 * MIB))
Mount = Callable[..., Path]


@pytest.fixture
def mounted() -> Iterator[Mount]:
    """``mounted(size)``: a new tmpfs of that many bytes, or with ``ext4=True`` a loop ext4; gone after the test."""
    made: list[Path] = []
    top = Path(tempfile.mkdtemp(prefix="fy-pressure-", dir="/var/tmp"))
    top.chmod(0o711)

    def mount(size: int, *, ext4: bool = False, inodes: int = 4096) -> Path:
        path = top / str(len(made))
        path.mkdir()
        if ext4:
            image = top / f"{path.name}.img"
            with image.open("wb") as file:
                file.truncate(size)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
            subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True)
        else:
            options = f"size={size},nr_inodes={inodes}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", str(path)], check=True)
        path.rmdir()
    for image in top.iterdir():
        image.unlink()
    top.rmdir()


def fill(path: Path, leave: int) -> Path:
    """Write a file so that about `leave` bytes stay free."""
    space = os.statvfs(path)
    size = space.f_bavail * space.f_frsize - leave
    file = path / f"fill-{time.monotonic_ns()}"
    with file.open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, size)
    return file


@pytest.mark.parametrize("ext4", [False, True])
def test_a_job_is_refused_where_less_is_free(mounted: Mount, ext4: bool) -> None:
    """Typed, with the file system, what is free, what is needed and the cure; taken again once there is room."""
    path = mounted(32 * MIB, ext4=ext4)
    names = (("images", path / "images"), ("layers", path))
    check_pressure(names, MARKS)
    file = fill(path, 3 * MIB)
    with pytest.raises(ExecutorError) as caught:
        check_pressure(names, MARKS)
    error = caught.value
    assert (error.kind, error.reason) == (ExecutorErrorKind.PREPARE, "disk_pressure")
    assert error.failure_class is FailureClass.INFRASTRUCTURE
    assert error.failure_class.retry is RetryRule.YES
    assert str(path) in error.brief
    assert "images, layers" in error.brief
    assert "MiB free of" in error.details
    assert "4.0 MiB" in error.details
    assert "refuse_below" in error.resolution
    file.unlink()
    check_pressure(names, MARKS)


def test_each_file_system_is_asked_once_and_judged_by_itself(mounted: Mount) -> None:
    """The store full, the spool not: two file systems, three names, one refusal that names the right one."""
    store, spool = mounted(32 * MIB), mounted(32 * MIB)
    names = (("images", store / "not" / "yet"), ("spool", spool), ("caches", store))
    found = filesystems(names)
    assert [one.names for one in found] == [("images", "caches"), ("spool",)]
    fill(store, MIB)
    assert [one.names for one in short_of_space(names, MARKS)] == [("images", "caches")]
    with pytest.raises(ExecutorError, match="images, caches"):
        check_pressure(names, MARKS)
    check_pressure((("spool", spool),), MARKS)


def test_shares_are_of_the_file_system(mounted: Mount) -> None:
    """10% or 5 GiB, whichever is less, is a tenth of a small disk."""
    path = mounted(32 * MIB)
    fill(path, 2 * MIB)
    marks = Watermarks(Space(5 << 30, 0.10), Space(512 * MIB, 0.02))
    assert len(short_of_space((("a", path),), marks)) == 1
    check_pressure((("a", path),), marks)
    fill(path, MIB // 4)
    with pytest.raises(ExecutorError, match="no room"):
        check_pressure((("a", path),), marks)
    assert Space(5 << 30, 0.10).of(1 << 50) == 5 << 30


def test_inodes_count_as_well(mounted: Mount) -> None:
    """A file system that has bytes and can take no more files is full."""
    path = mounted(32 * MIB, inodes=1000)
    for number in range(960):
        (path / str(number)).touch()
    assert len(short_of_space((("a", path),), MARKS)) == 1
    for number in range(960, 995):
        (path / str(number)).touch()
    with pytest.raises(ExecutorError, match="inodes free"):
        check_pressure((("a", path),), MARKS)


def test_collecting_stops_when_there_is_half_as_much_again(mounted: Mount) -> None:
    """Not at the mark, or each job would collect; not further, or what is kept would be of no use."""
    path, other = mounted(32 * MIB), mounted(32 * MIB)
    fill(path, 3 * MIB - 4096)
    files = [path / str(number) for number in range(3)]
    big = next(path.glob("fill-*"))
    size = big.stat().st_size
    for file in files:
        size -= 5 * MIB
        os.truncate(big, size)
        file.write_bytes(b"x" * (5 * MIB))
    asked: list[int] = []

    def collect(missing: int) -> None:
        asked.append(missing)
        files.pop(0).unlink()

    def elsewhere(_: int) -> None:
        pytest.fail("lies on another file system")

    collectors = [Collector("other", other / "x", elsewhere)]
    collectors += [Collector(str(number), path, collect) for number in range(3)]
    freed = relieve(short_of_space((("a", path),), MARKS), MARKS, collectors)
    assert (len(asked), len(files), freed) == (2, 1, 10 * MIB)
    assert asked[0] > 9 * MIB
    assert short_of_space((("a", path),), MARKS) == ()


def test_a_collector_that_fails_is_not_the_last(mounted: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """Logged, and the next one is asked."""
    path = mounted(32 * MIB)
    file = fill(path, MIB)

    def broken(_: int) -> None:
        raise OSError(5, "broken store")

    pressure = DiskPressure(
        (("a", path),), MARKS, lambda: [Collector("one", path, broken), Collector("two", path, lambda _: file.unlink())]
    )
    assert not pressure.ample()
    with caplog.at_level(logging.WARNING):
        pressure.admit()
    assert "collecting one: [Errno 5] broken store" in caplog.text
    assert pressure.ample()


def test_nothing_to_collect_is_not_looked_for_before_each_job(mounted: Mount) -> None:
    """Between the two marks one search is enough for a while; below the second, each job tries again."""
    path = mounted(32 * MIB)
    fill(path, 6 * MIB)
    searches: list[int] = []

    def search() -> tuple[Collector, ...]:
        searches.append(1)
        return ()

    pressure = DiskPressure((("a", path),), MARKS, search)
    pressure.admit()
    pressure.admit()
    assert len(searches) == 1
    fill(path, 3 * MIB)
    with pytest.raises(ExecutorError):
        pressure.admit()
    assert len(searches) == 2


def test_caches_make_room_the_longest_unused_first(mounted: Mount) -> None:
    """On a real full disk: the one in use stays, and so do those that need not go."""
    path = mounted(64 * MIB, ext4=True)
    store = CacheStore(path / "caches", size_cap=32 * MIB, total_cap=64 * MIB)
    for number, key in enumerate(("used", "oldest", "newer")):
        save(store, key, 8 * MIB)
        (info,) = (info for info in store.all() if info.name.key == key)
        os.utime(info.path / "entry.json", (1000 + number, 1000 + number))
    (lease,) = store.open((CacheRequest("used", "/c"),), tenant="", trusted=True)
    os.utime(next(info for info in store.all() if info.name.key == "used").path / "entry.json", (1, 1))
    fill(path, 5 * MIB)
    collectors = (Collector("caches", path, lambda size: store.prune(free_bytes=size)),)
    DiskPressure((("a", path),), MARKS, lambda: collectors).admit()
    assert sorted(info.name.key for info in store.all()) == ["newer", "used"]
    assert Path(lease.lower, "big").stat().st_size == 8 * MIB
    lease.close()


def save(store: CacheStore, key: str, size: int) -> None:
    """Keep a cache of `size` bytes."""
    (lease,) = store.open((CacheRequest(key, "/c"),), tenant="", trusted=True)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "big").write_bytes(b"x" * size)
        report = lease.commit(Left(Path(name), Path(name)), uid_base=0, uid_count=65536, job=(0, 0))
    lease.close()
    assert report.saved, report.why


def test_a_full_disk_keeps_nothing_and_breaks_nothing(mounted: Mount) -> None:
    """ENOSPC while a cache is saved: said, the old one stays, and no half one."""
    path = mounted(16 * MIB)
    store = CacheStore(path / "caches", size_cap=64 * MIB, total_cap=64 * MIB)
    save(store, "k", MIB)
    (lease,) = store.open((CacheRequest("k", "/c"),), tenant="", trusted=True)
    store.room = lambda: 1 << 40  # type: ignore[method-assign]  # the file system itself has to say no
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        (Path(name) / "big").write_bytes(b"x" * (32 * MIB))
        report = lease.commit(Left(Path(name), Path(name)), uid_base=0, uid_count=65536, job=(0, 0))
    lease.close()
    assert (report.saved, report.why) == (False, "No space left on device")
    assert list(store.snapshots.partial.iterdir()) == []
    assert [info.bytes for info in store.all()] == [MIB]


def test_the_check_costs_microseconds(mounted: Mount) -> None:
    """Asked before each job: five paths on two file systems."""
    one, two = mounted(32 * MIB), mounted(32 * MIB)
    pressure = DiskPressure(
        (("a", one), ("b", two), ("c", one / "c"), ("d", two), ("e", one)), MARKS, lambda: pytest.fail("ample")
    )
    best = min(_timed(pressure.ample) for _ in range(50))
    assert best < 0.0005, f"{best * 1e6:.0f} µs"


def _timed(act: Callable[[], bool]) -> float:
    begin = time.perf_counter()
    assert act()
    return time.perf_counter() - begin


# ---- whole jobs


def test_no_job_is_taken_on_a_full_disk_until_there_is_room(mounted: Mount) -> None:
    """Refused before anything is made for it; caches that are not in use make room, and then it runs."""
    state = mounted(128 * MIB, ext4=True)
    state.chmod(0o711)
    config = ExecutorConfig(watermarks=Watermarks(Space(16 * MIB), Space(12 * MIB)))
    job = Job([sh("ls ~/.cache/k; echo ran")], rootfs="host", caches=(CacheRequest("k", "/home/forgeyard/.cache/k"),))

    async def main() -> tuple[ExecutorError, str, int]:
        async with Executor.open(state, config=config) as executor:
            async with executor.run(job) as execution:
                assert (await execution.wait()).exit_code == 0
            file = fill(state, 4 * MIB)
            before = sorted(path.name for path in state.rglob("*"))
            with pytest.raises(ExecutorError) as caught:
                async with executor.run(job):
                    pass
            assert sorted(path.name for path in state.rglob("*")) == before
            os.truncate(file, file.stat().st_size - 24 * MIB)
            store = CacheStore(state / "caches", size_cap=32 * MIB, total_cap=64 * MIB)
            save(store, "old", 16 * MIB)
            async with executor.run(job) as execution:
                out, _ = await collect(execution)
                ended = await execution.wait()
            return caught.value, out.decode(), len(store.all()) + ended.exit_code

    error, out, left = asyncio.run(main())
    assert error.reason == "disk_pressure"
    assert "caches, sandboxes, spool" in error.brief
    assert (out, left) == ("ran\n", 0)


def test_an_executor_keeps_retention_by_itself(mounted: Mount) -> None:
    """When it opens, beside what else it does."""
    state = mounted(64 * MIB, ext4=True)
    state.chmod(0o711)
    store = CacheStore(state / "caches", size_cap=32 * MIB, total_cap=64 * MIB)
    save(store, "old", 16)
    (info,) = store.all()
    os.utime(info.path / "entry.json", (1, 1))

    async def main() -> None:
        async with Executor.open(state, config=ExecutorConfig(retention=Retention(caches=3600.0))):
            async with asyncio.timeout(20):
                while store.all():
                    await asyncio.sleep(0.01)

    asyncio.run(main())
