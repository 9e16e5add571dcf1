"""A control group that stays busy after its job: retried, then reported and found again; never a verdict (C32)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import sh

from forgeyard_api import main
from forgeyard_executor import ExecutionResult, Executor, Job, Outcome
from forgeyard_executor.recovery import list_sandboxes
from forgeyard_host import recovery
from forgeyard_host.cgroups import AttemptCgroup, CgroupHost, CgroupMode

pytestmark = pytest.mark.kernel


@dataclass(frozen=True, slots=True)
class Undying:
    """A process of the test's own that SIGKILL does not end while it is frozen: like one in state D."""

    process: subprocess.Popen[bytes]
    freezer: Path
    hierarchies: dict[str, str]

    def join(self, group: AttemptCgroup) -> None:
        """Into the leaf of a job, in every hierarchy but the freezer's; then frozen."""
        leaf = group.leaf("job")
        for name in ("memory", "pids"):
            Path(f"{self.hierarchies[name]}{leaf}/cgroup.procs").write_text(str(self.process.pid))
        (self.freezer / "freezer.state").write_text("FROZEN")

    def thaw(self) -> None:
        """Let it die, if it was killed."""
        (self.freezer / "freezer.state").write_text("THAWED")

    def killed(self) -> bool:
        """Whether SIGKILL waits for it: the cleanup has come to it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
        return any(bits & 1 << (signal.SIGKILL - 1) for bits in pending)


@pytest.fixture
def undying() -> Iterator[Undying]:
    """Only cgroup v1 can freeze a process past SIGKILL; on v2 there is no way to have one without a broken disk."""
    host = CgroupHost.detect()
    if host.mode is not CgroupMode.V1 or "freezer" not in host.controllers:
        pytest.skip("needs the freezer of cgroup v1")
    freezer = Path(host.controllers["freezer"], f"fy-test-{os.getpid()}")
    freezer.mkdir()
    process = subprocess.Popen(["/bin/sleep", "600"])
    (freezer / "cgroup.procs").write_text(str(process.pid))
    yield Undying(process, freezer, dict(host.controllers))
    (freezer / "freezer.state").write_text("THAWED")
    process.kill()
    process.wait()
    for _ in range(1000):
        try:
            freezer.rmdir()
        except OSError:
            continue  # the kernel lets go of the dead in its own time
        break


async def run_with_guest(state: Path, guest: Undying, *, thaw: bool) -> ExecutionResult:
    """A job that succeeds while `guest` is in its leaf; with `thaw` the guest may go once it was killed."""
    job = Job(rootfs="host", steps=())
    async with Executor.open(state) as executor, executor.run(job) as execution:
        await execution.exec(sh("echo done"))
        (info,) = executor.list_sandboxes()
        guest.join(AttemptCgroup.at(CgroupHost.detect(), f"/forgeyard/{info.owner}/{info.sandbox_id}"))
        execution.finish()
        ending = asyncio.ensure_future(execution.wait())
        while thaw and not guest.killed():
            await asyncio.wait((ending,), timeout=0.005)
        if thaw:
            guest.thaw()
        return await ending


def test_a_leaf_that_is_busy_for_a_moment_changes_nothing(state_dir: Path, warm_rootfs: None, undying: Undying) -> None:
    """The cleanup comes back until the group is empty: success, no note, nothing left."""
    result = asyncio.run(run_with_guest(state_dir, undying, thaw=True))
    assert (result.outcome, result.notes) == (Outcome.SUCCEEDED, ())
    assert list_sandboxes(state_dir) == ()
    assert undying.process.wait(5) == -signal.SIGKILL


def test_one_that_stays_busy_is_an_orphan_that_gc_finds(
    state_dir: Path,
    warm_rootfs: None,
    undying: Undying,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The verdict stands, a note tells, the ledger stays; gc says so as long as it lasts, and then removes it."""
    monkeypatch.setattr(recovery, "_KILL_SECONDS", 0.3)  # ten seconds in earnest: this is only the patience
    result = asyncio.run(run_with_guest(state_dir, undying, thaw=False))
    assert (result.outcome, result.exit_code) == (Outcome.SUCCEEDED, 0)
    (note,) = result.notes
    assert note.startswith("cleanup: ")
    assert "do not die" in note
    (info,) = list_sandboxes(state_dir)
    assert (info.sandbox_id, info.state) == (result.sandbox_id, "orphaned")

    gc = ("gc", "--state-dir", str(state_dir))
    assert main.run(gc) == 125
    assert result.sandbox_id in capsys.readouterr().err
    undying.thaw()
    undying.process.wait(5)
    assert main.run(gc) == 0
    assert f"removed {result.sandbox_id}" in capsys.readouterr().out
    assert list_sandboxes(state_dir) == ()
