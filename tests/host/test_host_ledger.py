"""The ledger, the executor's sign of life, and undoing what a ledger says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock, Ledger, LedgerRecord, owner_alive, scan
from forgeyard_host.operations import BindRequest, IdMapKind, SandboxSetup, ScratchDir
from forgeyard_host.processes import boot_id, own_start_time, start_time
from forgeyard_host.recovery import undo
from forgeyard_host.uids import UidRanges
from forgeyard_model.errors import ExecutorError, SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId

EXECUTOR = """
import sys
from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock, Ledger
from forgeyard_host.operations import *
from forgeyard_host.uids import UidRanges
from forgeyard_model.identity import SandboxId

state, owner = sys.argv[1:]
lock, sandbox = ExecutorLock(state, owner), SandboxId.mint()
host, ledger = Host(state), Ledger.open(state, sandbox, owner)
cgroup = f"/forgeyard/{owner}/{sandbox}"
lease = UidRanges(lock_dir=f"{state}/uids").acquire(sandbox.value, owner, cgroup=cgroup)
ledger.intend("uid_range", base=lease.base, lock_file=lease.lock_file)
ledger.intend("cgroup", path=cgroup)
group = AttemptCgroup.create(CgroupHost.detect(), cgroup)
host.setup(SandboxSetup(sandbox, host.directory_of(sandbox), lease.base, lease.count, 0, 0,
    binds=(BindRequest("s", "/usr", IdMapKind.SHIFT),),
    overlays=(OverlayRequest("o", ("/opt",), IdMapKind.SHIFT, "u"),),
    disk_limit=32 << 20), ledger)
