"""One running attempt: orders the steps, ends them for one cause, and turns the end into a result."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

from forgeyard_executor.attempt import Attempt
from forgeyard_executor.hints import privilege_hint
from forgeyard_executor.steps import ResolvedStep, resolve_step, should_run
from forgeyard_executor.verdict import End, Verdict, deciding_step, judge
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.job import Step, When
from forgeyard_model.result import (
    CancellationReason,
    CollectedOutput,
    EndCause,
    Evidence,
    ExecutionResult,
    ResourceUsage,
    StepResult,
)
from forgeyard_process_shim.channel import ShimDied
from forgeyard_runtimes.spool import OutputChunk

log: Final = logging.getLogger("forgeyard.executor")

SMALL_OUTPUT: Final = 1 << 20
"""Bytes. Deleting that little is quicker than handing it to a thread."""

DEATH_GRACE: Final = 1.0
"""Seconds between the death of PID 1 and giving up on its last report."""


class Execution:
    """A started attempt. `wait` for its result, `cancel` it, read its `output`; any number of readers."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._end: End | None = None
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kill_now = asyncio.Event()
        self._no_more_steps = asyncio.Event()
        self._step_lock = asyncio.Lock()
        self._results: list[StepResult] = []
        self._stop_signal: int = signal.SIGTERM
        self._notes: list[str] = []
        self._started_at = datetime.now(UTC)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"forgeyard {attempt.sandbox}")

    @property
    def sandbox_id(self) -> str:
        """The name of this attempt on the host."""
        return self._attempt.sandbox.value

    async def wait(self) -> ExecutionResult:
        """The result, once nothing of the attempt is left on the host. May be awaited often.

        A failure of the job is a result. Cancelling the waiter leaves the attempt alone.
        """
        return await asyncio.shield(self._task)

    async def cancel(self, reason: CancellationReason = CancellationReason.USER, *, kill: bool = False) -> None:
        """Ask the job to stop: soft signal, grace, kill. With `kill` without grace, also after a first cancel.

        Returns at once; `wait` tells when it is over. No effect on steps that have already ended.
        """
        self._set_end(End(EndCause.CANCELLED, cancellation=reason))
        if kill:
            self._kill_now.set()

    async def exec(self, step: Step) -> StepResult:
        """Run one more step in the sandbox of an attempt that was started without steps.

        :raises ExecutorError: LOST, when the attempt has ended.
        :raises InvalidRequest: for a step the kernel would refuse.
        """
        async with self._step_lock:
            if self._end is not None:
                raise ExecutorError(ExecutorErrorKind.LOST, "attempt_ended", "the attempt has already ended")
            attempt = self._attempt
            index = len(self._results)
            user = attempt.prepared.plan.user.name
            resolved = resolve_step(attempt.request, attempt.rootfs, step, index=index, user=user)
            return await self._run_one(index, resolved)

    def finish(self) -> None:
        """Say that no further `exec` comes: an attempt started without steps ends when the running one does."""
        self._no_more_steps.set()

    async def output(self) -> AsyncIterator[OutputChunk]:
        """The job's output from its first byte on, as it comes, until the job has ended."""
        async for chunk in self._attempt.spool.reader():
            yield chunk

    async def drop_output(self) -> None:
        """Delete the spooled output. Only after the end, when no reader wants it any more."""
        summary = self._attempt.spool.summary()
        if summary.stdout_bytes + summary.stderr_bytes <= SMALL_OUTPUT:
            self._attempt.spool.remove()
        else:
            await asyncio.to_thread(self._attempt.spool.remove)

    # ---- the attempt's own task

    async def _run(self) -> ExecutionResult:
        attempt = self._attempt
        evidence, usage = Evidence(), ResourceUsage()
        outputs: tuple[CollectedOutput, ...] = ()
        try:
            await self._run_to_end()
            evidence, usage = await attempt.read_evidence()
            outputs = await attempt.collect_outputs()
        except ForgeyardError as error:
            log.exception("attempt %s failed", attempt.sandbox)
            if self._end is None or self._end.cause is EndCause.EXITED:
                self._end = End(EndCause.INFRASTRUCTURE, detail=str(error))
            else:
                self._notes.append(str(error))
        except asyncio.CancelledError:
            # Only the executor's own shutdown cancels this task; the attempt is cleaned all the same.
            self._end = self._end or End(EndCause.CANCELLED, cancellation=CancellationReason.SHUTDOWN)
        finally:
            cleanup_errors = await attempt.clean_up()
        verdict = judge(self._end or End(EndCause.EXITED), tuple(self._results), evidence, outputs)
        return self._result(verdict, evidence, usage, outputs, cleanup_errors)

    async def _run_to_end(self) -> None:
        """Steps until they are through or something stops them; then the end of the tree, verified."""
        steps = asyncio.ensure_future(self._run_steps())
        death = self._attempt.container.death
        limit, name = self._time_limit()
        try:
            await asyncio.wait((steps, self._stopped, death), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if death.done() and not steps.done():
                # What the running step last reported may still be in the pipe; it counts.
                await asyncio.wait((steps,), timeout=DEATH_GRACE)
                self._set_end(End(EndCause.SANDBOX_DIED))
            elif not steps.done():
                self._set_end(End(EndCause.TIMED_OUT, detail=name, limit=limit or 0.0))
                await self._stop_steps(steps)
            if steps.done():
                steps.result()
                self._set_end(End(EndCause.EXITED))
        finally:
            await self._end_tree(steps)

    def _time_limit(self) -> tuple[float | None, str]:
        """Seconds that the steps have, and which limit that is: the job's timeout, or the caller's deadline."""
        request = self._attempt.request
        limit = request.limits.wall_time
        if request.context.deadline is not None:
            left = max(0.0, (request.context.deadline - datetime.now(UTC)).total_seconds())
            if limit is None or left < limit:
                return left, "the caller's deadline"
        return limit, "timeout"

    async def _end_tree(self, steps: asyncio.Future[None]) -> None:
        await self._attempt.container.kill()
        if not steps.done():
            # The tree is dead, so the step's end is on its way as ShimDied.
            await asyncio.wait((steps,), timeout=DEATH_GRACE)
            steps.cancel()

    async def _stop_steps(self, steps: asyncio.Future[None]) -> None:
        """Soft signal, then grace; with a finally_timeout kill the step alone and let `always` steps run."""
        timeouts = self._attempt.request.timeouts
        if not self._kill_now.is_set():
            self._attempt.container.signal_step(self._stop_signal)
            await self._wait_unless_killed(steps, timeouts.grace)
        if not steps.done() and timeouts.finally_ > 0 and not self._kill_now.is_set():
            self._attempt.container.kill_step()
            await self._wait_unless_killed(steps, timeouts.finally_)

    async def _wait_unless_killed(self, steps: asyncio.Future[None], seconds: float) -> None:
        kill = asyncio.ensure_future(self._kill_now.wait())
        try:
            await asyncio.wait((steps, kill), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            kill.cancel()

    async def _run_steps(self) -> None:
        steps = self._attempt.planned.steps
        if not steps:
            await self._no_more_steps.wait()
            async with self._step_lock:
                return
        failed = False
        for index, resolved in enumerate(steps):
            try:
                result = await self._run_or_skip(index, resolved, failed=failed)
            except ShimDied:
                return
            failed = failed or (result.failed and not result.masked)

    async def _run_or_skip(self, index: int, resolved: ResolvedStep, *, failed: bool) -> StepResult:
        step = resolved.step
        stopped = self._end is not None
        runs = step.when is When.ALWAYS and self._finally_allowed() if stopped else should_run(step, failed=failed)
        if not runs:
            result = StepResult(step.name, None, skipped=True)
            self._results.append(result)
            return result
        async with self._step_lock:
            return await self._run_one(index, resolved)

    def _finally_allowed(self) -> bool:
        return self._attempt.request.timeouts.finally_ > 0 and not self._kill_now.is_set()

    async def _run_one(self, index: int, resolved: ResolvedStep) -> StepResult:
        started, clock = datetime.now(UTC), time.monotonic()
        self._stop_signal = resolved.stop_signal
        log.info("step begins", extra={"sandbox": self.sandbox_id, "step": resolved.step.name, "step_index": index})
        try:
            result = await self._attempt.steps.run(index, resolved)
        except ShimDied:
            duration = time.monotonic() - clock
            self._results.append(
                StepResult(resolved.step.name, None, started, duration, error="lost: the sandbox ended while it ran")
            )
            self._set_end(End(EndCause.SANDBOX_DIED))
            raise
        self._results.append(result)
        if result.failed and (hint := privilege_hint(resolved.step, self._attempt.prepared.plan)):
            self._notes.append(hint)
        log.info(
            "step ends",
            extra={"sandbox": self.sandbox_id, "step": result.name, "step_index": index, "seconds": result.duration},
        )
        return result

    def _set_end(self, end: End) -> None:
        """The first cause stands: what came later only raced with it."""
        if self._end is None:
            self._end = end
            self._stopped.set_result(None)

    def _result(
        self,
        verdict: Verdict,
        evidence: Evidence,
        usage: ResourceUsage,
        outputs: tuple[CollectedOutput, ...],
        cleanup_errors: tuple[str, ...],
    ) -> ExecutionResult:
        attempt = self._attempt
        end = self._end or End(EndCause.EXITED)
        decider = deciding_step(tuple(self._results))
        cleanup = tuple(f"cleanup: {error}" for error in cleanup_errors)
        return ExecutionResult(
            sandbox_id=self.sandbox_id,
            attempt_id=attempt.request.context.attempt_id,
            name=attempt.request.spec.name,
            outcome=verdict.outcome,
            failure_class=verdict.outcome.failure_class,
            exit_code=verdict.exit_code,
            message=verdict.message,
            end_cause=end.cause,
            cancellation=end.cancellation,
            exit=decider.exit if decider else None,
            steps=tuple(self._results),
            started_at=self._started_at,
            finished_at=datetime.now(UTC),
            evidence=evidence,
            usage=usage,
            output=attempt.spool.summary(),
            outputs=outputs,
            provenance=attempt.provenance(),
            startup=dict(attempt.phases),
            notes=(*attempt.prepared.notes, *verdict.notes, *self._notes, *cleanup),
        )
