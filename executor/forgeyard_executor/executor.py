"""The executor: prepare, start, run; recovery at open, nothing left at close."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_executor.attempt import Attempt
from forgeyard_executor.capabilities import PROBE_NAME, CapabilityCache, conclusive, refuse_missing
from forgeyard_executor.config_apply import canonical_image, configured_job
from forgeyard_executor.config_load import load_config
from forgeyard_executor.execution import Execution
from forgeyard_executor.explain import explain, report_of
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_executor.explain_limits import lowered_notes
from forgeyard_executor.export import BundleExport
from forgeyard_executor.outputs import check_destination
from forgeyard_executor.planning import Planned, plan_request, process_mode_user
from forgeyard_executor.recovery import RecoveryReport, SandboxInfo, list_sandboxes, recover
from forgeyard_executor.services import HostServices, nofile_ceiling
from forgeyard_executor.sources import canonical_request, split_root_approvals
from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock
from forgeyard_host.processes import process_facts
from forgeyard_host.uids import DEFAULT_BASE, DEFAULT_SIZE, UidRanges
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.config import ExecutorConfig, UidBlock
from forgeyard_model.enforcement import PlanReport
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, ForgeyardError, SandboxError
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job
from forgeyard_model.plan import Bundle, PreparedExecution, RootfsPlan
from forgeyard_model.policy import IsolationLevel
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job
from forgeyard_model.result import CancellationReason, ExecutionResult
from forgeyard_networks.attach import attach
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.hostroot import HostRootfs
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import OutputPump

if TYPE_CHECKING:
    from forgeyard_executor.capabilities_probe import SandboxSight
    from forgeyard_oci.image_store import ImageStore

_POOL_SIZE: Final = 4


class Executor:
    """Runs jobs on this host. Use ``async with Executor.open() as executor``."""

    def __init__(self, services: HostServices, config: ExecutorConfig) -> None:
        self._services = services
        self._config = config
        self._host_rootfs: dict[tuple[bool, bool], HostRootfs] = {}
        self._images: ImageStore | None = None
        self._prepared: dict[SandboxId, Attempt] = {}
        self._running: dict[SandboxId, Execution] = {}
        self._capabilities = CapabilityCache(self._probe)
        self.recovered = RecoveryReport((), 0, ())
        """What was found and undone when this executor was opened."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, state_dir: str | Path | None = None, *, runtime: str | None = None, config: ExecutorConfig | None = None
    ) -> AsyncIterator[Executor]:
        """Open the state directory, destroy what a dead executor left there, and be ready.

        :param state_dir: in the place of the configured one.
        :param runtime: name of the OCI runtime, runc or crun, in the place of the configured one.
        :param config: None reads the host's files and the environment (docs/configuration.md).
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
        found = await CliRuntime.find(runtime or config.runtime)
        paths.make()
        async with AsyncExitStack() as stack:
            services = await _open_services(stack, paths, found, config)
            executor = cls(services, config)
            executor.recovered = await executor.recover()
            stack.push_async_callback(executor._close)
            yield executor

    async def recover(self) -> RecoveryReport:
        """Destroy what executors that are dead left in this state directory. Others' running jobs are left alone."""
        services = self._services
        return await services.in_pool(lambda: recover(services.paths, services.host, services.cgroups))

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What this host really provides, from probes that used each feature not more than 45 seconds ago.

        :param renew: probe now, whatever is known.
        """
        return await self._capabilities.get(renew=renew)

    async def inspect_sandbox(self) -> SandboxSight:
        """Run the probe's job once and return what it reported from inside its sandbox."""
        from forgeyard_executor.capabilities_probe import look_inside

        return await look_inside(self._run_unchecked)

    async def prepare(self, request: ExecutionRequest) -> PreparedExecution:
        """Plan, check and make everything that `request` needs, up to the container itself.

        What the latest probes saw missing is refused; they are never waited for.

        :raises InvalidRequest: for a value that can't be used.
        :raises ExecutorError: PREPARE or UNSUPPORTED; nothing is left behind.
        """
        return await self._prepare_configured(request, {})

    async def _prepare_configured(
        self, request: ExecutionRequest, lowered: Mapping[str, float | None]
    ) -> PreparedExecution:
        known = self._capabilities.known()
        try:
            refuse_missing(request, known)
        except SandboxError as error:
            self._capabilities.doubt()
            raise ExecutorError.prepare(error) from error
        try:
            return await self._prepare(request, self._facts(conclusive(known), lowered))
        except ExecutorError as error:
            if error.sandbox is not None and error.failure_class is FailureClass.INFRASTRUCTURE:
                self._capabilities.doubt()
            raise

    async def _prepare(self, request: ExecutionRequest, facts: HostFacts) -> PreparedExecution:
        try:
            request = self._canonical(request)
            isolation = explain(request, facts).chosen().isolation
            notes = lowered_notes(request, facts)
            network = attach(request.network)
            check_destination(request.workspace.output)
            attempt = Attempt(self._services, request, network)
            async with asyncio.timeout(request.timeouts.prepare):
                await attempt.prepare(lambda: self._plan(request, isolation, notes))
        except SandboxError as error:
            raise ExecutorError.prepare(error) from error
        except TimeoutError as error:
            raise ExecutorError(
                ExecutorErrorKind.TIMEOUT,
                "prepare_timeout",
                f"prepare_timeout of {request.timeouts.prepare:g}s expired",
            ) from error
        except OSError as error:
            raise _state_io(error) from error
        self._prepared[attempt.sandbox] = attempt
        return attempt.prepared

    async def start(self, prepared: PreparedExecution) -> Execution:
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
                raise _state_io(error) from error
            raise
        execution = Execution(attempt)
        self._running[attempt.sandbox] = execution
        return execution

    async def discard(self, prepared: PreparedExecution) -> None:
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
        deadline: datetime | None = None,
    ) -> AsyncIterator[Execution]:
        """Prepare and start `job`; leaving the block cancels what still runs, then cleans.

        :param source: tree that appears at /work/source, as the profile's or the job's source mode has it.
        :param output: absent or empty directory for what the job leaves in /work/output.
        :param attempt_id: the caller's own name for the attempt; data only.
        :param deadline: an absolute end, with a time zone, that caps the job's own timeout.
        """
        context = AttemptContext(attempt_id or f"local-{SandboxId.mint()}", deadline=deadline)
        request, lowered = self._requested(job, context, source, output)
        execution = await self.start(await self._prepare_configured(request, lowered))
        try:
            yield execution
        finally:
            await shielded(self.close_execution(execution))

    async def close_execution(self, execution: Execution) -> None:
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

    async def generate_bundle(self, job: Job, directory: Path, *, source: str | Path | None = None) -> Bundle:
        """Write the bundle of `job` into `directory`, complete, so that `runc run -b directory ID` runs it.

        :raises ForgeyardError: as `prepare`; the directory is then left as it was.
        """
        request, lowered = self._requested(job, AttemptContext("bundle"), source)
        request = self._canonical(request)
        isolation = explain(request, self._facts(None, lowered)).chosen().isolation
        network = attach(request.network)

        def export() -> Bundle:
            rootfs, planned = self._plan(request, isolation)
            return BundleExport(self._services, request, rootfs, planned, network).write(directory)

        return await self._services.in_pool(export)

    async def plan(self, job: Job, *, source: str | Path | None = None) -> PlanReport:
        """What this host would make of `job`, field by field; `run` refuses exactly what this refuses.

        An image is unpacked into the cache, since what it says of its user and platform decides as well.

        :raises InvalidRequest: for a value that no host could use.
        """
        request, lowered = self._requested(job, AttemptContext("plan"), source)
        request = self._canonical(request)
        facts = self._facts(await self.capabilities(), lowered)
        return await self._services.in_pool(lambda: report_of(request, facts, self._plan))

    def _requested(
        self, job: Job, context: AttemptContext, source: str | Path | None, output: str | Path | None = None
    ) -> tuple[ExecutionRequest, Mapping[str, float | None]]:
        """`job` under this executor's configuration, and the profile defaults that its maximum cut down."""
        workspace = PreparedWorkspace(None if source is None else str(source), None if output is None else str(output))
        configured = configured_job(job, self._config)
        return request_from_job(configured.job, context=context, workspace=workspace), configured.lowered

    def _canonical(self, request: ExecutionRequest) -> ExecutionRequest:
        return canonical_image(canonical_request(request, self._services.paths.root), self._config)

    def _facts(self, known: ExecutorCapabilities | None, lowered: Mapping[str, float | None]) -> HostFacts:
        """What requests are judged by: the probes' findings, or the adapter's claims while there are none."""
        backend = known or self._services.runtime.capabilities()
        return HostFacts((backend,), self._services.nofile_ceiling, self._config, lowered=lowered)

    def _plan(
        self, request: ExecutionRequest, isolation: IsolationLevel, notes: tuple[str, ...] = ()
    ) -> tuple[RootfsPlan, Planned]:
        if request.spec.image is not None:
            spec = request.spec
            rootfs = self._image_store().prepare(request.spec.image, spec.platform, Path.cwd(), user=spec.user)
        else:
            request, local, opt = split_root_approvals(request)
            if (local, opt) not in self._host_rootfs:
                self._host_rootfs[local, opt] = HostRootfs(self._services.paths.rootfs, local=local, opt=opt)
            rootfs = replace(self._host_rootfs[local, opt].plan(), user=process_mode_user(request.spec.user))
        ceiling = self._services.nofile_ceiling
        planned = plan_request(request, rootfs, isolation=isolation, nofile_ceiling=ceiling)
        return rootfs, replace(planned, notes=(*notes, *planned.notes))

    def _image_store(self) -> ImageStore:
        """Opened by the first job with an image, since its models are slow to import."""
        if self._images is None:
            from forgeyard_oci.image_store import ImageStore

            self._images = ImageStore(self._services.paths.images)
            self._images.sweep()
        return self._images

    async def _probe(self) -> ExecutorCapabilities:
        # Imported when first needed: a single `forgeyard run` never probes.
        from forgeyard_executor.capabilities_probe import probe_host

        return await probe_host(self._services, self._run_unchecked)

    async def _run_unchecked(self, job: Job) -> tuple[ExecutionResult, bytes]:
        """Run a job of our own whatever the probes say, for the probes; its result and its stdout."""
        context = AttemptContext(f"local-{SandboxId.mint()}")
        request = request_from_job(job, context=context, workspace=PreparedWorkspace())
        # What the organisation demands of jobs is no reason not to look.
        facts = HostFacts((self._services.runtime.capabilities(),), self._services.nofile_ceiling)
        execution = await self.start(await self._prepare(request, facts))
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


