"""What a program that runs jobs needs of an executor: the one in this process, one behind a socket, or a pretended one.

:class:`forgeyard_executor.Executor`, ``forgeyard_api.client.RemoteExecutor`` and
``forgeyard_executor.testing.FakeExecutor`` are such, and nothing that is written against this can tell them apart.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

from forgeyard_executor.images import AS_USUAL, ImageOptions
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import EMPTY, Job, Step
from forgeyard_model.live import LiveContainer
from forgeyard_model.result import CancellationReason, ExecutionResult, StepResult
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark

if TYPE_CHECKING:
    from forgeyard_executor.recovery import SandboxInfo


class RunningAttempt(Protocol):
    """A started attempt. Every method may be called often, by any number of callers at once."""

    @property
    def sandbox_id(self) -> str:
        """Its name on the host."""

    async def wait(self) -> ExecutionResult:
        """The result, once nothing of the attempt is left on the host. Cancelling the waiter leaves it alone."""

    async def cancel(self, reason: CancellationReason = CancellationReason.USER, *, kill: bool = False) -> None:
        """Ask the job to stop: soft signal, grace, kill; with `kill` without grace. Returns at once."""

    async def exec(self, step: Step) -> StepResult:
        """Run one more step in an attempt that was started without steps.

        :raises ExecutorError: LOST, when it has ended.
        :raises InvalidRequest: for a step the kernel would refuse.
        """

    def finish(self) -> None:
        """Say that no further `exec` comes."""

    def output(self, *, after: SpoolMark = START, follow: bool = True) -> AsyncGenerator[OutputChunk, None]:
        """The job's output as it comes, until its end. `after` is where to resume: what a reader has of each stream.

        With `follow` False only what is there now.
        """

    def service_output(
        self, name: str, *, after: SpoolMark = START, follow: bool = True
    ) -> AsyncGenerator[OutputChunk, None]:
        """The same of a service.

        :raises InvalidRequest: the job has no such service.
        """

    async def drop_output(self) -> None:
        """Delete the spooled output. Only after the end, when no reader wants it any more."""


class PreparedAttempt(Protocol):
    """Everything is made up to the container itself."""

    @property
    def sandbox_id(self) -> SandboxId:
        """Its name on the host."""

    @property
    def context(self) -> AttemptContext:
        """Its caller's names for it."""

    @property
    def bundle_digest(self) -> str:
        """Of its compiled bundle, as ``sha256:…``."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of it."""


class JobOptions(TypedDict, total=False):
    """What `run` and `prepare_job` take beside the job, by name."""

    source: str | Path | None
    output: str | Path | None
    attempt_id: str | None
    labels: Mapping[str, str]
    deadline: datetime | None
    tenant: str
    trusted: bool
    images: ImageOptions


class JobExecutor(Protocol):
    """Runs jobs. See the module's text for who does."""

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What the host really provides, from probes."""

    def watch_capabilities(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """The same, and again whenever it changes. Never ends by itself."""

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
    ) -> PreparedAttempt:
        """Plan, check and make everything that `job` needs, up to the container itself. Parameters as `run`'s.

        :raises ForgeyardError: nothing is left behind.
        """

    async def start(self, prepared: PreparedAttempt) -> RunningAttempt:
        """Start a prepared attempt and its steps.

        :raises ForgeyardError: everything made for the attempt is undone.
        """

    async def discard(self, prepared: PreparedAttempt) -> None:
        """Undo a prepared attempt that will not be started. Repeating it is no error."""

    async def close_execution(self, execution: RunningAttempt) -> None:
        """Cancel it if it still runs, wait for its end and drop its output. Repeating it is no error."""

    def run(
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
    ) -> AbstractAsyncContextManager[RunningAttempt]:
        """Prepare and start `job`; leaving the block cancels what still runs, then cleans."""

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """The attempts that are there, oldest first."""

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """The containers of an attempt of this executor, its job's first.

        :raises ExecutorError: LOST, when it has none of that id.
        """
