"""One attempt of the server's, from the moment it is taken in to its one end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Wanted
from forgeyard_executor.images import ImageOptions
from forgeyard_executor.interface import JobExecutor, PreparedAttempt, RunningAttempt
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.job import Step
from forgeyard_model.result import CancellationReason, ExecutionResult, StepResult

if TYPE_CHECKING:
    from forgeyard_api.serve.store import StoredAttempt

T = TypeVar("T")

_LOSSES: Final = ("server_lost", "keeper_lost")

log: Final = logging.getLogger("forgeyard.serve")


@dataclass(frozen=True, slots=True)
class Attached:
    """What a keeper has of an attempt: a prepared one, or one that runs or has run, or how it failed.

    :param executor: who has it.
    :param preparing: it is being prepared there; this waits for that.
    """

    executor: JobExecutor
    prepared: PreparedAttempt | None = None
    running: RunningAttempt | None = None
    error: ForgeyardError | None = None
    preparing: Callable[[], Coroutine[Any, Any, PreparedAttempt]] | None = None


class Keeper(JobExecutor, Protocol):
    """An executor that outlives the server: what it runs can be found again."""

    async def attach(self, attempt_id: str) -> Attached | None:
        """The attempt of that name; None: it knows of none.

        :raises ForgeyardError: it can't be asked.
        """

    async def forget(self, attempt_id: str) -> None:
        """End it if it has not ended, and drop what it has of it. One that is not there is no error.

        :raises ForgeyardError: it can't be asked.
        """


def keeper_of(executor: JobExecutor | None) -> Keeper | None:
    """`executor`, if it is a keeper: one in the server's own process has nothing that is older than the server."""
    return executor if hasattr(executor, "attach") else None  # type: ignore[return-value]  # it has what makes it one


Record = Callable[["AttemptLife"], Awaitable[None]]
"""Writes down what an attempt has become, and tells whoever watches."""


class Records(Protocol):
    """Where attempts are written down, by owner and name: `Rows` on disk, or a keeper's memory."""

    def digest(self, key: tuple[int, str]) -> str:
        """Of the Prepare that an attempt came from."""

    async def add(self, life: AttemptLife, request: bytes, digest: str, owner: tuple[int, int]) -> None:
        """A new one.

        :param owner: pid and start time of the process whose death ends it; zeros: nobody's does.
        """

    async def update(self, key: tuple[int, str], **changes: Any) -> None:
        """Change columns by their names."""

    async def become(self, key: tuple[int, str], life: AttemptLife) -> None:
        """What it has become."""

    async def remove(self, key: tuple[int, str]) -> None:
        """Forget it."""

    async def all(self, record: Record) -> list[tuple[AttemptLife, StoredAttempt]]:
        """Every attempt of an earlier process, oldest first."""


