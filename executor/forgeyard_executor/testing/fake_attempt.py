"""A pretended attempt: the states and verdicts of a real one, and nothing behind them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from forgeyard_executor.testing.fake_run import FakeRun
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job, Step
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.result import (
    CancellationReason,
    EndCause,
    Evidence,
    ExecutionOutcome,
    ExecutionResult,
    OutputSummary,
    ProcessExit,
    Provenance,
    ResourceUsage,
    StepResult,
)
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark

RUNTIME: Final = "fake 1.0"
_CHUNK: Final = 64 << 10
_EXITS: Final = {
    ExecutionOutcome.CANCELLED: 130,
    ExecutionOutcome.TIMED_OUT: 124,
    ExecutionOutcome.OUT_OF_MEMORY: 137,
    ExecutionOutcome.SANDBOX_VIOLATION: 159,
    ExecutionOutcome.INFRASTRUCTURE_FAILURE: 125,
}


@dataclass(frozen=True, slots=True)
class FakePrepared:
    """A prepared attempt of which nothing is made."""

    sandbox_id: SandboxId
    context: AttemptContext
    job: Job
    behaviour: FakeRun
    notes: tuple[str, ...] = ()

    @property
    def bundle_digest(self) -> str:
        """The same for the same job."""
        return "sha256:" + hashlib.sha256(repr(self.job).encode()).hexdigest()


class FakeAttempt:
    """A started attempt. `release` ends one that holds."""

    def __init__(self, prepared: FakePrepared) -> None:
        self.prepared = prepared
        self.steps_run: list[Step] = []
        self.output_dropped = False
        self._released = asyncio.Event()
        self._stopped = asyncio.Event()
        self._killed = asyncio.Event()
        self._finished = asyncio.Event()
        self._reason: CancellationReason | None = None
        self._results: list[StepResult] = []
        self._started = datetime.now(UTC)
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def sandbox_id(self) -> str:
        """Its name on the host it pretends to be on."""
        return self.prepared.sandbox_id.value

    @property
    def ended(self) -> bool:
        """Whether it has a result."""
        return self._task.done()

    def release(self) -> None:
        """Let a job that holds come to its end."""
        self._released.set()

    async def wait(self) -> ExecutionResult:
        """The result that its `FakeRun` asks for, or `lost`."""
        return await asyncio.shield(self._task)

    async def cancel(self, reason: CancellationReason = CancellationReason.USER, *, kill: bool = False) -> None:
        """Stop it: at once, or after its grace when it is stubborn and not killed."""
        self._reason = self._reason or reason
        self._stopped.set()
        if kill:
            self._killed.set()

    async def exec(self, step: Step) -> StepResult:
        """Pretend one more step, of an attempt without steps of its own."""
        if self.ended:
            raise ExecutorError(ExecutorErrorKind.LOST, "attempt_ended", "the attempt has already ended")
        self.steps_run.append(step)
        result = _step(step, self.prepared.behaviour.exit_code)
        self._results.append(result)
        return result

    def finish(self) -> None:
        """No further step comes."""
        self._finished.set()

    async def output(self, *, after: SpoolMark = START, follow: bool = True) -> AsyncGenerator[OutputChunk, None]:
        """What the job wrote; with `follow` until its end."""
        behaviour = self.prepared.behaviour
        for chunk in self._chunks(behaviour.output, behaviour.error_output, after):
            yield chunk
        if follow:
            await asyncio.wait((self._task,))

    async def service_output(
        self, name: str, *, after: SpoolMark = START, follow: bool = True
    ) -> AsyncGenerator[OutputChunk, None]:
        """What a service wrote."""
        names = [service.name for service in self.prepared.job.services]
        if name not in names:
            raise InvalidRequest("service", name, f"the job has no such service; it has {', '.join(names) or 'none'}")
        for chunk in self._chunks(self.prepared.behaviour.service_output.get(name, b""), b"", after):
            yield chunk
        if follow:
            await asyncio.wait((self._task,))

    async def drop_output(self) -> None:
        """Remember that nobody wants it any more."""
        self.output_dropped = True

    def _chunks(self, out: bytes, err: bytes, after: SpoolMark) -> list[OutputChunk]:
        if self.output_dropped:
            raise ExecutorError(ExecutorErrorKind.LOST, "output_dropped", "the output was dropped")
        pieces = (("stdout", out[after.stdout :]), ("stderr", err[after.stderr :]))
        return [
            OutputChunk(stream, self._started, data[at : at + _CHUNK])  # type: ignore[arg-type]  # one of the two names
            for stream, data in pieces
            for at in range(0, len(data), _CHUNK)
        ]

    async def _run(self) -> ExecutionResult:
        behaviour, job = self.prepared.behaviour, self.prepared.job
        outcome = behaviour.outcome
        limit = job.limits.wall_time
        try:
            async with asyncio.timeout(limit):
                await self._until_the_end(behaviour)
        except TimeoutError:
            outcome = ExecutionOutcome.TIMED_OUT
        if self._stopped.is_set():
            outcome = ExecutionOutcome.CANCELLED
        if behaviour.lost is not None:
            raise behaviour.lost
        return self._result(outcome)

    async def _until_the_end(self, behaviour: FakeRun) -> None:
        ends = [self._stopped.wait() if not behaviour.stubborn else self._stubborn_stop()]
        if behaviour.holds:
            ends.append(self._released.wait())
        elif not self.prepared.job.steps:
            ends.append(self._finished.wait())
        else:
            ends.append(_slept(behaviour.seconds))
        tasks = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _stubborn_stop(self) -> bool:
        await self._stopped.wait()
        try:
            async with asyncio.timeout(self.prepared.job.timeouts.grace):
                await self._killed.wait()
        except TimeoutError:
            return True
        return True

    def _result(self, outcome: ExecutionOutcome | None) -> ExecutionResult:
        behaviour, job, context = self.prepared.behaviour, self.prepared.job, self.prepared.context
        by_code = ExecutionOutcome.FAILED if behaviour.exit_code else ExecutionOutcome.SUCCEEDED
        verdict = outcome or by_code
        steps = tuple(self._results) or tuple(_step(step, behaviour.exit_code) for step in job.steps)
        return ExecutionResult(
            sandbox_id=self.sandbox_id,
            attempt_id=context.attempt_id,
            name=job.name,
            outcome=verdict,
            failure_class=verdict.failure_class,
            exit_code=_EXITS.get(verdict, behaviour.exit_code),
            message=verdict.value.replace("_", " "),
            end_cause=_CAUSES.get(verdict, EndCause.EXITED),
            cancellation=self._reason if verdict is ExecutionOutcome.CANCELLED else None,
            exit=steps[-1].exit if steps else None,
            steps=steps,
            started_at=self._started,
            finished_at=datetime.now(UTC),
            evidence=Evidence(),
            usage=ResourceUsage(),
            output=OutputSummary(len(behaviour.output), len(behaviour.error_output)),
            outputs=(),
            provenance=Provenance(
                profile=job.profile,
                isolation=IsolationLevel.NONE,
                user_namespace=False,
                network=job.network.mode if job.network is not None else NetworkMode.DENY,
                seccomp="none",
                runtime=RUNTIME,
                rootfs="none",
                plan_digest=self.prepared.bundle_digest,
                bundle_digest=self.prepared.bundle_digest,
                impure=("nothing ran",),
            ),
        )


_CAUSES: Final = {
    ExecutionOutcome.CANCELLED: EndCause.CANCELLED,
    ExecutionOutcome.TIMED_OUT: EndCause.TIMED_OUT,
    ExecutionOutcome.INFRASTRUCTURE_FAILURE: EndCause.INFRASTRUCTURE,
}


async def _slept(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True


def _step(step: Step, code: int) -> StepResult:
    return StepResult(step.name, ProcessExit(code << 8, code=code), datetime.now(UTC), 0.0)