def _state_io(error: OSError) -> ExecutorError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "no_space" if full else "state_directory",
        "the state directory can't be written",
        details=str(error),
        resolution="free space in its file system, or name another with --state-dir",
    )


async def _open_services(
    stack: AsyncExitStack, paths: StatePaths, runtime: CliRuntime, config: ExecutorConfig
) -> HostServices:
    """Everything that lives as long as the executor; `stack` closes it in reverse."""
    lock = ExecutorLock(str(paths.root), SandboxId.mint().value)
    stack.callback(lock.release)
    cgroups = CgroupHost.detect()
    stack.callback(cgroups.remove_empty, f"/forgeyard/{lock.executor_id}")
    pool = stack.enter_context(ThreadPoolExecutor(_POOL_SIZE, thread_name_prefix="forgeyard"))
    block = config.uid_block or UidBlock(DEFAULT_BASE, DEFAULT_SIZE)
    uids = UidRanges(block.base, block.size, cgroup_host=cgroups)
    stack.callback(uids.close)
    host = Host(str(paths.root), uid_block=uids.block)
    stack.callback(host.close)
    pump = OutputPump()
    stack.callback(pump.close)
    return HostServices(
        executor_id=lock.executor_id,
        paths=paths,
        host=host,
        cgroups=cgroups,
        uids=uids,
        pump=pump,
        runtime=runtime,
        pool=pool,
        own_namespaces=process_facts(os.getpid()).namespaces,
        nofile_ceiling=nofile_ceiling(),
        shim=shim_binary(),
    )
