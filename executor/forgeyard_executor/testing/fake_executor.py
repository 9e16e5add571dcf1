"""An executor that pretends: for tests of what uses executors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from forgeyard_executor.images import AS_USUAL, ImageOptions
from forgeyard_executor.recovery import SandboxInfo
from forgeyard_executor.testing.fake_attempt import RUNTIME, FakeAttempt, FakePrepared
from forgeyard_executor.testing.fake_run import FakeRun
from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.live import LiveContainer, LiveUsage
from forgeyard_model.plan import Bundle
from forgeyard_model.policy import IsolationLevel, NetworkMode

if TYPE_CHECKING:
    from forgeyard_executor.interface import PreparedAttempt, RunningAttempt

Behaviour = Callable[[Job], FakeRun]


class FakeExecutor:
    """Keeps the contract of `JobExecutor`, and runs nothing.

    :param behaviour: how each job is to go; by default each succeeds at once.
    :ivar prepared: every attempt that was prepared, in order, with its context. attempts: every one that was started.
    """

    def __init__(self, behaviour: Behaviour = lambda _: FakeRun()) -> None:
        self.prepared: list[FakePrepared] = []
        self.attempts: list[FakeAttempt] = []
        self._behaviour = behaviour
        self._waiting: dict[SandboxId, FakePrepared] = {}
        self._running: dict[str, FakeAttempt] = {}
        self._capabilities = _CAPABILITIES
        self._news = asyncio.Condition()

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What it pretends to provide."""
        return replace(self._capabilities, probed_at=datetime.now(UTC))

    async def become_capable_of(self, capabilities: ExecutorCapabilities) -> None:
        """Pretend that an administrator, or a kernel, changed what this host can do."""
        async with self._news:
            self._capabilities = capabilities
            self._news.notify_all()

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
        """Take its time, then be ready, or refuse: as the job's `FakeRun` says."""
        behaviour = self._behaviour(job)
        await asyncio.sleep(behaviour.prepare_seconds)
        if behaviour.refused is not None:
            raise behaviour.refused
        sandbox = SandboxId.mint()
        attempt_id = attempt_id or f"local-{sandbox}"
        context = AttemptContext(attempt_id, tenant, labels=labels, deadline=deadline, trusted=trusted)
        prepared = FakePrepared(sandbox, context, job, behaviour)
        self.prepared.append(prepared)
        self._waiting[sandbox] = prepared
        return prepared

    async def start(self, prepared: PreparedAttempt) -> FakeAttempt:
        """Start it, or fail: as the job's `FakeRun` says."""
        waiting = self._waiting.pop(prepared.sandbox_id, None)
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
            await attempt.cancel(kill=True)
            await attempt.wait()
            await attempt.drop_output()

    @asynccontextmanager
    async def run(
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
    ) -> AsyncIterator[FakeAttempt]:
        """Prepare and start `job`; leaving the block cancels what still runs."""
        prepared = await self.prepare_job(
            job,
            source=source,
            output=output,
            attempt_id=attempt_id,
            labels=labels,
            deadline=deadline,
            tenant=tenant,
            trusted=trusted,
            images=images,
        )
        attempt = await self.start(prepared)
        try:
            yield attempt
        finally:
            await self.close_execution(attempt)

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """Those that run."""
        return tuple(
            SandboxInfo(
                attempt.sandbox_id,
                attempt.prepared.context.attempt_id,
                attempt.prepared.job.name,
                "running",
                datetime.now(UTC),
                None,
                RUNTIME,
            )
            for attempt in self._running.values()
            if not attempt.ended
        )

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """A container for the job and for each service, with nothing in them."""
        attempt = self._running.get(sandbox_id)
        if attempt is None:
            raise ExecutorError(ExecutorErrorKind.LOST, "no_such_attempt", f"no attempt {sandbox_id} is here")
        job, state = attempt.prepared.job, "exited" if attempt.ended else "running"
        digest = attempt.prepared.bundle_digest
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
                usage=LiveUsage(datetime.now(UTC), 0, 0, 0, 0),
            )
            for number, (name, image) in enumerate(
                ((job.name, job.image), *((service.name, service.image) for service in job.services))
            )
        )


_CAPABILITIES = ExecutorCapabilities(
    runtime=RUNTIME,
    isolation_levels=frozenset({IsolationLevel.NONE}),
    network_modes=frozenset(NetworkMode),
    resource_controls=ResourceControls(cpu=False, memory=False, pids=False, disk=False),
    user_namespace=False,
    seccomp=False,
)
