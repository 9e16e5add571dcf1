"""Ranges of ids: exclusive across processes, never anybody else's, and not reused behind an orphan's back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_host.processes import boot_id
from forgeyard_host.uids import UidLease, UidRanges, clear_slot
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId

# Away from the default block: attempts of other executors on this host really run there.
BASE = 3_100_000_000
HOLDER = """
import sys
from forgeyard_host.uids import UidRanges
ranges = UidRanges(3_100_000_000, 65536 * 2, lock_dir=sys.argv[1], etc=sys.argv[2])
lease = ranges.acquire(sys.argv[3], "other", cgroup=sys.argv[4] or None)
print(lease.slot, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """An /etc with no account in the block."""
    path = tmp_path / "etc"
    path.mkdir()
    (path / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nbroken line\n")
    (path / "subuid").write_text("someone:100000:65536\n")
    return path


@pytest.fixture
def ranges(tmp_path: Path, etc: Path) -> Iterator[UidRanges]:
    """A block of two ranges."""
    made = block(tmp_path, etc)
    yield made
    made.close()


def block(tmp_path: Path, etc: Path, slots: int = 2) -> UidRanges:
    """A block in the test's own lock directory."""
    return UidRanges(BASE, 65536 * slots, lock_dir=str(tmp_path / "uids"), etc=str(etc))


def holder(tmp_path: Path, etc: Path, sandbox: str = "a", cgroup: str = "") -> subprocess.Popen[str]:
    """Another process that holds a range until its stdin ends; its first line of output is the slot."""
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "uids"), str(etc), sandbox, cgroup]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def slot_of(process: subprocess.Popen[str]) -> int:
    """The slot that a holder printed."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_leases_differ_and_lie_in_the_block(ranges: UidRanges) -> None:
    """Two leases never share an id, and both are inside the block that Host is told."""
    first, second = ranges.acquire("a", "me"), ranges.acquire("b", "me")

    assert {first.base, second.base} == {BASE, BASE + 65536}
    assert all(lease.base in ranges.block and lease.base + lease.count - 1 in ranges.block for lease in (first, second))


def test_exhaustion_is_a_typed_error(ranges: UidRanges) -> None:
    """When all are leased the error says so and what helps."""
    leases = [ranges.acquire(name, "me") for name in ("a", "b")]

    with pytest.raises(SandboxError) as caught:
        ranges.acquire("c", "me")

    assert caught.value.kind is SandboxErrorKind.NAMESPACE_FAILED
    assert caught.value.reason == "uid_ranges_exhausted"
    leases[0].release()
    assert ranges.acquire("c", "me").base == leases[0].base


def test_a_released_range_stays_with_the_process_until_close(tmp_path: Path, etc: Path, ranges: UidRanges) -> None:
    """Released ranges are kept locked for reuse and given to others at close; a double release changes nothing."""
    lease = ranges.acquire("a", "me")
    lease.release()
    lease.release()
    other = block(tmp_path, etc)
    try:
        assert other.acquire("b", "other").slot != lease.slot
        with pytest.raises(SandboxError):
            other.acquire("c", "other")
        ranges.close()
        assert other.acquire("c", "other").slot == lease.slot
    finally:
        other.close()


def test_two_processes_never_share_a_range(tmp_path: Path, etc: Path, ranges: UidRanges) -> None:
    """A range that another process holds is passed over."""
    with holder(tmp_path, etc) as process:
        theirs = slot_of(process)
        ours = ranges.acquire("b", "me").slot
        with pytest.raises(SandboxError):
            ranges.acquire("c", "me")
        process.communicate()

    assert ours != theirs


@pytest.mark.kernel
def test_an_orphan_keeps_its_range(tmp_path: Path, etc: Path, ranges: UidRanges) -> None:
    """After kill -9 of the holder its range is not handed out while a process still has an id of it."""
    with holder(tmp_path, etc) as process:
        slot = slot_of(process)
        base = BASE + 65536 * slot
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=base + 5, group=base + 5, extra_groups=[]) as orphan:
            process.kill()
            process.wait()
            assert ranges.acquire("b", "me").slot != slot
            with pytest.raises(SandboxError):
                ranges.acquire("c", "me")
            orphan.kill()
    assert ranges.acquire("c", "me").slot == slot


@pytest.mark.kernel
def test_an_orphans_group_keeps_its_range(tmp_path: Path, etc: Path, ranges: UidRanges) -> None:
    """While the attempt's control group exists its range stays out of use, whatever /proc shows."""
    cgroup = f"/forgeyard/test-uids/{SandboxId.mint()}"
    host = CgroupHost.detect()
    group = AttemptCgroup.create(host, cgroup)
    try:
        with holder(tmp_path, etc, cgroup=cgroup) as process:
            slot = slot_of(process)
            process.kill()
        assert ranges.acquire("b", "me").slot != slot
        with pytest.raises(SandboxError):
            ranges.acquire("c", "me")
    finally:
        group.remove()
        host.remove_empty("/forgeyard/test-uids")
    assert ranges.acquire("c", "me").slot == slot


