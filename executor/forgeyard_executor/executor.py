"""The executor: prepare, start, run; recovery at open, nothing left at close."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_executor.attempt import Attempt
from forgeyard_executor.execution import Execution
from forgeyard_executor.export import BundleExport
from forgeyard_executor.outputs import check_destination
from forgeyard_executor.planning import Planned, check_isolation, plan_request, process_mode_user
from forgeyard_executor.recovery import RecoveryReport, SandboxInfo, list_sandboxes, recover
from forgeyard_executor.services import HostServices, nofile_ceiling
from forgeyard_executor.sources import canonical_request, split_root_approvals
from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock
from forgeyard_host.processes import process_facts
from forgeyard_host.uids import UidRanges
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job
from forgeyard_model.plan import Bundle, PreparedExecution, RootfsPlan
from forgeyard_model.policy import IsolationLevel
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job
from forgeyard_model.result import CancellationReason
from forgeyard_networks.attach import attach
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.hostroot import HostRootfs
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import OutputPump

if TYPE_CHECKING:
    from forgeyard_oci.image_store import ImageStore

DEFAULT_STATE_DIR: Final = "/var/lib/forgeyard"
_POOL_SIZE: Final = 4


class Executor:
    """Runs jobs on this host. Use ``async with Executor.open() as executor``."""

    def __init__(self, services: HostServices) -> None:
        self._services = services
        self._host_rootfs: dict[tuple[bool, bool], HostRootfs] = {}
        self._images: ImageStore | None = None
        self._prepared: dict[SandboxId, Attempt] = {}
        self._running: dict[SandboxId, Execution] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, state_dir: str | Path = DEFAULT_STATE_DIR, *, runtime: str = "runc") -> AsyncIterator[Executor]:
        """Open the state directory, destroy what a dead executor left there, and be ready.

        :param runtime: name of the OCI runtime: runc, crun.
        :raises ForgeyardError: what this host lacks, with the cure.
        """
        if os.geteuid() != 0:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "not_root",
                "the executor makes mounts, cgroups and user namespaces and needs root",
                resolution="run it as root; the jobs themselves never are",
            )
        paths = StatePaths(Path(os.path.realpath(state_dir)))  # noqa: ASYNC240  once, at open
        paths.make()
        async with AsyncExitStack() as stack:
            services = await _open_services(stack, paths, runtime)
            executor = cls(services)
            await executor.recover()
            stack.push_async_callback(executor._close)
            yield executor

    async def recover(self) -> RecoveryReport:
        """Destroy what executors that are dead left in this state directory. Others' running jobs are left alone."""
        services = self._services
        return await services.in_pool(lambda: recover(services.paths, services.host, services.cgroups))

    async def prepare(self, request: ExecutionRequest) -> PreparedExecution:
        """Plan, check and make everything that `request` needs, up to the container itself.

        :raises InvalidRequest: for a value that can't be used.
        :raises ExecutorError: PREPARE or UNSUPPORTED; nothing is left behind.
        """
        try:
            request = canonical_request(request, self._services.paths.root)
            isolation = check_isolation(request, self._services.runtime.capabilities())
            network = attach(request.network)
            check_destination(request.workspace.output)
            attempt = Attempt(self._services, request, network)
            async with asyncio.timeout(request.timeouts.prepare):
                await attempt.prepare(lambda: self._plan(request, isolation))
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
        workspace = PreparedWorkspace(None if source is None else str(source), None if output is None else str(output))
        prepared = await self.prepare(request_from_job(job, context=context, workspace=workspace))
        execution = await self.start(prepared)
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
        workspace = PreparedWorkspace(None if source is None else str(source))
        request = request_from_job(job, context=AttemptContext("bundle"), workspace=workspace)
        request = canonical_request(request, self._services.paths.root)
        isolation = check_isolation(request, self._services.runtime.capabilities())
        network = attach(request.network)

        def export() -> Bundle:
            rootfs, planned = self._plan(request, isolation)
            return BundleExport(self._services, request, rootfs, planned, network).write(directory)

        return await self._services.in_pool(export)

    def _plan(self, request: ExecutionRequest, isolation: IsolationLevel) -> tuple[RootfsPlan, Planned]:
        if request.spec.image is not None:
            spec = request.spec
            rootfs = self._image_store().prepare(request.spec.image, spec.platform, Path.cwd(), user=spec.user)
        else:
            request, local, opt = split_root_approvals(request)
            if (local, opt) not in self._host_rootfs:
                self._host_rootfs[local, opt] = HostRootfs(self._services.paths.rootfs, local=local, opt=opt)
            rootfs = replace(self._host_rootfs[local, opt].plan(), user=process_mode_user(request.spec.user))
        return rootfs, plan_request(request, rootfs, isolation=isolation, nofile_ceiling=self._services.nofile_ceiling)

    def _image_store(self) -> ImageStore:
        """Opened by the first job with an image, since its models are slow to import."""
        if self._images is None:
            from forgeyard_oci.image_store import ImageStore

            self._images = ImageStore(self._services.paths.images)
            self._images.sweep()
        return self._images

    async def _close(self) -> None:
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


async def _open_services(stack: AsyncExitStack, paths: StatePaths, runtime: str) -> HostServices:
    """Everything that lives as long as the executor; `stack` closes it in reverse."""
    lock = ExecutorLock(str(paths.root), SandboxId.mint().value)
    stack.callback(lock.release)
    cgroups = CgroupHost.detect()
    stack.callback(cgroups.remove_empty, f"/forgeyard/{lock.executor_id}")
    pool = stack.enter_context(ThreadPoolExecutor(_POOL_SIZE, thread_name_prefix="forgeyard"))
    uids = UidRanges(cgroup_host=cgroups)
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
        runtime=await CliRuntime.find(runtime),
        pool=pool,
        own_namespaces=process_facts(os.getpid()).namespaces,
        nofile_ceiling=nofile_ceiling(),
        shim=shim_binary(),
    )
