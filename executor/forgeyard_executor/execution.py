"""One running attempt: orders the steps, ends them for one cause, and turns the end into a result."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from forgeyard_executor.attempt import Attempt
from forgeyard_executor.hints import privilege_hint
from forgeyard_executor.member import DEATH_GRACE
from forgeyard_executor.steps import ResolvedStep, resolve_step, should_run
from forgeyard_executor.verdict import End, Verdict, deciding_step, judge
from forgeyard_model.cache import CacheReport
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, InvalidRequest
from forgeyard_model.job import Step, When
from forgeyard_model.network import NetworkEvidence
from forgeyard_model.result import (
    CLEANUP_NOTE,
    CancellationReason,
    CollectedOutput,
    EndCause,
    Evidence,
    ExecutionResult,
    Outcome,
    ResourceUsage,
    ServiceResult,
    StepResult,
)
from forgeyard_process_shim.channel import ShimDied
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import OutputChunk, SpoolMark
from forgeyard_runtimes.spool_format import START

if TYPE_CHECKING:
    from forgeyard_executor.kept_failures import FailureKeeper, Keeping
    from forgeyard_services.supervisor import ServiceFailure

log: Final = logging.getLogger("forgeyard.executor")

SMALL_OUTPUT: Final = 1 << 20
"""Bytes. Deleting that little is quicker than handing it to a thread."""

_HINT_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class Beside:
    """What became of what a job had beside it."""

    services: tuple[ServiceResult, ...] = ()
    network: NetworkEvidence | None = None
    notes: tuple[str, ...] = ()


class Execution:
    """A started attempt. `wait` for its result, `cancel` it, read its `output`; any number of readers."""

    def __init__(self, attempt: Attempt, failures: FailureKeeper | None = None) -> None:
        """:param failures: what keeps its workspace if it fails."""
        self._attempt = attempt
        self._failures = failures
        self._end: End | None = None
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kill_now = asyncio.Event()
        self._no_more_steps = asyncio.Event()
        self._step_lock = asyncio.Lock()
        self._ready = asyncio.Event()
        self._results: list[StepResult] = []
        self._stop_signal: int = signal.SIGTERM
        self._notes: list[str] = []
        self._started_at = datetime.now(UTC)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"forgeyard {attempt.sandbox}")

    @property
    def attempt(self) -> Attempt:
        """What is run: for those who look at it, not for those who use it."""
        return self._attempt

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
        :raises InvalidRequest: for a step the kernel would refuse, or where the job has steps of its own.
        """
        if self._attempt.planned.steps:
            cure = "the job has steps of its own: only an attempt that was prepared without steps takes more"
            raise InvalidRequest("step", step.name, cure)
        async with self._step_lock:
            await self._ready.wait()
            if self._end is not None:
                raise ExecutorError(ExecutorErrorKind.LOST, "attempt_ended", "the attempt has already ended")
            attempt = self._attempt
            index = len(self._results)
            user = attempt.prepared.plan.user.name
            resolved = resolve_step(attempt.request, attempt.rootfs, step, index=index, user=user)
            if attempt.network is not None:
                resolved = attempt.network.for_step(resolved)
            return await self._run_one(index, resolved)

    def finish(self) -> None:
        """Say that no further `exec` comes: an attempt started without steps ends when the running one does."""
        self._no_more_steps.set()

    def output(self, *, after: SpoolMark = START, follow: bool = True) -> AsyncGenerator[OutputChunk, None]:
        """The job's output as it comes, until the job has ended.

        :param after: what the reader has of each stream already; that is not repeated.
        :param follow: False ends at what is there now.
        """
        return self._attempt.spool.reader(after=after, follow=follow)

    def service_output(
        self, name: str, *, after: SpoolMark = START, follow: bool = True
    ) -> AsyncGenerator[OutputChunk, None]:
        """What the service `name` writes, until it has ended. Parameters as `output`'s.

        :raises InvalidRequest: the job has no such service.
        """
        container = next((item for item in self._attempt.services if item.spec.name == name), None)
        if container is None:
            names = ", ".join(item.spec.name for item in self._attempt.services) or "none"
            raise InvalidRequest("service", name, f"the job has no such service; it has {names}")
        return container.member.spool.reader(after=after, follow=follow)

    async def drop_output(self) -> None:
        """Delete the spooled output. Only after the end, when no reader wants it any more."""
        spools = (self._attempt.spool, *(container.member.spool for container in self._attempt.services))
        for spool in spools:
            summary = spool.summary()
            if summary.stdout_bytes + summary.stderr_bytes <= SMALL_OUTPUT:
                spool.remove()
            else:
                await asyncio.to_thread(spool.remove)

    # ---- the attempt's own task

    async def _run(self) -> ExecutionResult:
        attempt = self._attempt
        evidence, usage = Evidence(), ResourceUsage()
        outputs: tuple[CollectedOutput, ...] = ()
        caches: tuple[CacheReport, ...] = ()
        beside = Beside()
        keeping: Keeping | None = None
        try:
            await self._run_to_end()
            evidence, usage = await attempt.read_evidence()
            beside = await self._read_beside()
            outputs = await attempt.collect_outputs()
            outcome = self._judge(evidence, outputs).outcome
            caches = await attempt.save_caches(keep=outcome is Outcome.SUCCEEDED)
            keeping = await self._keep(outcome, evidence)
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
        result = self._result(self._judge(evidence, outputs), evidence, usage, outputs, cleanup_errors)
        result = replace(
            result,
            caches=caches,
            services=beside.services,
            network=beside.network,
            notes=(*result.notes, *beside.notes),
        )
        return result if keeping is None else await self._kept(keeping, result)

    async def _keep(self, outcome: Outcome, evidence: Evidence) -> Keeping | None:
        """Take a failed job's workspace before it goes. That it can't be kept changes no verdict."""
        if self._failures is None:
            return None
        from forgeyard_executor.failure_keeping import NO_FAILURE, keep

        try:
            return None if outcome in NO_FAILURE else await keep(self._failures, self._attempt, evidence.disk)
        except ForgeyardError as error:
            self._notes.append(str(error))
            return None

    async def _kept(self, keeping: Keeping, result: ExecutionResult) -> ExecutionResult:
        noted = replace(result, notes=(*result.notes, keeping.note))
        try:
            await shielded(asyncio.to_thread(keeping.finish, noted))
        except ForgeyardError as error:
            return replace(result, notes=(*result.notes, str(error)))
        return noted

    def _judge(self, evidence: Evidence, outputs: tuple[CollectedOutput, ...]) -> Verdict:
        return judge(self._end or End(EndCause.EXITED), tuple(self._results), evidence, outputs)

    async def _run_to_end(self) -> None:
        """Services, then steps until they are through or something stops them; then the end of the tree, verified."""
        steps: asyncio.Future[None] | None = None
        try:
            if self._attempt.services_up is not None:
                await self._await_services(self._attempt.services_up)
            self._ready.set()
            steps = asyncio.ensure_future(self._run_steps())
            await self._follow(steps)
        finally:
            self._ready.set()
            await self._end_tree(steps)

    async def _follow(self, steps: asyncio.Future[None]) -> None:
        death = self._attempt.container.death
        limit, name = self._time_limit()
        causes = (steps, self._stopped, death, *self._beside())
        await asyncio.wait(causes, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if death.done() and not steps.done():
            # What the running step last reported may still be in the pipe; it counts.
            await asyncio.wait((steps,), timeout=DEATH_GRACE)
            if not steps.done():  # else all of them had ended, or the one that had not has said so
                await self._sandbox_died()
        elif not steps.done():
            self._note_failures_beside()
            self._set_end(End(EndCause.TIMED_OUT, detail=name, limit=limit or 0.0))
            await self._stop_steps(steps)
        if steps.done():
            steps.result()
            self._set_end(End(EndCause.EXITED))

    # ---- what is beside the job

    async def _await_services(self, up: asyncio.Future[ServiceFailure | None]) -> None:
        """Until they are ready, or there is a reason that no step runs any more."""
        limit, name = self._deadline_limit()
        causes: tuple[asyncio.Future[Any], ...] = (up, self._stopped, self._attempt.container.death, *self._beside())
        await asyncio.wait(causes, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        self._note_failures_beside()
        if self._attempt.container.death.done():
            await self._sandbox_died()
        if not up.done():
            self._set_end(End(EndCause.TIMED_OUT, detail=name, limit=limit or 0.0))

    def _beside(self) -> tuple[asyncio.Future[Any], ...]:
        """What ends the job when it is done: a service that failed, a part of the network that died."""
        attempt = self._attempt
        found: list[asyncio.Future[Any]] = [] if attempt.supervisor is None else [attempt.supervisor.failed]
        return (*found, *(() if attempt.network is None else (attempt.network.failed,)))

    def _note_failures_beside(self) -> None:
        attempt = self._attempt
        if attempt.network is not None and attempt.network.failed.done():
            self._set_end(End(EndCause.INFRASTRUCTURE, detail=str(attempt.network.failed.exception())))
        if attempt.supervisor is None or not attempt.supervisor.failed.done():
            return
        error = attempt.supervisor.failed.exception()
        if error is not None:
            self._set_end(End(EndCause.INFRASTRUCTURE, detail=f"services: {error}"))
            return
        failure = attempt.supervisor.failed.result()
        limit = " (services_timeout)" if failure.timed_out else ""
        cause = EndCause.INFRASTRUCTURE if failure.lost else EndCause.SERVICE_FAILED
        self._set_end(End(cause, detail=f"{failure.message}{limit}"))

    async def _read_beside(self) -> Beside:
        """What became of services and network, once all are dead and before anything of them is taken down."""
        attempt = self._attempt
        services: tuple[ServiceResult, ...] = ()
        notes: tuple[str, ...] = ()
        if attempt.supervisor is not None:
            services, notes = await attempt.supervisor.results(), attempt.supervisor.notes
        network = None if attempt.network is None else await attempt.network.evidence()
        return Beside(services, network, notes)

    def _time_limit(self) -> tuple[float | None, str]:
        """Seconds that the steps have, and which limit that is: the job's timeout, or the caller's deadline."""
        limit = self._attempt.request.limits.wall_time
        left, name = self._deadline_limit()
        if left is not None and (limit is None or left < limit):
            return left, name
        return limit, "timeout"

    def _deadline_limit(self) -> tuple[float | None, str]:
        """Seconds until the caller's deadline."""
        deadline = self._attempt.request.context.deadline
        left = None if deadline is None else max(0.0, (deadline - datetime.now(UTC)).total_seconds())
        return left, "the caller's deadline"

    async def _end_tree(self, steps: asyncio.Future[None] | None) -> None:
        try:
            await self._attempt.container.kill()
        finally:
            await self._attempt.stop_services()
        if steps is not None and not steps.done():
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
            await self._sandbox_died()
            raise
        self._results.append(result)
        if result.failed:
            self._notes.extend(await self._hints(resolved))
        log.info(
            "step ends",
            extra={"sandbox": self.sandbox_id, "step": result.name, "step_index": index, "seconds": result.duration},
        )
        return result

    async def _hints(self, resolved: ResolvedStep) -> list[str]:
        """What its step may have looked for in vain."""
        from forgeyard_services.hints import engine_hint

        step = resolved.step
        words = step.argv if step.script is None else (step.script,)
        engine = engine_hint(await self._output_tail(), words)
        hints = (
            privilege_hint(step, self._attempt.prepared.plan),
            engine and f"step {step.name} failed: {engine}",
        )
        return [hint for hint in hints if hint]

    async def _output_tail(self) -> bytes:
        """The end of the job's output; nothing where there is so much of it that looking would hold up the job."""
        summary = self._attempt.spool.summary()
        if summary.stdout_bytes + summary.stderr_bytes > SMALL_OUTPUT:
            return b""
        tail = bytearray()
        async for chunk in self._attempt.spool.reader(follow=False):
            tail += chunk.data
            del tail[:-_HINT_BYTES]
        return bytes(tail)

    async def _sandbox_died(self) -> None:
        """PID 1 is dead before its time. What its engine knows of that is for the message; see `verdict`."""
        if self._end is not None:
            return
        try:
            lost = await self._attempt.container.loss()
        except ForgeyardError as error:
            end = End(EndCause.SANDBOX_DIED, detail=f"PID 1 of the sandbox was ended while the job ran: {error}")
        else:
            end = End(EndCause.SANDBOX_DIED) if lost is None else End(EndCause.INFRASTRUCTURE, detail=str(lost))
        self._set_end(end)

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
        cleanup = tuple(f"{CLEANUP_NOTE}{error}" for error in cleanup_errors)
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