def test_a_range_of_an_earlier_boot_is_free(tmp_path: Path, etc: Path) -> None:
    """No process outlives its boot, so text of another boot does not block a range."""
    locks = tmp_path / "uids"
    locks.mkdir()
    record = {"sandbox": "a", "owner": "x", "cgroup": None, "boot_id": "another"}
    (locks / "0.lock").write_text(json.dumps(record))
    ranges = block(tmp_path, etc, slots=1)
    try:
        assert ranges.acquire("b", "me").slot == 0
        assert json.loads((locks / "0.lock").read_text())["boot_id"] == boot_id()
    finally:
        ranges.close()


def test_a_shorter_text_leaves_no_rest(tmp_path: Path, ranges: UidRanges) -> None:
    """A lock file always holds one whole record, also when it was longer before."""
    lease = ranges.acquire("a" * 26, "me", cgroup="/x" * 50)
    lease.release()
    again = ranges.acquire("b", "me")

    assert json.loads(Path(again.lock_file).read_text())["sandbox"] == "b"


def test_clear_slot_frees_only_a_dead_holders_range(tmp_path: Path, etc: Path, ranges: UidRanges) -> None:
    """Recovery clears a dead executor's range; a living one's, or one leased anew, stays as it is."""
    mine = ranges.acquire("mine", "me")
    assert not clear_slot(mine.lock_file, "mine")
    with holder(tmp_path, etc, sandbox="dead") as process:
        lock = str(tmp_path / "uids" / f"{slot_of(process)}.lock")
        process.kill()
    assert clear_slot(lock, "someone else")
    assert Path(lock).read_text() != ""

    assert clear_slot(lock, "dead")
    assert Path(lock).read_text() == ""
    assert clear_slot(str(tmp_path / "uids" / "77.lock"), "dead")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("subuid", f"user:{BASE + 10}:5"),
        ("subgid", f"1000:{BASE - 10000}:65536"),
        ("passwd", f"huge:x:{BASE + 65535}:100::/:/bin/sh"),
        ("passwd", f"group:x:1:{BASE}::/:/bin/sh"),
        ("group", f"wheel:x:{BASE + 1}:"),
    ],
)
def test_ranges_avoid_what_belongs_to_others(tmp_path: Path, etc: Path, name: str, line: str) -> None:
    """A range that touches a subordinate range or an account is never handed out."""
    with (etc / name).open("a") as file:
        file.write(f"# comment\n{line}\n")
    ranges = block(tmp_path, etc)
    try:
        assert ranges.acquire("a", "me").base == BASE + 65536
        with pytest.raises(SandboxError):
            ranges.acquire("b", "me")
    finally:
        ranges.close()


def test_threads_get_different_ranges(tmp_path: Path, etc: Path) -> None:
    """Sixteen threads at once get sixteen ranges."""
    ranges = block(tmp_path, etc, slots=16)
    leases: list[UidLease] = []
    threads = [
        threading.Thread(target=lambda: leases.append(ranges.acquire(str(threading.get_ident()), "me")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranges.close()

    assert sorted(lease.slot for lease in leases) == list(range(16))


def test_an_unusable_lock_directory_is_named(tmp_path: Path, etc: Path) -> None:
    """A lock directory that can't be made is a typed error, not an OSError."""
    (tmp_path / "uids").write_text("in the way")

    with pytest.raises(SandboxError) as caught:
        block(tmp_path, etc).acquire("a", "me")

    assert caught.value.reason == "uid_locks_unusable"
    assert os.path.isfile(tmp_path / "uids")