class AttemptLife:
    """Runs one attempt through its states. Whoever takes it out of the queue calls `run`, or `adopt` after a restart.

    :param name: what the executor is told; the caller's own name stays in the view.
    :param record: called after each change of `view`, before anybody is told.
    """

    def __init__(self, wanted: Wanted, view: AttemptView, name: str, record: Record) -> None:
        self.wanted = wanted
        self.view = view
        self.name = name
        self.executor: JobExecutor | None = None
        self.running: RunningAttempt | None = None
        self.cancelled: CancellationReason | None = None
        self.start_asked = wanted.start
        self.kill_asked = False
        self.finish_asked = False
        self._record = record
        self._prepared: PreparedAttempt | None = None
        self._preparing: Callable[[], Coroutine[Any, Any, PreparedAttempt]] | None = None
        self._told = view.state
        self._changed = asyncio.Condition()
        self._start = asyncio.Event()
        self._stop = asyncio.Event()
        if self.start_asked:
            self._start.set()

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come."""
        return self.view.state is AttemptState.ENDED

    @property
    def was_lost(self) -> bool:
        """Whether it ended because nobody was left who kept it."""
        error = self.view.error
        return isinstance(error, ExecutorError) and error.reason in _LOSSES

    # ---- what callers ask for

    def ask_start(self) -> None:
        """Let it run as soon as it is prepared."""
        self.start_asked = True
        self._start.set()

    def was_cancelled(self, reason: CancellationReason, *, kill: bool) -> None:
        """Somebody had asked for that before a restart."""
        self.cancelled, self.kill_asked = reason, kill
        self._stop.set()

    async def cancel(self, reason: CancellationReason, *, kill: bool = False) -> None:
        """Stop it, wherever it is. Returns at once."""
        self.cancelled = self.cancelled or reason
        self.kill_asked = self.kill_asked or kill
        self._stop.set()
        if self.running is not None and not self.ended:
            await self._cancel_running(self.running)

    def finish(self) -> None:
        """No further step comes."""
        self.finish_asked = True
        if self.running is not None and not self.ended:
            self.running.finish()

    async def until(self, state: AttemptState) -> AttemptView:
        """Wait until it has got that far, or has ended."""
        async with self._changed:
            # Of what is written down: a state that a crash would take back is nobody's to act on.
            await self._changed.wait_for(lambda: self._told.rank >= state.rank)
            return self.view

    async def exec(self, step: Step) -> StepResult:
        """Run one more step, once it runs.

        :raises ExecutorError: LOST, attempt_ended.
        """
        await self.until(AttemptState.RUNNING)
        if self.running is None or self.ended:
            raise ExecutorError(ExecutorErrorKind.LOST, "attempt_ended", "the attempt has already ended")
        return await self.running.exec(step)

    # ---- its course

    async def run(self, executor: JobExecutor) -> None:
        """From the queue to the end. Never raises but for cancellation, which leaves it where it is."""
        self.executor = executor
        await self._become(AttemptState.PREPARING)
        await self._guarded(self._from_the_start(executor))

    async def adopt(self, keeper: Keeper) -> bool:
        """Go on where a dead server left it.

        :returns: whether `keeper` knows of it; otherwise nothing has changed.
        :raises ForgeyardError: it can't be asked.
        """
        found = await keeper.attach(self.name)
        if found is None:
            return False
        self.executor = found.executor
        if found.error is not None:
            await self.fail(found.error)
            await keeper.forget(self.name)
        elif found.running is not None:
            self._running(found.running)
            if not self.ended:
                await self._become(AttemptState.RUNNING, started_at=self.view.started_at or datetime.now(UTC))
                await self._caught_up(found.running)
        else:
            self._prepared, self._preparing = found.prepared, found.preparing
        return True

    async def go_on(self) -> None:
        """After `adopt`: to the end."""
        if self.ended:
            return
        if self.running is not None:
            await self._guarded(self._to_the_end(self.running))
        elif self._prepared is not None and self.executor is not None:
            await self._guarded(self._from_prepared(self.executor, self._prepared))
        elif self._preparing is not None and self.executor is not None:
            await self._guarded(self._once_prepared(self.executor, self._preparing()))

    async def back_to_the_queue(self) -> None:
        """Nobody has it, and nothing of it ran."""
        self.view = replace(self.view, state=AttemptState.QUEUED)
        self._told = AttemptState.QUEUED
        await self._record(self)

    async def fail(self, error: ForgeyardError) -> None:
        """End it without a result."""
        await self._become(AttemptState.ENDED, error=error, finished_at=datetime.now(UTC))

    async def forget(self) -> None:
        """Drop what its executor still keeps of it. Repeating it is no error.

        :raises ForgeyardError: what could not be dropped.
        """
        keeper = keeper_of(self.executor)
        if keeper is not None:
            await keeper.forget(self.name)
        elif self.executor is not None and self.running is not None:
            await self.executor.close_execution(self.running)
        elif self.executor is not None and self._prepared is not None:
            await self.executor.discard(self._prepared)
        self.running, self._prepared = None, None

    async def _guarded(self, course: Awaitable[None]) -> None:
        try:
            await course
        except ForgeyardError as error:
            await self.fail(error)
        except Exception as error:
            log.exception("the course of %s", self.name)
            await self.fail(
                ExecutorError(
                    ExecutorErrorKind.INTERNAL,
                    "internal",
                    "the server itself failed over this attempt",
                    details=f"{type(error).__name__}: {error}",
                    resolution="report this with the server's log: it is a fault of ours",
                )
            )

    async def _from_the_start(self, executor: JobExecutor) -> None:
        wanted = self.wanted
        options = ImageOptions(pull=wanted.pull) if wanted.pull else ImageOptions()
        preparing = executor.prepare_job(
            wanted.job,
            source=None if wanted.source is None else Path(wanted.source),
            output=None if wanted.output is None else Path(wanted.output),
            attempt_id=self.name,
            labels=wanted.labels,
            deadline=wanted.deadline,
            tenant=wanted.tenant,
            trusted=wanted.trusted,
            images=options,
        )
        await self._once_prepared(executor, preparing)

    async def _once_prepared(self, executor: JobExecutor, preparing: Coroutine[Any, Any, PreparedAttempt]) -> None:
        task = asyncio.ensure_future(preparing)
        if not await self._unless_stopped(task):
            keeper = keeper_of(executor)
            if keeper is not None:  # it goes on with what it was asked for, whether or not anybody waits
                await keeper.forget(self.name)
            raise self._was_cancelled()
        await self._from_prepared(executor, task.result())

    async def _from_prepared(self, executor: JobExecutor, prepared: PreparedAttempt) -> None:
        self._prepared = prepared
        await self._become(
            AttemptState.PREPARED,
            sandbox_id=prepared.sandbox_id.value,
            bundle_digest=prepared.bundle_digest,
            notes=prepared.notes,
        )
        await self._unless_stopped(asyncio.ensure_future(self._start.wait()))
        if self._stop.is_set():
            await executor.discard(prepared)
            raise self._was_cancelled()
        running = await executor.start(prepared)
        self._running(running)
        await self._become(AttemptState.RUNNING, started_at=datetime.now(UTC))
        await self._caught_up(running)
        await self._to_the_end(running)

    async def _caught_up(self, running: RunningAttempt) -> None:
        """What was asked for while nobody could pass it on."""
        if self.cancelled is not None:
            await self._cancel_running(running)
        if self.finish_asked:
            running.finish()

    async def _cancel_running(self, running: RunningAttempt) -> None:
        try:
            await running.cancel(self.cancelled or CancellationReason.USER, kill=self.kill_asked)
        except ExecutorError as error:
            if error.kind is not ExecutorErrorKind.LOST:
                raise
            log.info("%s is not cancelled: %s", self.name, error)  # its end is told by its course

    async def _to_the_end(self, running: RunningAttempt) -> None:
        result = await running.wait()
        await self._become(AttemptState.ENDED, result=self._named(result), finished_at=result.finished_at)

    def _running(self, running: RunningAttempt) -> None:
        self._prepared = None
        self.running = running
        if self.view.sandbox_id != running.sandbox_id:
            self.view = replace(self.view, sandbox_id=running.sandbox_id)

    def _was_cancelled(self) -> ExecutorError:
        return cancelled(self.cancelled or CancellationReason.USER)

    def _named(self, result: ExecutionResult) -> ExecutionResult:
        return replace(result, attempt_id=self.view.attempt_id)

    async def _unless_stopped(self, task: asyncio.Future[T]) -> bool:
        """Wait for `task`, which somebody's cancel ends; whether it came to its own end, good or bad."""
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        return not task.cancelled()

    async def _become(self, state: AttemptState, **changes: object) -> None:
        if self.ended:
            return  # an attempt ends once
        self.view = replace(self.view, state=state, **changes)  # type: ignore[arg-type]  # fields by name
        try:
            await self._record(self)
        except ForgeyardError as error:
            if state is not AttemptState.ENDED:
                raise
            log.error("the end of %s is not written down: %s", self.name, error)  # noqa: TRY400  # its message is all there is
        async with self._changed:
            self._told = self.view.state
            self._changed.notify_all()


def cancelled(reason: CancellationReason) -> ExecutorError:
    """The end of an attempt that was stopped before a workload started."""
    return ExecutorError(
        ExecutorErrorKind.CANCELLED, "cancelled", f"cancelled before it started: {reason.value.replace('_', ' ')}"
    )
