"""An executor that pretends: for tests of what uses executors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from forgeyard_executor.capabilities import refuse_missing
from forgeyard_executor.images import AS_USUAL, ImageOptions
from forgeyard_executor.interface import JobOptions
from forgeyard_executor.recovery import SandboxInfo, ServiceInfo
from forgeyard_executor.refusals import prepare_timeout
from forgeyard_executor.testing.fake_attempt import FakeAttempt
from forgeyard_executor.testing.fake_plan import plan_fake, without
from forgeyard_executor.testing.fake_run import FakeRun
from forgeyard_executor.testing.fake_sandbox import RUNTIME, FakePrepared
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, ResourceControls
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest, SandboxError
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.live import LiveContainer, LiveUsage
from forgeyard_model.plan import Bundle
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.request import PreparedWorkspace
from forgeyard_model.result import CancellationReason

if TYPE_CHECKING:
    from forgeyard_executor.interface import PreparedAttempt, RunningAttempt

Behaviour = Callable[[Job], FakeRun]


class FakeExecutor:
    """Keeps the contract of `JobExecutor`, and runs nothing. Within a running event loop.

    :param behaviour: how each job is to go; by default each succeeds at once.
    :param names_once: an attempt id names one attempt, as at a server: a Prepare that is repeated is the same attempt,
        and another job under its name is refused. Without it, as in a process of one's own, an id is data only.
    :ivar prepared: every attempt that was prepared, in order, with its context. attempts: every one that was started.
    """

    def __init__(self, behaviour: Behaviour = lambda _: FakeRun(), *, names_once: bool = False) -> None:
        self.prepared: list[FakePrepared] = []
        self.attempts: list[FakeAttempt] = []
        self._behaviour = behaviour
        self._names_once = names_once
        self._closed = False
        self._waiting: dict[SandboxId, FakePrepared] = {}
        self._running: dict[str, FakeAttempt] = {}
        self._capabilities = _CAPABILITIES
        self._news = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def open(cls, behaviour: Behaviour = lambda _: FakeRun(), *, names_once: bool = False) -> AsyncIterator[Self]:
        """One that is closed at the end of the block."""
        executor = cls(behaviour, names_once=names_once)
        try:
            yield executor
        finally:
            await executor.close()

    async def close(self) -> None:
        """End what runs, as an executor's shutdown does, and take nothing more. Repeating it is no error."""
        self._closed = True
        for attempt in list(self._running.values()):
            await attempt.cancel(CancellationReason.SHUTDOWN, kill=True)
            await self.close_execution(attempt)
        self._waiting.clear()

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What it pretends to provide."""
        return replace(self._capabilities, probed_at=datetime.now(UTC))

    async def become_capable_of(self, capabilities: ExecutorCapabilities) -> None:
        """Pretend that an administrator, or a kernel, changed what this host can do."""
        async with self._news:
            self._capabilities = capabilities
            self._news.notify_all()

    async def lose_feature(self, feature: Feature, *, details: str = "", cure: str = "") -> None:
        """Pretend that `feature` was taken away: jobs that need it are refused from here on, running ones go on."""
        await self.become_capable_of(without(self._capabilities, feature, details, cure))

    async def watch_capabilities(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """The same, and each change."""
        while True:
            seen = self._capabilities
            yield seen
            async with self._news:
                await self._news.wait_for(lambda seen=seen: self._capabilities != seen)  # type: ignore[misc]  # bound here

    async def prepare_job(
        self,
        job: Job,
        *,
        source: str | Path | None = None,
        output: str | Path | None = None,
        attempt_id: str | None = None,
        labels: Mapping[str, str] = EMPTY,
        deadline: datetime | None = None,
        tenant: str = "",
        trusted: bool = True,
        images: ImageOptions = AS_USUAL,
    ) -> FakePrepared:
        """Take its time, then be ready, or refuse: as the job's `FakeRun` says, and as the executor refuses a job."""
        attempt_id = attempt_id or f"local-{SandboxId.mint()}"
        context = AttemptContext(attempt_id, tenant, labels=labels, deadline=deadline, trusted=trusted)
        if self._names_once and (known := self._named(attempt_id, job)) is not None:
            return known
        workspace = PreparedWorkspace(None if source is None else str(source), None if output is None else str(output))
        prepared = plan_fake(context, job, self._behaviour(job), workspace)
        await self._prepare(prepared)
        self.prepared.append(prepared)
        self._waiting[prepared.sandbox_id] = prepared
        return prepared

    async def _prepare(self, prepared: FakePrepared) -> None:
        behaviour, request = prepared.behaviour, prepared.request
        if self._closed:
            raise ExecutorError(ExecutorErrorKind.UNSUPPORTED, "closed", "this executor has been closed")
        try:
            refuse_missing(request, self._capabilities)
        except SandboxError as error:
            raise ExecutorError.prepare(error) from error
        try:
            async with asyncio.timeout(request.timeouts.prepare):
                await asyncio.sleep(behaviour.prepare_seconds)
        except TimeoutError as error:
            raise prepare_timeout(request, pulling=False) from error
        if behaviour.refused is not None:
            raise behaviour.refused

    def _named(self, attempt_id: str, job: Job) -> FakePrepared | None:
        known = next((item for item in self.prepared if item.context.attempt_id == attempt_id), None)
        if known is not None and known.job != job:
            raise InvalidRequest("attempt_id", attempt_id, "names another request already: take a new one")
        return known

    async def start(self, prepared: PreparedAttempt) -> FakeAttempt:
        """Start it, or fail: as the job's `FakeRun` says."""
        waiting = self._waiting.pop(prepared.sandbox_id, None)
        if waiting is None and self._names_once and prepared.sandbox_id.value in self._running:
            return self._running[prepared.sandbox_id.value]
        if waiting is None:
            raise ExecutorError(
                ExecutorErrorKind.LOST, "not_prepared", f"{prepared.sandbox_id} is not waiting to be started"
            )
        if waiting.behaviour.broken is not None:
            raise waiting.behaviour.broken
        attempt = FakeAttempt(waiting)
        self.attempts.append(attempt)
        self._running[attempt.sandbox_id] = attempt
        return attempt

    async def discard(self, prepared: PreparedAttempt) -> None:
        """Forget it. Repeating it is no error."""
        self._waiting.pop(prepared.sandbox_id, None)

    async def close_execution(self, execution: RunningAttempt) -> None:
        """Cancel it if it still runs, wait for its end and drop its output. Repeating it is no error."""
        attempt = self._running.pop(execution.sandbox_id, None)
        if attempt is not None:
            await attempt.cancel()
            await attempt.over()
            await attempt.drop_output()

    @asynccontextmanager
    async def run(
        self,
        job: Job,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[FakeAttempt]:
        """Prepare and start `job`; leaving the block cancels what still runs."""
        prepared = await self.prepare_job(job, **options)
        attempt = await self.start(prepared)
        try:
            yield attempt
        finally:
            await self.close_execution(attempt)

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """Those that are prepared, or run, oldest first."""
        there = {prepared.sandbox_id.value: _info(prepared, "preparing") for prepared in self._waiting.values()}
        running = {name: _info(item.prepared, "running") for name, item in self._running.items() if not item.ended}
        return tuple(info for _, info in sorted((there | running).items()))

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """A container for the job and for each service, with nothing in them."""
        attempt = self._running.get(sandbox_id)
        waiting = self._waiting.get(SandboxId(sandbox_id))
        prepared = waiting if attempt is None else attempt.prepared
        if prepared is None:
            raise ExecutorError(ExecutorErrorKind.LOST, "no_such_attempt", f"no attempt {sandbox_id} is here")
        state = "created" if attempt is None else "exited" if attempt.ended else "running"
        job, digest = prepared.job, prepared.bundle_digest
        return tuple(
            LiveContainer(
                name=name,
                container_id=f"fy-{sandbox_id}" if number == 0 else f"fy-{sandbox_id}-{number}",
                sandbox_id=sandbox_id,
                state=state,
                pid=None,
                bundle=Bundle(b"{}", digest, digest),
                rootfs="none",
                image=image,
                usage=LiveUsage(datetime.now(UTC), 0, 0, 0, 0) if state == "running" else None,
            )
            for number, (name, image) in enumerate(
                ((job.name, job.image), *((service.name, service.image) for service in job.services))
            )
        )


def _info(prepared: FakePrepared, state: str) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id=prepared.sandbox_id.value,
        attempt_id=prepared.context.attempt_id,
        name=prepared.job.name,
        state=state,
        started_at=datetime.now(UTC),
        pid=None,
        owner=RUNTIME,
        services=tuple(ServiceInfo(service.name, "", None) for service in prepared.job.services),
    )


_CAPABILITIES = ExecutorCapabilities(
    runtime=RUNTIME,
    isolation_levels=frozenset({IsolationLevel.NONE}),
    network_modes=frozenset(NetworkMode),
    resource_controls=ResourceControls(cpu=False, memory=False, pids=False, disk=False),
    user_namespace=False,
    seccomp=False,
)
