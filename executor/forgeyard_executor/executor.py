"""The executor: prepare, start, run; recovery at open, nothing left at close."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forgeyard_executor.attempt import Attempt
from forgeyard_executor.attempt_caches import AttemptCaches
from forgeyard_executor.capabilities import PROBE_NAME, conclusive, refuse_missing, with_networks
from forgeyard_executor.capability_cache import CapabilityCache
from forgeyard_executor.config_load import load_config
from forgeyard_executor.execution import Execution
from forgeyard_executor.explain import explain, report_of
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_executor.explain_limits import lowered_notes
from forgeyard_executor.export import BundleExport, refuse_network
from forgeyard_executor.images import AS_USUAL, ImageOptions, Images
from forgeyard_executor.kept import Kept
from forgeyard_executor.networked import is_networked
from forgeyard_executor.networks import Networks
from forgeyard_executor.outputs import check_destination
from forgeyard_executor.planner import Planner
from forgeyard_executor.planning import Planned
from forgeyard_executor.recovery import RecoveryReport, SandboxInfo, list_sandboxes, recover_all
from forgeyard_executor.refusals import prepare_timeout, state_io
from forgeyard_executor.requested import Requested
from forgeyard_executor.services import HostServices, open_services
from forgeyard_executor.state import StatePaths
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.config import OWN_ROOTFS, ExecutorConfig
from forgeyard_model.enforcement import PlanReport
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    FailureClass,
    ForgeyardError,
    InvalidRequest,
    SandboxError,
)
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.live import LiveContainer
from forgeyard_model.plan import Bundle, NetworkAttachment, PreparedExecution, RootfsPlan
from forgeyard_model.policy import IsolationLevel, Need
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job
from forgeyard_model.result import CancellationReason, ExecutionResult
from forgeyard_runtimes.contract import ContainerRuntime
from forgeyard_runtimes.find import RuntimeSettings, open_runtime, state_name
from forgeyard_runtimes.shielding import shielded

if TYPE_CHECKING:
    from forgeyard_executor.capabilities_probe import SandboxSight
    from forgeyard_executor.inspection import Inspection
    from forgeyard_executor.interface import PreparedAttempt, RunningAttempt
    from forgeyard_executor.kept_failures import FailureKeeper
    from forgeyard_networks.pool import PoolMetrics
    from forgeyard_oci.registry.budget import Budget

T = TypeVar("T")


class Executor:
    """Runs jobs on this host. Use ``async with Executor.open() as executor``."""

    def __init__(self, services: HostServices, config: ExecutorConfig, images: Images) -> None:
        self._services = services
        self._config = config
        self._images = images
        self._kept = Kept(services.paths, config, images)
        self._prepared: dict[SandboxId, Attempt] = {}
        self._running: dict[SandboxId, Execution] = {}
        self._networks = Networks(
            config.network,
            str(services.paths.root),
            services.in_pool,
            services.runtime.network_join,
            services.runtime.network_share,
        )
        self._planner = Planner(services, config, images, self._networks)
        self._capabilities = CapabilityCache(self._probe)
        self._failures: FailureKeeper | None = None
        self.recovered = RecoveryReport((), 0, ())
        """What was found and undone when this executor was opened."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        state_dir: str | Path | None = None,
        *,
        runtime: str | None = None,
        config: ExecutorConfig | None = None,
        keep_failed: bool = False,
    ) -> AsyncIterator[Executor]:
        """Open the state directory, destroy what a dead executor left there, and be ready.

        :param state_dir: in the place of the configured one.
        :param runtime: who runs the containers, in the place of the configured one: runc, crun, containerd, podman or
            docker.
        :param config: None reads the host's files and the environment (docs/configuration.md).
        :param keep_failed: keep workspaces of failed attempts for debugging, for as long as the configuration's
            `serve.keep_failed` says; where it says nothing, none is kept.
        :raises ForgeyardError: what this host lacks, with the cure.
        """
        if os.geteuid() != 0:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "not_root",
                "the executor makes mounts, cgroups and user namespaces and needs root",
                resolution="run it as root; the jobs themselves never are",
            )
        config = load_config().config if config is None else config
        paths = StatePaths.at(config.state_dir if state_dir is None else state_dir)
        name = runtime or config.runtime

        def connect(executor_id: str) -> AbstractAsyncContextManager[ContainerRuntime]:
            address = getattr(config.endpoints, name, None)  # a command line has none
            settings = RuntimeSettings(
                executor_id,
                state_name(str(paths.root)),
                address,
                own_rootfs=config.rootfs.of(name) == OWN_ROOTFS,
                images=str(paths.images),
            )
            return open_runtime(name, settings)

        async with AsyncExitStack() as stack:
            services = await open_services(stack, paths, connect, config)
            images = Images(paths, config, whole=services.runtime.images is not None)
            stack.callback(images.close)
            executor = cls(services, config, images)
            executor._failures = executor._kept.failures() if keep_failed else None
            stack.push_async_callback(executor._networks.close)  # whatever becomes of closing the jobs before it
            stack.push_async_callback(executor._close)
            executor.recovered = await recover_all(services, executor._networks, everywhere=False)
            await stack.enter_async_context(executor._kept.retaining())
            await stack.enter_async_context(executor._capabilities.kept_fresh())
            if config.network.pool:
                await executor._networks.open()
            yield executor

    def network_pool(self) -> PoolMetrics | None:
        """What became of networks that were made ahead of time; None while there are none."""
        return self._networks.pool()

    async def recover(self) -> RecoveryReport:
        """Destroy what executors that are dead left in this state directory, and at every engine it was ever used with.

        Others' running jobs are left alone. An engine that does not answer is an error of the report.
        """
        return await recover_all(self._services, self._networks, everywhere=True)

    async def retain(self) -> tuple[str, ...]:
        """Remove what nobody used for as long as the configuration's `retention` says, and nothing that is in use.

        Done by itself when an executor opens, and every hour.

        :returns: what went wrong, a line each.
        """
        return await self._kept.retain()

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What this host really provides, from probes that used each feature not more than 45 seconds ago.

        :param renew: probe now, whatever is known.
        """
        return await self._capabilities.get(renew=renew)

    def watch_capabilities(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """The same, and again whenever it changes: within a minute, or when an attempt fails. Never ends by itself."""
        return self._capabilities.changes()

    async def inspect_sandbox(self) -> SandboxSight:
        """Run the probe's job once and return what it reported from inside its sandbox."""
        from forgeyard_executor.capabilities_probe import look_inside

        return await look_inside(self._run_unchecked)

    async def prepare(self, request: ExecutionRequest, *, images: ImageOptions = AS_USUAL) -> PreparedExecution:
        """Plan, check and make everything that `request` needs, up to the container itself.

        What the latest probes saw missing is refused; they are never waited for. An image is pulled when it is not
        there, within the request's prepare timeout; cancelling ends that at once.

        :param images: how to come by the image. A lock is read by `run`, not here: the request is already pinned.
        :raises InvalidRequest: for a value that can't be used.
        :raises ExecutorError: PREPARE or UNSUPPORTED; nothing is left behind.
        """
        return await self._prepare_configured(Requested(request, images))

    async def _prepare_configured(self, requested: Requested) -> PreparedExecution:
        known = self._capabilities.known()
        try:
            refuse_missing(requested.request, known, self._config)
        except SandboxError as error:
            self._capabilities.doubt()
            raise ExecutorError.prepare(error) from error
        try:
            return await self._prepare(requested, self._planner.facts(conclusive(known), requested.lowered))
        except ExecutorError as error:
            if error.sandbox is not None and error.failure_class is FailureClass.INFRASTRUCTURE:
                self._capabilities.doubt()
            raise

    async def _prepare(self, requested: Requested, facts: HostFacts) -> PreparedExecution:
        pulling = False
        try:
            requested = replace(requested, request=self._planner.canonical(requested.request))
            request = requested.request
            isolation = explain(request, facts).chosen().isolation
            notes = lowered_notes(request, facts)
            self._networks.refuse(request)
            check_destination(request.workspace.output)
            await self._kept.make_room()
            attempt = Attempt(self._services, request, NetworkAttachment(request.network.mode))
            async with asyncio.timeout(request.timeouts.prepare):
                pulling = True
                image, service_images = await self._planner.ready_images(requested)
                pulling = False
                await attempt.prepare(
                    lambda: self._planner.plan(request, isolation, image, notes),
                    image=image,
                    caches=lambda: AttemptCaches.open(self._kept.caches, request),
                    companions=self._planner.companions(request, isolation, service_images),
                )
        except SandboxError as error:
            raise ExecutorError.prepare(error) from error
        except TimeoutError as error:
            raise prepare_timeout(request, pulling=pulling) from error
        except OSError as error:
            raise state_io(error) from error
        self._prepared[attempt.sandbox] = attempt
        return attempt.prepared

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
    ) -> PreparedExecution:
        """As `prepare`, of a job as its author wrote it. Parameters as `run`'s.

        :raises ForgeyardError: as `prepare`.
        """
        attempt_id = attempt_id or f"local-{SandboxId.mint()}"
        context = AttemptContext(attempt_id, tenant, labels=labels, deadline=deadline, trusted=trusted)
        return await self._prepare_configured(
            await self._planner.requested(job, context, source, output, images=images)
        )

    async def start(self, prepared: PreparedAttempt) -> Execution:
        """Start a prepared attempt and its steps.

        :raises ExecutorError: SPAWN_FAILED and the like; everything made for the attempt is undone.
        """
        attempt = self._prepared.pop(prepared.sandbox_id, None)
        if attempt is None:
            raise ExecutorError(
                ExecutorErrorKind.LOST, "not_prepared", f"{prepared.sandbox_id} is not waiting to be started"
            )
        try:
            await attempt.launch()
        except BaseException as error:
            await shielded(attempt.discard())
            if attempt.request.spec.name != PROBE_NAME and isinstance(error, ForgeyardError):
                self._capabilities.doubt()
            if isinstance(error, SandboxError):
                raise ExecutorError.prepare(error) from error
            if isinstance(error, OSError):
                raise state_io(error) from error
            raise
        execution = Execution(attempt, self._failures)
        self._running[attempt.sandbox] = execution
        return execution

    async def discard(self, prepared: PreparedAttempt) -> None:
        """Undo a prepared attempt that will not be started. Repeating it is no error."""
        attempt = self._prepared.pop(prepared.sandbox_id, None)
        if attempt is not None:
            await shielded(attempt.discard())

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
    ) -> AsyncIterator[Execution]:
        """Prepare and start `job`; leaving the block cancels what still runs, then cleans.

        :param source: tree that appears at /work/source, as the profile's or the job's source mode has it.
        :param output: absent or empty directory for what the job leaves in /work/output.
        :param attempt_id, labels: the caller's own names for the attempt; data only.
        :param deadline: an absolute end, with a time zone, that caps the job's own timeout.
        :param tenant, trusted: whose job it is, and whether it may change what others read: see docs/caches.md.
        :param images: how to come by the job's image: when to pull it, whom to tell, which lock pins its tag.
        """
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
        execution = await self.start(prepared)
        try:
            yield execution
        finally:
            await shielded(self.close_execution(execution))

    async def close_execution(self, execution: RunningAttempt) -> None:
        """Cancel it if it still runs, wait for its end and drop its output. Repeating it is no error."""
        if self._running.get(SandboxId(execution.sandbox_id)) is not execution:
            return
        await execution.cancel(CancellationReason.USER)
        await execution.wait()
        await execution.drop_output()
        self._running.pop(SandboxId(execution.sandbox_id), None)

    def list_sandboxes(self) -> tuple[SandboxInfo, ...]:
        """The attempts in this executor's state directory, other executors' included."""
        return list_sandboxes(self._services.paths.root)

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """As `list_sandboxes`, without holding up the event loop, and without the probes' own."""
        found = await self._services.in_pool(self.list_sandboxes)
        return tuple(info for info in found if info.name != PROBE_NAME)

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """The containers of an attempt of this executor at this moment, its job's first.

        :raises ExecutorError: LOST, when it has none of that id.
        """
        from forgeyard_executor.live import containers_of

        sandbox = SandboxId(sandbox_id)
        execution = self._running.get(sandbox)
        attempt = self._prepared.get(sandbox) if execution is None else execution.attempt
        if attempt is None:
            raise ExecutorError(ExecutorErrorKind.LOST, "no_such_attempt", f"no attempt {sandbox_id} is here")
        return await self._services.in_pool(lambda: containers_of(attempt, running=execution is not None))

    async def generate_bundle(
        self, job: Job, directory: Path, *, source: str | Path | None = None, images: ImageOptions = AS_USUAL
    ) -> Bundle:
        """Write the bundle of `job` into `directory`, complete, so that `runc run -b directory ID` runs it.

        :raises ForgeyardError: as `prepare`; the directory is then left as it was.
        """
        if job.caches:
            raise InvalidRequest("caches", job.caches[0].key, "a generated bundle stands by itself: take caches out")
        requested = await self._planner.requested(job, AttemptContext("bundle"), source, images=images)
        requested = replace(requested, request=self._planner.canonical(requested.request))
        request = requested.request
        isolation = explain(request, self._planner.facts(None, requested.lowered)).chosen().isolation
        refuse_network(request)

        def export(budget: Budget | None) -> Bundle:
            with self._planner.held(requested.image, requested, budget) as image:
                # Whoever runs it by hand has no daemon between: its user namespace is its own.
                rootfs, planned = self._planner.plan(request, isolation, image, user_namespace=True)
                return BundleExport(self._services, request, rootfs, planned).write(directory)

        return await self._planner.blocking(requested, export)

    async def inspect_applied(
        self, job: Job, *, source: str | Path | None = None, images: ImageOptions = AS_USUAL
    ) -> Inspection:
        """What the runtime really applies to `job`, from containers that are started as far as their gate and removed.

        Not a byte of the workload runs.

        :raises ForgeyardError: as `prepare` and `start`; nothing is left behind.
        """
        from forgeyard_executor.inspection import inspect_attempt

        context = AttemptContext(f"local-{SandboxId.mint()}")
        requested = await self._planner.requested(job, context, source, images=images)
        # Whatever the probes saw missing: it is what one wants to see here.
        prepared = await self._prepare(requested, self._planner.facts(None, requested.lowered))
        return await inspect_attempt(self._services, self._prepared.pop(prepared.sandbox_id))

    async def plan(self, job: Job, *, source: str | Path | None = None, images: ImageOptions = AS_USUAL) -> PlanReport:
        """What this host would make of `job`, field by field; `run` refuses exactly what this refuses.

        An image is pulled and unpacked as `run` does it, since what it says of its user and platform decides as well.
        With ``pull="never"`` one that is not there is refused, as `run` then refuses it.

        :raises InvalidRequest: for a value that no host could use.
        """
        requested = await self._planner.requested(job, AttemptContext("plan"), source, images=images)
        requested = replace(requested, request=self._planner.canonical(requested.request))
        known = await self.capabilities()
        if is_networked(requested.request):
            await self._networks.capabilities()
        facts = self._planner.facts(known, requested.lowered)

        def report(budget: Budget | None) -> PlanReport:
            def plan(request: ExecutionRequest, isolation: IsolationLevel) -> tuple[RootfsPlan, Planned]:
                self._networks.refuse(request)
                for service in request.spec.services:
                    with self._planner.held(requested.service_images.get(service.name), requested, budget) as image:
                        self._planner.plan_service(request, service, isolation, image)
                with self._planner.held(requested.image, requested, budget) as image:
                    return self._planner.plan(request, isolation, image)

            return report_of(requested.request, facts, plan)

        return await self._planner.blocking(requested, report)

    async def _probe(self) -> ExecutorCapabilities:
        # Imported when first needed: a single `forgeyard run` never probes.
        from forgeyard_executor.capabilities_probe import probe_host

        found, networks = await asyncio.gather(
            probe_host(self._services, self._run_unchecked), self._networks.capabilities()
        )
        return with_networks(found, networks)

    async def _run_unchecked(self, job: Job) -> tuple[ExecutionResult, bytes]:
        """Run a job of our own whatever the probes say, for the probes; its result and its stdout."""
        context = AttemptContext(f"local-{SandboxId.mint()}")
        request = request_from_job(job, context=context, workspace=PreparedWorkspace())
        # What the organisation demands of jobs is no reason not to look, nor is what the profile does.
        anything = ExecutorConfig(user_namespace=Need.PREFERRED)
        facts = HostFacts((self._services.runtime.capabilities(),), self._services.nofile_ceiling, anything)
        execution = await self.start(await self._prepare(Requested(request), facts))
        try:
            out = b"".join([chunk.data async for chunk in execution.output() if chunk.stream == "stdout"])
            return await execution.wait(), out
        finally:
            await shielded(self.close_execution(execution))

    async def _close(self) -> None:
        await shielded(self._capabilities.close())
        for execution in list(self._running.values()):
            await execution.cancel(CancellationReason.SHUTDOWN, kill=True)
            await shielded(self.close_execution(execution))
        for attempt in list(self._prepared.values()):
            await shielded(attempt.discard())
        self._prepared.clear()
