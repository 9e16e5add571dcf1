"""The executor of a server, with the interface of the one in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, Unpack

import grpc

from forgeyard_api.client.attempt import RemoteAttempt, RemotePrepared, reached
from forgeyard_api.client.calls import Calls, connected
from forgeyard_api.serve.attempt_types import OnClientDeath, Wanted
from forgeyard_api.serve.life import Attached
from forgeyard_api.serve.requests import request_from
from forgeyard_api.wire.convert import from_message
from forgeyard_api.wire.errors import error_of
from forgeyard_api.wire.messages import executor as wire
from forgeyard_executor.images import AS_USUAL, ImageOptions
from forgeyard_executor.interface import JobOptions
from forgeyard_executor.recovery import SandboxInfo, ServiceInfo
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.live import LiveContainer, LiveUsage
from forgeyard_model.plan import Bundle
from forgeyard_runtimes.shielding import shielded

if TYPE_CHECKING:
    from forgeyard_executor.interface import PreparedAttempt, RunningAttempt

PREPARE_SECONDS: Final = 60.0
RECONNECT_SECONDS: Final = 30.0
DEFAULT_TARGET: Final = "unix:/run/forgeyard/executor.sock"


class RemoteExecutor:
    """Runs jobs at a server. Use ``async with RemoteExecutor.connect() as executor``.

    :param on_client_death: what becomes of attempts when this process dies.
    :param lease: seconds within which each attempt has to be renewed; None: none has to be.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        runtime: str = "",
        reconnect: float = RECONNECT_SECONDS,
        on_client_death: OnClientDeath = OnClientDeath.CANCEL,
    ) -> None:
        self._calls = calls
        self._runtime = runtime
        self._reconnect = reconnect
        self._on_client_death = on_client_death

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        target: str = DEFAULT_TARGET,
        *,
        runtime: str = "",
        reconnect: float = RECONNECT_SECONDS,
        on_client_death: OnClientDeath = OnClientDeath.CANCEL,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> AsyncIterator[Self]:
        """Connect when first needed; disconnect at the end of the block, which ends no attempt.

        :param target: as gRPC has it: ``unix:/PATH``, or ``HOST:PORT`` with `credentials`.
        :param runtime: which of the server's runtimes; empty is its first.
        :param reconnect: seconds for which a server that restarts is waited for.
        """
        async with connected(target, reconnect=reconnect, credentials=credentials) as calls:
            yield cls(calls, runtime=runtime, reconnect=reconnect, on_client_death=on_client_death)

    @property
    def calls(self) -> Calls:
        """The connection, for calls that are no executor's: those of the command line."""
        return self._calls

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What the server's host really provides."""
        request = wire.CapabilitiesRequest(renew=renew, runtime=self._runtime)
        answer = await self._calls.call("Capabilities", request, seconds=PREPARE_SECONDS)
        return from_message(ExecutorCapabilities, answer.capabilities)

    async def watch_capabilities(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """The same, and again whenever it changes. Never ends by itself.

        :raises ForgeyardError: the connection broke.
        """
        request = wire.WatchCapabilitiesRequest(runtime=self._runtime)
        async with aclosing(self._calls.stream("WatchCapabilities", request)) as answers:
            async for answer in answers:
                yield from_message(ExecutorCapabilities, answer.capabilities)

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
    ) -> RemotePrepared:
        """Plan, check and make everything that `job` needs, up to the container itself.

        :raises ForgeyardError: nothing is left behind.
        """
        if images.lock is not None or images.frozen:
            raise InvalidRequest("lock", images.lock, "a lock is read by the caller: pin the images before")
        if deadline is not None and deadline.utcoffset() is None:  # the wire has no other times than UTC's
            raise InvalidRequest("deadline", deadline, "give it a time zone, such as datetime.UTC")
        wanted = Wanted(
            attempt_id=attempt_id or f"local-{SandboxId.mint()}",
            job=job,
            tenant=tenant,
            labels=labels,
            source=_absolute(source),
            output=_absolute(output),
            deadline=deadline,
            trusted=trusted,
            runtime=self._runtime,
            pull="" if images.pull == AS_USUAL.pull else images.pull,
            on_client_death=self._on_client_death,
        )
        context = AttemptContext(wanted.attempt_id, tenant, labels=labels, deadline=deadline, trusted=trusted)
        try:
            await self._calls.call("Prepare", request_from(wanted), seconds=PREPARE_SECONDS)
            return await self.until_prepared(context)
        except asyncio.CancelledError:
            await self.abandoned(wanted.attempt_id)
            raise

    async def until_prepared(self, context: AttemptContext) -> RemotePrepared:
        """An attempt that the server was asked to prepare, once it is.

        :raises ForgeyardError: it could not be, and the server has forgotten it.
        """
        attempt = await reached(self._calls, context.attempt_id, wire.ATTEMPT_STATE_PREPARED)
        if attempt.HasField("error"):
            await self.forget(context.attempt_id)
            raise error_of(attempt.error)
        return _prepared(attempt, context)

    async def abandoned(self, attempt_id: str) -> None:
        """Nobody waits any more for that attempt to be prepared."""
        await shielded(self.forget(attempt_id))

    async def start(self, prepared: PreparedAttempt) -> RemoteAttempt:
        """Start a prepared attempt and its steps.

        :raises ForgeyardError: everything made for the attempt is undone.
        """
        attempt_id = prepared.context.attempt_id
        await self._calls.call("Start", wire.StartRequest(attempt_id=attempt_id))
        attempt = await reached(self._calls, attempt_id, wire.ATTEMPT_STATE_RUNNING)
        if attempt.HasField("error"):
            await self.forget(attempt_id)
            raise error_of(attempt.error)
        return self._running(attempt)

    async def discard(self, prepared: PreparedAttempt) -> None:
        """Undo a prepared attempt that will not be started. Repeating it is no error."""
        await self.forget(prepared.context.attempt_id)

    async def close_execution(self, execution: RunningAttempt) -> None:
        """Cancel it if it still runs, wait for its end and drop its output. Repeating it is no error."""
        await execution.drop_output()

    @asynccontextmanager
    async def run(
        self,
        job: Job,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[RemoteAttempt]:
        """Prepare and start `job`; leaving the block cancels what still runs, then cleans."""
        prepared = await self.prepare_job(job, **options)
        running = await self.start(prepared)
        try:
            yield running
        finally:
            await self.close_execution(running)

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """The caller's attempts that are there, oldest first."""
        answer = await self._calls.call("ListSandboxes", wire.ListSandboxesRequest())
        return tuple(
            _info(attempt) for attempt in answer.attempts if attempt.sandbox_id and not attempt.HasField("finished_at")
        )

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """The containers of an attempt, its job's first."""
        answer = await self._calls.call("Inspect", wire.InspectRequest(attempt_id=sandbox_id))
        return tuple(_container(container) for container in answer.containers)

    async def attach(self, attempt_id: str) -> Attached | None:
        """The attempt of that name; None: the server knows of none.

        :raises ForgeyardError: it can't be asked.
        """
        try:
            request = wire.WaitRequest(attempt_id=attempt_id, until=wire.ATTEMPT_STATE_QUEUED)
            attempt: wire.Attempt = (await self._calls.call("Wait", request)).attempt
        except ExecutorError as error:
            if error.reason == "no_such_attempt":
                return None
            raise
        if attempt.HasField("error"):
            return Attached(self, error=error_of(attempt.error))
        if attempt.state >= wire.ATTEMPT_STATE_RUNNING:
            return Attached(self, running=self._running(attempt))
        if attempt.state == wire.ATTEMPT_STATE_PREPARED:
            return Attached(self, prepared=_prepared(attempt, AttemptContext(attempt_id, attempt.tenant)))
        context = AttemptContext(attempt_id, attempt.tenant)
        return Attached(self, preparing=lambda: self.until_prepared(context))

    def _running(self, attempt: wire.Attempt) -> RemoteAttempt:
        return RemoteAttempt(self._calls, attempt.attempt_id, attempt.sandbox_id, reconnect=self._reconnect)

    async def forget(self, attempt_id: str) -> None:
        """End it if it has not ended, and drop what the server has of it. One that is not there is no error."""
        await self._calls.call("Cleanup", wire.CleanupRequest(attempt_id=attempt_id), seconds=PREPARE_SECONDS)


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _prepared(attempt: wire.Attempt, context: AttemptContext) -> RemotePrepared:
    return RemotePrepared(SandboxId(attempt.sandbox_id), context, attempt.bundle_digest, tuple(attempt.notes))


def _info(attempt: wire.Attempt) -> SandboxInfo:
    started = attempt.started_at if attempt.HasField("started_at") else attempt.created_at
    return SandboxInfo(
        sandbox_id=attempt.sandbox_id,
        attempt_id=attempt.attempt_id,
        name=attempt.name,
        state="running" if attempt.state == wire.ATTEMPT_STATE_RUNNING else "preparing",
        started_at=started.ToDatetime(tzinfo=UTC),
        pid=None,
        owner=str(attempt.owner_uid),
        services=tuple(ServiceInfo(name, "", None) for name in attempt.services),
    )


def _container(container: wire.Container) -> LiveContainer:
    live = LiveContainer(
        name=container.name,
        container_id=container.container_id,
        sandbox_id=container.sandbox_id,
        state=container.state,
        pid=container.pid or None,
        bundle=Bundle(container.bundle, container.plan_digest, container.bundle_digest),
        rootfs=container.rootfs,
        image=container.image or None,
        address=container.address,
        cgroup=container.cgroup,
    )
    return replace(live, usage=_usage(container.usage)) if container.HasField("usage") else live


def _usage(usage: wire.ContainerUsage) -> LiveUsage:
    def known(name: str) -> int | None:
        return getattr(usage, name) if usage.HasField(name) else None

    return LiveUsage(
        usage.at.ToDatetime(tzinfo=UTC),
        known("cpu_nanoseconds"),
        known("memory_bytes"),
        known("pids"),
        known("disk_bytes"),
    )
