"""Limits and ends: memory, processes, disk, time-outs, cancels."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import (
    CancellationReason,
    Execution,
    ExecutionResult,
    Executor,
    Job,
    Limits,
    Outcome,
    Timeouts,
)

pytestmark = pytest.mark.kernel


@pytest.mark.guest
def test_timeout(shared_state: Path, root: dict[str, str]) -> None:
    """TERM-ignoring jobs are killed after the grace, and it is a time-out, not a 137 (C27)."""
    job = Job(
        **root,
        steps=(sh("trap '' TERM; echo up; sleep 600 & wait; sleep 600"), sh("echo second")),
        limits=Limits(wall_time="1s"),
        timeouts=Timeouts(grace=0.5),
    )
    result, out, _ = run(shared_state, job)
    assert (result.outcome, result.exit_code) == (Outcome.TIMED_OUT, 124)
    assert out == b"up\n"
    assert "1s" in result.message


def test_timeout_race_with_exit(shared_state: Path) -> None:
    """A job that handles TERM and exits 0 within the grace has timed out all the same."""
    job = Job(
        rootfs="host",
        steps=(sh("trap 'exit 0' TERM; while :; do sleep 0.1; done"),),
        limits=Limits(wall_time="500ms"),
    )
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.TIMED_OUT
    assert result.exit is not None
    assert result.exit.code == 0


def test_always_step_after_timeout_needs_finally(shared_state: Path) -> None:
    """An `always` step runs after a time-out only within finally_timeout."""
    steps = (sh("sleep 600"), sh("echo cleanup", when="always"))
    for finally_, expected in ((0.0, b""), (5.0, b"cleanup\n")):
        job = Job(
            rootfs="host",
            steps=steps,
            limits=Limits(wall_time="500ms"),
            timeouts=Timeouts(grace=0.2, finally_=finally_),
        )
        result, out, _ = run(shared_state, job)
        assert (result.outcome, out) == (Outcome.TIMED_OUT, expected)


CANCEL_SCRIPT = (
    "trap '' TERM INT; (trap '' TERM; sleep 999) & setsid sh -c 'while :; do sleep 0.01 & done' & echo up; wait"
)


@pytest.mark.parametrize("kill", [False, True])
def test_cancel(shared_state: Path, root: dict[str, str], kill: bool) -> None:
    """Children that ignore TERM, and a detached fork loop, are gone before the result is (C18, C19)."""

    async def main() -> ExecutionResult:
        job = Job(**root, steps=(sh(CANCEL_SCRIPT),), timeouts=Timeouts(grace=0.5 if not kill else 600))
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            async for chunk in execution.output():
                assert chunk.data == b"up\n"
                break
            await execution.cancel(CancellationReason.SUPERSEDED, kill=kill)
            return await execution.wait()

    result = asyncio.run(main())
    assert result.outcome is Outcome.CANCELLED
    assert result.cancellation is CancellationReason.SUPERSEDED
    base = result.provenance.uid_base
    assert base is not None
    assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and owner(pid) in range(base, base + 65536)]


def owner(pid: str) -> int:
    """Uid of a living process, -1 otherwise: the dead PID 1 of a container is the host's init's to reap."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return -1 if fields["State"].split()[0] in "ZX" else int(fields["Uid"].split()[1])


@pytest.mark.guest
def test_out_of_memory(shared_state: Path, root: dict[str, str]) -> None:
    """A memory kill is OutOfMemory with peak and limit (C27, C28)."""
    job = Job(**root, steps=(sh("tail /dev/zero"),), limits=Limits(memory="32MiB"))
    result, _, _ = run(shared_state, job)
    assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result
    assert result.evidence.memory.limit == 32 << 20
    assert result.evidence.memory.peak is not None
    assert result.evidence.memory.peak > 16 << 20
    assert result.evidence.memory.oom_kills


@pytest.mark.guest
def test_oom_killed_child_of_a_job_that_goes_on(shared_state: Path) -> None:
    """A child killed by the memory limit in a job that exits 0 is a note."""
    job = Job(rootfs="host", steps=(sh("tail /dev/zero; exit 0"),), limits=Limits(memory="32MiB"))
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED
    assert any("memory limit killed" in note for note in result.notes)


@pytest.mark.guest
def test_pid_limit(shared_state: Path, root: dict[str, str]) -> None:
    """A fork fan-out meets the pids limit, and the result says how often (C30)."""
    script = "i=0; while [ $i -lt 100 ]; do sleep 60 & i=$((i+1)); done; exit 2"
    result, _, _ = run(shared_state, Job(**root, steps=(sh(script),), limits=Limits(pids=16)))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED
    assert result.exit_code != 0
    assert result.evidence.pids.refused


def test_disk_limit(shared_state: Path, root: dict[str, str]) -> None:
    """The writable layer ends at the disk limit, and the failure is explained by it."""
    script = "head -c 100000000 /dev/zero > /work/build/big"
    result, _, err = run(shared_state, Job(**root, steps=(sh(script),), limits=Limits(disk="32MiB")))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, (result.message, err)
    assert b"No space left" in err or b"I/O error" in err


def test_leaving_the_block_cancels(shared_state: Path) -> None:
    """An abandoned execution is cancelled and cleaned, its output dropped."""

    async def main() -> tuple[Execution, Path]:
        async with Executor.open(shared_state) as executor:
            job = Job(rootfs="host", steps=(sh("sleep 600"),), timeouts=Timeouts(grace=0.2))
            async with executor.run(job) as execution:
                pass
            assert (await execution.wait()).outcome is Outcome.CANCELLED
            assert not (shared_state / "sandboxes" / execution.sandbox_id).exists()
            return execution, shared_state

    asyncio.run(main())
    assert os.listdir(shared_state / "sandboxes") == []
    assert not [p for d in os.scandir(shared_state / "spool") for p in os.scandir(d.path)]


def test_callers_deadline_caps_the_timeout(shared_state: Path) -> None:
    """An absolute deadline ends the job before its own timeout does, and the message says which it was."""

    async def main() -> ExecutionResult:
        job = Job(rootfs="host", steps=(sh("sleep 600"),), timeouts=Timeouts(grace=0.1))
        deadline = datetime.now(UTC) + timedelta(seconds=1)
        async with Executor.open(shared_state) as executor, executor.run(job, deadline=deadline) as execution:
            return await execution.wait()

    result = asyncio.run(main())
    assert result.outcome is Outcome.TIMED_OUT
    assert "deadline" in result.message


def test_oom_is_seen_every_time(shared_state: Path) -> None:
    """The counters are read before the cgroup goes: 24 of 24 memory kills are OutOfMemory (C28)."""

    async def one(executor: Executor, gate: asyncio.Semaphore) -> Outcome:
        job = Job(rootfs="host", steps=(sh("tail /dev/zero"),), limits=Limits(memory="16MiB"))
        async with gate, executor.run(job) as execution:
            return (await execution.wait()).outcome

    async def main() -> list[Outcome]:
        gate = asyncio.Semaphore(4)
        async with Executor.open(shared_state) as executor:
            return await asyncio.gather(*(one(executor, gate) for _ in range(24)))

    assert asyncio.run(main()) == [Outcome.OUT_OF_MEMORY] * 24
