"""From what ended the steps, how they ended and what the kernel counted, to the outcome. Pure.

Exit 137 alone is never a memory kill, 159 alone never a violation: the number is the workload's to choose. And
nothing the workload does makes its failure ours: InfrastructureFailure comes from causes that it can't bring about.

The death of PID 1 is one of them. Nothing inside kills it: SIGKILL and SIGSTOP from inside never reach the init of a
pid namespace, it blocks every other signal, it can be neither traced nor written to, its channel is out of reach, and
limits of another process, at whose RLIMIT_CPU the kernel would kill, can't be set under any filter of ours. What is
left to the job is to exhaust its own memory or disk, and those are counted. So a death without such a count came from
outside, whoever it was: an engine that knows who makes the message better, and no verdict rests on its telling in time.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

from forgeyard_model.result import (
    CancellationReason,
    CollectedOutput,
    DiskEvidence,
    EndCause,
    Evidence,
    ExecutionOutcome,
    MemoryEvidence,
    StepResult,
)
from forgeyard_model.units import format_duration, format_size

EXIT_TIMED_OUT, EXIT_REFUSED = 124, 125
EXIT_OOM = EXIT_LOST = 137
EXIT_CANCELLED = 143

_KILLED: Final = (
    "PID 1 of the sandbox was ended from outside while the job ran; how the job would have ended is not known"
)


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
            return _ended_pid1(evidence) or Verdict(
                ExecutionOutcome.INFRASTRUCTURE_FAILURE, EXIT_REFUSED, end.detail or _KILLED
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
    pids, disk = evidence.pids, evidence.disk
    if evidence.memory.oom_kills:
        return _out_of_memory(evidence.memory)
    if pids.refused:
        message = f"process limit of {pids.limit} reached {pids.refused} times"
        return Verdict(ExecutionOutcome.RESOURCE_EXCEEDED, code or 1, message)
    if disk.full:
        return Verdict(ExecutionOutcome.RESOURCE_EXCEEDED, code or 1, _disk_message(disk))
    return None


def _ended_pid1(evidence: Evidence) -> Verdict | None:
    """The limit of the job's own that kills: a refused fork does not, nor a file system that is full."""
    if evidence.memory.oom_kills:
        return _out_of_memory(evidence.memory)
    if evidence.disk.full and evidence.disk.watched:
        return Verdict(ExecutionOutcome.RESOURCE_EXCEEDED, EXIT_LOST, _disk_message(evidence.disk))
    return None


def _out_of_memory(memory: MemoryEvidence) -> Verdict:
    message = "out of memory"
    if memory.peak is not None and memory.limit is not None:
        message += f": peak {format_size(memory.peak)} of {format_size(memory.limit)}"
    if memory.tmpfs:
        message += f", {format_size(memory.tmpfs)} of it files on tmpfs"
    return Verdict(ExecutionOutcome.OUT_OF_MEMORY, EXIT_OOM, message)


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
