"""The verdict is a pure function of the end cause, the exits and the kernel's counters."""

from __future__ import annotations

import signal

import pytest

from forgeyard_executor.verdict import End, deciding_step, judge
from forgeyard_model.result import (
    CancellationReason,
    CollectedOutput,
    DiskEvidence,
    EndCause,
    Evidence,
    MemoryEvidence,
    Outcome,
    PidsEvidence,
    ProcessExit,
    StepResult,
)

EXITED = End(EndCause.EXITED)
CALM = Evidence(MemoryEvidence(limit=1 << 26, peak=1 << 20, oom_kills=0), PidsEvidence(limit=32, refused=0))
OOM = Evidence(MemoryEvidence(limit=1 << 26, peak=1 << 26, oom_kills=1), PidsEvidence(limit=32, refused=0))
PIDS = Evidence(MemoryEvidence(oom_kills=0), PidsEvidence(limit=32, peak=32, refused=7))
FULL = Evidence(disk=DiskEvidence(limit=1 << 26, peak=1 << 26, full=True))


def ended(raw: int, *, masked: bool = False, name: str = "test") -> StepResult:
    """A step that ended with a raw wait status."""
    return StepResult(name, ProcessExit.from_wait_status(raw), masked=masked)


@pytest.mark.parametrize(
    ("raw", "code"),
    [(0, 0), (1 << 8, 1), (125 << 8, 125), (137 << 8, 137), (255 << 8, 255), (9, 137), (15, 143), (11 | 0x80, 139)],
)
def test_exit_codes_are_the_workloads_own(raw: int, code: int) -> None:
    """Without counters behind it a status is just a status: 137 is no memory kill, 125 none of our refusals."""
    verdict = judge(EXITED, (ended(raw),), CALM)
    assert verdict.exit_code == code
    assert verdict.outcome is (Outcome.SUCCEEDED if raw == 0 else Outcome.FAILED)


def test_memory_kill_needs_the_counter() -> None:
    """A failing job whose cgroup counted a memory kill is OutOfMemory with its numbers."""
    verdict = judge(EXITED, (ended(9),), OOM)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.OUT_OF_MEMORY, 137)
    assert "peak 64 MiB of 64 MiB" in verdict.message


def test_memory_kill_of_a_child_with_exit_0_is_a_note() -> None:
    """A job that survived the death of a child succeeded, and its reader is told."""
    verdict = judge(EXITED, (ended(0),), OOM)
    assert verdict.outcome is Outcome.SUCCEEDED
    assert any("killed 1 process" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("end", "outcome", "code"),
    [
        (End(EndCause.TIMED_OUT, detail="timeout", limit=1.0), Outcome.TIMED_OUT, 124),
        (End(EndCause.CANCELLED, CancellationReason.USER), Outcome.CANCELLED, 143),
        (End(EndCause.INFRASTRUCTURE, detail="lost"), Outcome.INFRASTRUCTURE_FAILURE, 125),
    ],
)
@pytest.mark.parametrize("raw", [0, 9, 137 << 8])
def test_our_own_cause_wins_over_any_exit(end: End, outcome: Outcome, code: int, raw: int) -> None:
    """When we stopped the job its status, OOM included, only raced with that."""
    verdict = judge(end, (ended(raw),), OOM)
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)


def test_process_limit() -> None:
    """The limit was met and the job failed: ResourceExceeded, with the job's own code."""
    verdict = judge(EXITED, (ended(2 << 8),), PIDS)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.RESOURCE_EXCEEDED, 2)
    assert judge(EXITED, (ended(0),), PIDS).outcome is Outcome.SUCCEEDED


def test_disk_limit() -> None:
    """A full writable layer explains a failure."""
    assert judge(EXITED, (ended(1 << 8),), FULL).outcome is Outcome.RESOURCE_EXCEEDED


def test_a_dead_pid_1_is_the_jobs_doing_only_if_a_limit_counted() -> None:
    """Nothing inside can kill it but a limit of the job's own; without one it was ended from outside."""
    died = End(EndCause.SANDBOX_DIED)
    verdict = judge(died, (), CALM)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, 125)
    assert "from outside" in verdict.message
    assert judge(End(EndCause.SANDBOX_DIED, detail="asked in vain"), (), CALM).message == "asked in vain"
    assert judge(died, (), OOM).outcome is Outcome.OUT_OF_MEMORY
    killed = DiskEvidence(limit=1 << 26, peak=1 << 27, full=True, watched=True)
    assert judge(died, (), Evidence(disk=killed)).outcome is Outcome.RESOURCE_EXCEEDED
    for harmless in (PIDS, FULL):  # a refused fork and a full file system end nobody
        assert judge(died, (), harmless).outcome is Outcome.INFRASTRUCTURE_FAILURE


def test_first_unmasked_failure_decides() -> None:
    """A masked failure is passed over, and a later `always` step can't improve the outcome."""
    steps = (ended(3 << 8, masked=True, name="a"), ended(4 << 8, name="b"), ended(0, name="c"))
    assert judge(EXITED, steps, CALM).exit_code == 4
    assert deciding_step(steps) == steps[1]
    assert judge(EXITED, (steps[0], steps[2]), CALM).outcome is Outcome.SUCCEEDED


def test_not_executed() -> None:
    """A program that can't be executed is the job's failure, with the shell's code."""
    step = StepResult("x", None, error="x: not found", exec_code=127)
    assert judge(EXITED, (step,), CALM).exit_code == 127


def test_missing_output_fails_a_job_that_exited_0() -> None:
    """A required output decides only when the steps did not."""
    missing = (CollectedOutput("r.xml", missing=True), CollectedOutput("c", missing=True, optional=True))
    verdict = judge(EXITED, (ended(0),), CALM, missing)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAILED, 1)
    assert "r.xml" in verdict.message
    assert " c" not in verdict.message
    assert judge(EXITED, (ended(5 << 8),), CALM, missing).exit_code == 5


def test_sigsys_is_no_violation() -> None:
    """A job can send itself SIGSYS: Failed, with a hint."""
    verdict = judge(EXITED, (ended(signal.SIGSYS),), CALM)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAILED, 159)
    assert any("SIGSYS" in note for note in verdict.notes)
