"""One attempt on this host: everything made for it, in the order made, and its undoing in reverse."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from forgeyard_executor.disk import DiskWatch
from forgeyard_executor.outputs import collect
from forgeyard_executor.planning import UID_COUNT, Planned
from forgeyard_executor.services import HostServices
from forgeyard_executor.shielding import shielded
from forgeyard_executor.steps import ResolvedStep, exec_failure
from forgeyard_host.cgroups import AttemptCgroup
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import SandboxPlaced, SandboxSetup
from forgeyard_host.recovery import undo
from forgeyard_host.uids import UidLease
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import NetworkAttachment, Placement, PreparedExecution, RootfsPlan
from forgeyard_model.request import ExecutionRequest, impurities
from forgeyard_model.result import (
    CollectedOutput,
    Evidence,
    ProcessExit,
    Provenance,
    ResourceUsage,
    StepResult,
)
from forgeyard_oci.spec import compile_bundle
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.hostroot import hosts_file
from forgeyard_process_shim.protocol import Exited, NoExec, Started, StepCommand
from forgeyard_runtimes.container import LEAF, ContainerParts, JobContainer
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.spool import Spool

log: Final = logging.getLogger("forgeyard.executor")

CLEANUP_DEADLINE: Final = 60.0
"""Seconds. Cleanup runs on a clock of its own, whatever ended the job."""


@dataclass(slots=True)
class Held:
    """What an attempt holds on the host; filled while it is prepared, emptied in reverse."""

    ledger: Ledger | None = None
    lease: UidLease | None = None
    cgroup: AttemptCgroup | None = None
    placed: SandboxPlaced | None = None
    channel: ShimChannel | None = None
    spool: Spool | None = None
    container: JobContainer | None = None


class Attempt:
    """One attempt from prepare to the last trace of it. The executor orders, this object holds."""

    def __init__(
        self,
        services: HostServices,
        request: ExecutionRequest,
        rootfs: RootfsPlan,
        planned: Planned,
        network: NetworkAttachment,
    ) -> None:
        self.sandbox = SandboxId.mint()
        self.request = request
        self.rootfs = rootfs
        self.planned = planned
        self.phases: dict[str, float] = {}
        self._services = services
        self._network = network
        self._held = Held()
        self._directory = services.paths.attempt(self.sandbox)
        self._prepared: PreparedExecution | None = None
        self._disk = DiskWatch(services.host, str(self._directory), request.limits.disk)
        self._scripts: dict[int, str] = {}

    @property
    def prepared(self) -> PreparedExecution:
        """The validated plan."""
        assert self._prepared is not None, "prepare comes first"  # noqa: S101  order is our own code's
        return self._prepared

    # ---- prepare

    async def prepare(self) -> None:
        """Make everything the container needs. A failure leaves nothing behind.

        :raises ForgeyardError: what could not be made.
        """
        clock = time.monotonic()
        try:
            # To its end even when cancelled: cleaning up beside a thread that still makes things would race it.
            await shielded(self._services.in_pool(self._prepare))
        except BaseException:
            await shielded(self.discard())
            raise
        self._note_phase("setup", time.monotonic() - clock)

    def _prepare(self) -> None:
        services, held = self._services, self._held
        held.ledger = ledger = Ledger.open(str(services.paths.root), self.sandbox, services.executor_id)
        ledger.intend("attempt", attempt=self.request.context.attempt_id, name=self.request.spec.name)
        services.host.create_directory(self.sandbox, ledger)
        group = f"/forgeyard/{services.executor_id}/{self.sandbox}"
        held.lease = services.uids.acquire(self.sandbox.value, services.executor_id, cgroup=group)
        ledger.intend("uid_range", lock_file=held.lease.lock_file)
        ledger.intend("cgroup", path=group)
        held.cgroup = AttemptCgroup.create(services.cgroups, group)
        held.placed = services.host.setup(self._setup_request(held.lease.base), ledger)
        hosts = self._directory / "hosts"
        hosts.write_text(hosts_file(self.sandbox.hostname))
        user = self.planned.plan.user
        held.channel = ShimChannel.create(
            self._directory / "ctl", shim=services.shim, uid=held.lease.base + user.uid, gid=held.lease.base + user.gid
        )
        self._write_scripts(held.channel)
        held.spool = Spool.create(
            services.paths.spool(services.executor_id, self.sandbox), services.pump, self.request.output_cap
        )
        self._compile(held.lease.base, held.cgroup, held.placed)

    def _setup_request(self, uid_base: int) -> SandboxSetup:
        user = self.planned.plan.user
        return SandboxSetup(
            sandbox=self.sandbox,
            directory=str(self._directory),
            uid_base=uid_base,
            uid_count=UID_COUNT,
            job_uid=user.uid,
            job_gid=user.gid,
            binds=self.planned.binds,
            overlays=self.planned.overlays,
            scratch=self.planned.scratch,
            disk_limit=self.request.limits.disk,
        )

    def _write_scripts(self, channel: ShimChannel) -> None:
        """Beforehand, so that a disk that the job fills can't turn its own failure into ours."""
        for index, resolved in enumerate(self.planned.steps):
            if resolved.step.script is not None:
                self._scripts[index] = channel.write_script(f"step-{index}", resolved.step.script)

    def _compile(self, base: int, cgroup: AttemptCgroup, placed: SandboxPlaced) -> None:
        planned = self.planned
        sources = {slot: str(self._directory / name) for slot, name in planned.attempt_files.items()}
        sources |= {**planned.host_sources, **placed.sources}
        placement = Placement(
            sandbox=self.sandbox,
            rootfs=sources.pop("rootfs"),
            sources=sources,
            uid_base=base,
            uid_count=UID_COUNT,
            cgroup=cgroup.leaf(LEAF),
            netns=self._network.netns,
            argv=ShimChannel.argv,
        )
        self._prepared = PreparedExecution(
            sandbox_id=self.sandbox,
            context=self.request.context,
            plan=planned.plan,
            placement=placement,
            bundle=compile_bundle(planned.plan, placement, machine=platform.machine()),
            filesystem=self.request.sandbox.filesystem,
            resource_limits=self.request.limits,
            notes=(*planned.notes, *placed.notes),
        )

    # ---- run

    async def launch(self) -> None:
        """Start the container up to the open gate.

        :raises ForgeyardError: the attempt must then be cleaned up.
        """
        held, services = self._held, self._services
        assert held.channel and held.spool and held.cgroup and held.ledger  # noqa: S101  prepare made them
        held.ledger.intend("container", runtime_root=str(self._directory / "runtime"))
        held.container = JobContainer(
            ContainerParts(
                runtime=services.runtime,
                ref=ContainerRef(self.sandbox.container, self._directory),
                plan=self.prepared.plan,
                placement=self.prepared.placement,
                channel=held.channel,
                spool=held.spool,
                cgroup=held.cgroup,
                own_namespaces=services.own_namespaces,
            )
        )
        await held.container.launch(self.prepared.bundle, self.rootfs, self._network, phase=self._note_phase)
        self._disk.start()

    @property
    def container(self) -> JobContainer:
        """The launched container."""
        assert self._held.container is not None  # noqa: S101  launch made it
        return self._held.container

    @property
    def spool(self) -> Spool:
        """The job's output."""
        assert self._held.spool is not None  # noqa: S101  prepare made it
        return self._held.spool

    async def run_step(self, index: int, resolved: ResolvedStep, *, started: datetime, clock: float) -> StepResult:
        """Run one resolved step and say how it ended; of a background step, that it began.

        :raises ShimDied: the sandbox is gone.
        """
        step = resolved.step
        command = self._command(index, resolved)
        end = await (self.container.start_background(command) if step.background else self.container.run_step(command))
        await self.spool.drain()
        self._forget_files(index, command)
        base = StepResult(step.name, None, started, time.monotonic() - clock)
        if isinstance(end, Started):
            return base
        if isinstance(end, NoExec):
            code, error = exec_failure(resolved, end.stage.name.lower(), end.errno)
            return replace(base, masked=step.continue_on_error, error=error, exec_code=code)
        process_exit = ProcessExit.from_wait_status(end.status)
        masked = step.continue_on_error and not process_exit.ok
        leftovers = end.leftovers if isinstance(end, Exited) else 0
        return replace(base, exit=process_exit, masked=masked, leftovers=leftovers)

    def _command(self, index: int, resolved: ResolvedStep) -> StepCommand:
        step, channel = resolved.step, self._held.channel
        assert channel is not None  # noqa: S101  prepare made it
        argv = resolved.argv
        if step.script is not None:
            path = self._scripts.get(index) or channel.write_script(f"step-{index}", step.script)
            argv = (*argv, path)
        return StepCommand(
            id=index + 1,
            argv=argv,
            env=resolved.env,
            cwd=resolved.workdir,
            stdin=channel.write_stdin(index, step.stdin) if step.stdin is not None else "",
            background=step.background,
            merge_output=self.request.spec.merge_output,
        )

    def _forget_files(self, index: int, command: StepCommand) -> None:
        if command.stdin and self._held.channel is not None:
            self._held.channel.remove(command.stdin)

    # ---- end

    async def read_evidence(self) -> tuple[Evidence, ResourceUsage]:
        """What the kernel counted, once the tree is dead and before its cgroup goes."""
        disk = await self._disk.stop()
        evidence = self.container.evidence()
        usage = self.container.usage()
        return Evidence(evidence.memory, evidence.pids, disk), usage

    async def collect_outputs(self) -> tuple[CollectedOutput, ...]:
        """Take what the job promised out of its writable layer."""
        placed = self._held.placed
        assert placed is not None  # noqa: S101  prepare made it
        source = Path(placed.sources["output"])
        declared, destination = self.request.spec.outputs, self.request.workspace.output
        if not declared and destination is None:
            return ()
        return await self._services.in_pool(lambda: collect(source, declared, destination))

    async def discard(self) -> None:
        """Undo an attempt that has no reader of its output."""
        await self.clean_up()
        if self._held.spool is not None:
            await self._services.in_pool(self._held.spool.remove)

    async def clean_up(self) -> tuple[str, ...]:
        """Undo everything in reverse, past errors. Repeating it is no error.

        :returns: what could not be undone, a line each; the ledger then stays for `recover`.
        """
        errors: list[str] = []
        try:
            async with asyncio.timeout(CLEANUP_DEADLINE):
                await self._disk.stop()
                if self._held.container is not None:
                    await _past_errors(errors, self._held.container.kill())
                    ref = ContainerRef(self.sandbox.container, self._directory)
                    await _past_errors(errors, self._services.runtime.remove(ref))
                await shielded(self._services.in_pool(lambda: self._unwind(errors)))
        except TimeoutError:
            errors.append(f"took more than {CLEANUP_DEADLINE:g}s")
        for error in errors:
            log.error("cleanup of %s: %s", self.sandbox, error)
        return tuple(errors)

    def _unwind(self, errors: list[str]) -> None:
        """Section 199's order, by the ledger: the same undoing as after a crash."""
        held, services = self._held, self._services
        if held.channel is not None:
            held.channel.close()
        if held.ledger is None:
            return
        try:
            undo(held.ledger.record(), services.host, services.cgroups, orphans=False)
        except ForgeyardError as error:
            errors.append(str(error))
        if errors:
            return
        if held.lease is not None:
            held.lease.release()
            held.lease = None
        held.ledger.close_and_remove()
        held.ledger = None

    def provenance(self) -> Provenance:
        """What really ran; every claim was checked at the gate."""
        prepared = self.prepared
        return Provenance(
            profile=self.request.profile,
            isolation=self.planned.isolation,
            user_namespace=prepared.plan.user_namespace,
            network=self.request.network.mode,
            seccomp=prepared.plan.seccomp,
            runtime=self._services.runtime.name,
            rootfs=self.rootfs.identity,
            plan_digest=prepared.bundle.plan_digest,
            bundle_digest=prepared.bundle.bundle_digest,
            impure=impurities(self.request),
            uid_base=prepared.placement.uid_base,
        )

    def _note_phase(self, name: str, seconds: float) -> None:
        self.phases[name] = seconds


async def _past_errors(errors: list[str], act: Awaitable[None]) -> None:
    try:
        await act
    except ForgeyardError as error:
        errors.append(str(error))