print(sandbox, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host(state_dir: Path) -> Iterator[Host]:
    """A Host on a state directory of its own."""
    made = Host(str(state_dir))
    yield made
    made.close()


def test_lines_are_there_before_the_act(state_dir: Path) -> None:
    """Each intent is in the file at once, behind a header that says whose it is."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(str(state_dir), sandbox, "exec-1")
    ledger.intend("directory", path="/x")
    ledger.intend("cgroup", path="/y")

    (record,) = scan(str(state_dir))

    assert (record.sandbox, record.owner, record.pid) == (sandbox, "exec-1", os.getpid())
    assert (record.start_time, record.boot_id, record.version) == (own_start_time(), boot_id(), 1)
    assert [(entry.kind, entry.data) for entry in record.entries] == [
        ("directory", {"path": "/x"}),
        ("cgroup", {"path": "/y"}),
    ]
    assert record == ledger.record()
    assert record.entries == ledger.entries()
    ledger.close_and_remove()
    ledger.close_and_remove()
    assert scan(str(state_dir)) == []


def test_an_attempt_has_one_ledger(state_dir: Path) -> None:
    """A second ledger of the same attempt is refused and leaves the first alone, and no descriptor."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(str(state_dir), sandbox, "a")
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(FileExistsError):
        Ledger.open(str(state_dir), sandbox, "b")

    assert len(os.listdir("/proc/self/fd")) == before
    assert scan(str(state_dir))[0].owner == "a"
    ledger.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_passed_over(state_dir: Path, cut: int) -> None:
    """What a killed writer got down counts; the line it was writing does not (its act was not begun)."""
    ledger = Ledger.open(str(state_dir), SandboxId.mint(), "a")
    ledger.intend("directory", path="/x")
    ledger.intend("cgroup", path="/long enough to be cut")
    ledger.close()
    with open(ledger.path, "r+b") as file:
        file.truncate(os.path.getsize(ledger.path) - cut)

    kinds = [entry.kind for entry in scan(str(state_dir))[0].entries]

    assert kinds == (["directory", "cgroup"] if cut == 1 else ["directory"])


def test_foreign_files_are_left_alone(state_dir: Path) -> None:
    """Whatever else lies in the directory is neither read as a ledger nor an error."""
    directory = state_dir / "ledger"
    directory.mkdir()
    (directory / "README").write_text("hello")
    (directory / "backup.jsonl").write_text("{}")
    (directory / f"{SandboxId.mint()}.jsonl").mkdir()
    empty = SandboxId.mint()
    (directory / f"{empty}.jsonl").write_bytes(b"\0\0garbage\n[1,2]\n")

    (record,) = scan(str(state_dir))

    assert (record.sandbox, record.owner, record.entries) == (empty, "", ())
    assert not owner_alive(record)


def test_scan_without_a_state_directory(tmp_path: Path) -> None:
    """No state, no ledgers."""
    assert scan(str(tmp_path / "none")) == []


def test_the_lock_tells_the_living_from_the_dead(state_dir: Path) -> None:
    """An executor is alive while it holds its lock, in this or another process, and not after."""
    program = "import sys\nfrom forgeyard_host.ledger import ExecutorLock\nlock = ExecutorLock(sys.argv[1], 'other')\n"
    program += "print('held', flush=True)\nsys.stdin.read()"
    ledger = Ledger.open(str(state_dir), SandboxId.mint(), "other")
    record = ledger.record()
    assert not owner_alive(record)
    argv = [sys.executable, "-c", program, str(state_dir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert owner_alive(record)
        assert not owner_alive(replace(record, boot_id="another boot"))
        with pytest.raises(ExecutorError, match="runs already"):
            ExecutorLock(str(state_dir), "other")
        process.kill()

    assert not owner_alive(record)
    ledger.close_and_remove()


def test_releasing_the_lock(state_dir: Path) -> None:
    """After release the file is gone and the id can be used again."""
    lock = ExecutorLock(str(state_dir), "e")
    assert ExecutorLock.held(str(state_dir), "e")
    lock.release()
    lock.release()

    assert not ExecutorLock.held(str(state_dir), "e")
    assert os.listdir(state_dir / "executors") == []


@pytest.mark.kernel
def test_undo_after_kill_nine(host: Host, state_dir: Path) -> None:
    """All that a killed executor left goes: process, mounts, loop disk, groups, directory, uid range, spool, ledger."""
    owner, cgroups = f"test-undo-{os.getpid()}", CgroupHost.detect()
    argv = [sys.executable, "-c", EXECUTOR, str(state_dir), owner]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        sandbox = SandboxId.parse(process.stdout.readline().strip())
        (record,) = scan(str(state_dir))
        assert owner_alive(record)
        process.kill()
    assert not owner_alive(record)
    group = AttemptCgroup.at(cgroups, f"/forgeyard/{owner}/{sandbox}")
    spool = state_dir / "spool" / str(sandbox)
    spool.mkdir(parents=True)
    record = replace(record, entries=(*record.entries, type(record.entries[0])("spool", {"path": str(spool)})))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as orphan:
        Path(group.host.paths(group.path)[-1], "cgroup.procs").write_text(str(orphan.pid))

        undo(record, host, cgroups)

        assert orphan.wait(10) == -9
    undo(record, host, cgroups)
    cgroups.remove_empty(f"/forgeyard/{owner}")

    assert not group.exists()
    assert os.listdir(state_dir / "sandboxes") == []
    assert not spool.exists()
    assert str(state_dir) not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    assert scan(str(state_dir)) == []
    lease = UidRanges(lock_dir=f"{state_dir}/uids").acquire("next", "me")
    assert lease.slot == 0
    lease.ranges.close()


@pytest.mark.kernel
def test_undo_of_a_living_attempt(host: Host, state_dir: Path) -> None:
    """The ordinary end of an attempt: the range that this process holds stays its own until released."""
    sandbox, cgroups = SandboxId.mint(), CgroupHost.detect()
    ledger = Ledger.open(str(state_dir), sandbox, "me")
    ranges = UidRanges(lock_dir=f"{state_dir}/uids")
    lease = ranges.acquire(sandbox.value, "me")
    ledger.intend("uid_range", base=lease.base, lock_file=lease.lock_file)
    scratch = (ScratchDir("w", "w", 0o700, 0, 0),)
    host.setup(
        SandboxSetup(sandbox, host.directory_of(sandbox), lease.base, lease.count, 0, 0, (), (), scratch),
        ledger,
    )

    undo(ledger.record(), host, cgroups, orphans=False)
    assert json.loads(Path(lease.lock_file).read_text())["sandbox"] == sandbox.value
    lease.release()
    ledger.close_and_remove()
    ranges.close()

    assert os.listdir(state_dir / "sandboxes") == []


@pytest.mark.kernel
def test_undo_ends_a_runtime_in_mid_launch(host: Host, state_dir: Path) -> None:
    """A runtime that outlived its executor is ended, known by this attempt's root; another attempt's is not."""
    ours, theirs = f"{state_dir}/sandboxes/ours/runtime", f"{state_dir}/sandboxes/theirs/runtime"
    sandbox = SandboxId.mint()
    ledger = Ledger.open(str(state_dir), sandbox, "dead")
    ledger.intend("container", runtime_root=ours)
    idle = "read x"
    with (
        subprocess.Popen(["sh", "-c", idle, "runc", "--root", ours, "create"], stdin=subprocess.PIPE) as mine,
        subprocess.Popen(["sh", "-c", idle, "runc", "--root", theirs, "create"], stdin=subprocess.PIPE) as other,
    ):
        undo(ledger.record(), host, CgroupHost.detect())
        assert mine.wait(10) == -9
        assert other.poll() is None
        other.kill()
    ledger.close()


@pytest.mark.kernel
def test_undo_kills_a_known_init_only_if_it_is_still_that_one(host: Host, state_dir: Path) -> None:
    """A pid in a ledger counts only with its start time: the number may belong to somebody else by now."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        started = start_time(process.pid)
        for wrong, ended in ((1, False), (0, True)):
            ledger = Ledger.open(str(state_dir), SandboxId.mint(), "dead")
            ledger.intend("container", runtime_root="/nowhere", pid=process.pid, start_time=started + wrong)
            undo(ledger.record(), host, CgroupHost.detect())
            ledger.close()
            assert (process.poll() is not None) is ended


@pytest.mark.kernel
def test_undo_goes_on_past_errors(host: Host, state_dir: Path) -> None:
    """One thing that can't be undone is named; everything else is undone, and the ledger stays for another try."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(str(state_dir), sandbox, "me")
    directory = host.create_directory(sandbox, ledger)
    ledger.intend("spool", path="/somewhere/else")
    ledger.intend("mounts", nonsense=True)

    with pytest.raises(SandboxError) as caught:
        undo(ledger.record(), host, CgroupHost.detect())

    assert caught.value.kind is SandboxErrorKind.CLEANUP_FAILED
    assert "/somewhere/else" in caught.value.details
    assert "unreadable entry mounts" in caught.value.details
    assert not os.path.exists(directory)
    assert os.path.exists(ledger.path)
    ledger.close_and_remove()


def test_undo_of_an_empty_record(host: Host, state_dir: Path) -> None:
    """A ledger without a single line is simply removed."""
    path = state_dir / "ledger" / f"{SandboxId.mint()}.jsonl"
    path.parent.mkdir()
    path.write_text("")
    (record,) = scan(str(state_dir))
    assert isinstance(record, LedgerRecord)

    undo(record, host, CgroupHost.detect())

    assert not path.exists()


@pytest.mark.kernel
def test_a_directory_of_somebody_else_is_never_removed(host: Host, state_dir: Path) -> None:
    """An entry that points outside the attempts is refused, whoever wrote it."""
    victim = state_dir / "victim"
    victim.mkdir()
    ledger = Ledger.open(str(state_dir), SandboxId.mint(), "me")
    ledger.intend("directory", path=str(victim))

    with pytest.raises(SandboxError, match="left"):
        undo(ledger.record(), host, CgroupHost.detect())

    assert victim.is_dir()
    ledger.close_and_remove()


def test_bind_requests_are_plain_data() -> None:
    """Requests can be compared and hashed, as data that crosses to a helper process."""
    assert BindRequest("s", "/usr", IdMapKind.SHIFT) == BindRequest("s", "/usr", IdMapKind.SHIFT)
    assert hash(BindRequest("s", "/usr", IdMapKind.SHIFT)) == hash(BindRequest("s", "/usr", IdMapKind.SHIFT))
