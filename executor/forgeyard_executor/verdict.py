"""From what ended the steps, how they ended and what the kernel counted, to the outcome. Pure.

Exit 137 alone is never a memory kill, 159 alone never a violation: the number is the workload's to choose. And
nothing the workload does makes its failure ours: InfrastructureFailure comes from our own end cause only.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from forgeyard_model.result import (
    CancellationReason,
    CollectedOutput,
    DiskEvidence,
    EndCause,
    Evidence,
    ExecutionOutcome,
    StepResult,
)
from forgeyard_model.units import format_duration, format_size

EXIT_TIMED_OUT, EXIT_REFUSED = 124, 125
EXIT_OOM = EXIT_LOST = 137
EXIT_CANCELLED = 143


@dataclass(frozen=True, slots=True)
class End:
    """How the steps came to an end. `detail` is which limit expired, or what was lost; seconds in `limit`."""

    cause: EndCause
    cancellation: CancellationReason | None = None
    detail: str = ""
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, the exit code of the command line, one line for people, and notes that change nothing."""

    outcome: ExecutionOutcome
    exit_code: int
    message: str
    notes: tuple[str, ...] = ()


def deciding_step(steps: tuple[StepResult, ...]) -> StepResult | None:
    """The first unmasked failure, else the last step that ran."""
    ran = [step for step in steps if not step.skipped]
    failures = [step for step in ran if step.failed and not step.masked]
    return failures[0] if failures else (ran[-1] if ran else None)


def judge(
    end: End, steps: tuple[StepResult, ...], evidence: Evidence, outputs: tuple[CollectedOutput, ...] = ()
) -> Verdict:
    """The verdict. A cause of ours wins over any exit status it raced with."""
    verdict = _by_cause(end, steps, evidence) or _by_steps(steps, evidence) or _by_outputs(outputs)
    if verdict is None:
        verdict = Verdict(ExecutionOutcome.SUCCEEDED, 0, "succeeded")
    notes = (*verdict.notes, *_notes(verdict.outcome, steps, evidence))
    return Verdict(verdict.outcome, verdict.exit_code, verdict.message, notes)


def _by_cause(end: End, steps: tuple[StepResult, ...], evidence: Evidence) -> Verdict | None:
    match end.cause:
        case EndCause.INFRASTRUCTURE:
            return Verdict(ExecutionOutcome.INFRASTRUCTURE_FAILURE, EXIT_REFUSED, end.detail)
        case EndCause.TIMED_OUT:
            message = f"timed out: {end.detail} of {format_duration(end.limit)} expired"
            return Verdict(ExecutionOutcome.TIMED_OUT, EXIT_TIMED_OUT, message)
        case EndCause.CANCELLED:
            reason = end.cancellation.value if end.cancellation else "unknown"
            return Verdict(ExecutionOutcome.CANCELLED, EXIT_CANCELLED, f"cancelled: {reason}")
        case EndCause.SERVICE_FAILED:
            # The workload's, whatever ended it: what a service is made of is the job's to say.
            return Verdict(ExecutionOutcome.FAILED, EXIT_REFUSED, end.detail)
        case EndCause.SANDBOX_DIED:
            return _resources(evidence, code=EXIT_OOM) or Verdict(
                ExecutionOutcome.FAILED, EXIT_OOM, "the sandbox's PID 1 died while the job ran"
            )
        case EndCause.EXITED:
            return None


def _by_steps(steps: tuple[StepResult, ...], evidence: Evidence) -> Verdict | None:
    step = deciding_step(steps)
    if step is None or step.masked or not step.failed:
        return None
    if step.exit is None:
        return Verdict(ExecutionOutcome.FAILED, step.exec_code or EXIT_LOST, f"step {step.name}: {step.error}")
    by_resource = _resources(evidence, code=step.exit.shell_code)
    if by_resource is not None:
        return by_resource
    notes: tuple[str, ...] = ()
    if step.exit.signal == signal.SIGSYS:
        notes = ("died by SIGSYS: a program for another architecture, or a call the seccomp profile ends",)
    return Verdict(ExecutionOutcome.FAILED, step.exit.shell_code, f"step {step.name}: {step.exit}", notes)


def _resources(evidence: Evidence, *, code: int) -> Verdict | None:
    """The limit that explains a failure, from counters the job can't write."""
    memory, pids, disk = evidence.memory, evidence.pids, evidence.disk
    if memory.oom_kills:
        message = "out of memory"
        if memory.peak is not None and memory.limit is not None:
            message += f": peak {format_size(memory.peak)} of {format_size(memory.limit)}"
        if memory.tmpfs:
            message += f", {format_size(memory.tmpfs)} of it files on tmpfs"
        return Verdict(ExecutionOutcome.OUT_OF_MEMORY, EXIT_OOM, message)
    if pids.refused:
        message = f"process limit of {pids.limit} reached {pids.refused} times"
        return Verdict(ExecutionOutcome.RESOURCE_EXCEEDED, code or 1, message)
    if disk.full:
        return Verdict(ExecutionOutcome.RESOURCE_EXCEEDED, code or 1, _disk_message(disk))
    return None


def _disk_message(disk: DiskEvidence) -> str:
    limit = f" of {format_size(disk.limit)}" if disk.limit is not None else ""
    what = ": no room for more files" if disk.out_of_files else ""
    if not disk.watched:
        return f"disk limit{limit} reached{what}"
    used = f"{format_size(disk.peak or 0)} used" if not disk.out_of_files else "too many files"
    return f"disk limit{limit} exceeded: {used}; it was watched, not held by a file system"


def _by_outputs(outputs: tuple[CollectedOutput, ...]) -> Verdict | None:
    missing = [output.path for output in outputs if output.missing and not output.optional]
    if not missing:
        return None
    return Verdict(ExecutionOutcome.FAILED, 1, f"required output missing: {', '.join(missing)}")


def _notes(outcome: ExecutionOutcome, steps: tuple[StepResult, ...], evidence: Evidence) -> tuple[str, ...]:
    notes = []
    if evidence.memory.oom_kills and outcome is not ExecutionOutcome.OUT_OF_MEMORY:
        notes.append(f"the memory limit killed {evidence.memory.oom_kills} process(es) of the job")
    if evidence.pids.refused and outcome is not ExecutionOutcome.RESOURCE_EXCEEDED:
        notes.append(f"the process limit of {evidence.pids.limit} was reached {evidence.pids.refused} times")
    notes.extend(
        f"step {step.name}: {step.leftovers} process(es) left behind were killed" for step in steps if step.leftovers
    )
    return tuple(notes)
