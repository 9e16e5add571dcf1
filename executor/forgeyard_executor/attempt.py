"""One attempt on this host: everything made for it, in the order made, and its undoing in reverse."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from forgeyard_executor.disk import DiskWatch
from forgeyard_executor.outputs import collect
from forgeyard_executor.planning import UID_COUNT, Planned
from forgeyard_executor.services import HostServices
from forgeyard_executor.step_runner import StepRunner, write_scripts
from forgeyard_host.cgroups import AttemptCgroup
from forgeyard_host.ledger import Ledger
from forgeyard_host.mounts import mounts_below
from forgeyard_host.operations import DEFAULT_FILES_SIZE, SandboxPlaced, SandboxSetup
from forgeyard_host.recovery import undo
from forgeyard_host.uids import UidLease
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import NetworkAttachment, Placement, PreparedExecution, RootfsPlan
from forgeyard_model.request import ExecutionRequest, impurities
from forgeyard_model.result import (
    CollectedOutput,
    Evidence,
    Provenance,
    ResourceUsage,
)
from forgeyard_oci.spec import compile_bundle, load_profile
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.hostroot import hosts_file
from forgeyard_runtimes.container import LEAF, ContainerParts, JobContainer
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import Spool

log: Final = logging.getLogger("forgeyard.executor")

CLEANUP_DEADLINE: Final = 60.0
"""Seconds. Cleanup runs on a clock of its own, whatever ended the job."""


@dataclass(slots=True)
class Held:
    """What an attempt holds on the host; filled while it is prepared, emptied in reverse."""

    rootfs: RootfsPlan | None = None
    planned: Planned | None = None
    ledger: Ledger | None = None
    lease: UidLease | None = None
    cgroup: AttemptCgroup | None = None
    placed: SandboxPlaced | None = None
    channel: ShimChannel | None = None
    scripts: dict[int, str] = field(default_factory=dict)
    spool: Spool | None = None
    prepared: PreparedExecution | None = None
    container: JobContainer | None = None
    steps: StepRunner | None = None


T = TypeVar("T")


def made(part: T | None) -> T:
    """`part`, which an earlier phase made.

    :raises ExecutorError: INTERNAL, when the phases were called in another order.
    """
    if part is None:
        raise ExecutorError(ExecutorErrorKind.INTERNAL, "attempt_order", "a phase of the attempt was left out")
    return part


class Attempt:
    """One attempt from prepare to the last trace of it. The executor orders, this object holds."""

    def __init__(
        self,
        services: HostServices,
        request: ExecutionRequest,
        network: NetworkAttachment,
    ) -> None:
        self.sandbox = SandboxId.mint()
        self.request = request
        self.phases: dict[str, float] = {}
        self._services = services
        self._network = network
        self._held = Held()
        self._directory = services.paths.attempt(self.sandbox)
        self._disk = DiskWatch(services.host, str(self._directory), request.limits.disk)

    @property
    def prepared(self) -> PreparedExecution:
        """The validated plan."""
        return made(self._held.prepared)

    # ---- prepare

    async def prepare(self, plan: Callable[[], tuple[RootfsPlan, Planned]]) -> None:
        """Make everything the container needs. A failure leaves nothing behind.

        :param plan: decides what that is; blocking, like the making, so that both run in one go in the pool.
        :raises ForgeyardError: what could not be made.
        """
        try:
            # To its end even when cancelled: cleaning up beside a thread that still makes things would race it.
            await shielded(self._services.in_pool(lambda: self._prepare(plan)))
        except BaseException:
            await shielded(self.discard())
            raise

    def _prepare(self, plan: Callable[[], tuple[RootfsPlan, Planned]]) -> None:
        clock = time.monotonic()
        self._held.rootfs, self._held.planned = plan()
        self._note_phase("plan", time.monotonic() - clock)
        clock = time.monotonic()
        self._make()
        self._note_phase("setup", time.monotonic() - clock)

    @property
    def rootfs(self) -> RootfsPlan:
        """The root filesystem that was planned."""
        return made(self._held.rootfs)

    @property
    def planned(self) -> Planned:
        """What was planned."""
        return made(self._held.planned)

    def _make(self) -> None:
        services, held = self._services, self._held
        held.ledger = ledger = Ledger.open(str(services.paths.root), self.sandbox, services.executor_id)
        ledger.intend("attempt", attempt=self.request.context.attempt_id, name=self.request.spec.name)
        services.host.create_directory(self.sandbox, ledger)
        group = f"/forgeyard/{services.executor_id}/{self.sandbox}"
        held.lease = services.uids.acquire(self.sandbox.value, services.executor_id, cgroup=group)
        ledger.intend("uid_range", lock_file=held.lease.lock_file)
        ledger.intend("cgroup", path=group, leaves=[LEAF])
        held.cgroup = AttemptCgroup.create(services.cgroups, group)
        held.placed = services.host.setup(self._setup_request(held.lease.base), ledger)
        files = Path(held.placed.files)
        (files / "hosts").write_text(hosts_file(self.sandbox.hostname))
        user = self.planned.plan.user
        held.channel = ShimChannel.create(
            files / "ctl", shim=services.shim, uid=held.lease.base + user.uid, gid=held.lease.base + user.gid
        )
        held.scripts = write_scripts(held.channel, self.planned.steps)
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
            files_size=DEFAULT_FILES_SIZE + sum(len(step.stdin or b"") for step in self.request.spec.steps),
        )

    def _compile(self, base: int, cgroup: AttemptCgroup, placed: SandboxPlaced) -> None:
        planned = self.planned
        sources = {slot: f"{placed.files}/{name}" for slot, name in planned.attempt_files.items()}
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
            userns=None if placed.user_namespace is None else placed.user_namespace.path,
        )
        self._held.prepared = PreparedExecution(
            sandbox_id=self.sandbox,
            context=self.request.context,
            plan=planned.plan,
            placement=placement,
            bundle=compile_bundle(planned.plan, placement, machine=platform.machine()),
            filesystem=self.request.sandbox.filesystem,
            resource_limits=self.request.limits,
            notes=(*planned.notes, *placed.notes, *self._mount_notes()),
        )

    def _mount_notes(self) -> tuple[str, ...]:
        """A bind shows one file system: what is mounted below a path of the caller's is not there, and that is said."""
        filesystem, source = self.request.sandbox.filesystem, self.request.workspace.source
        approved = [path.source for path in (*filesystem.toolchains, *filesystem.allow_host_paths)]
        below = mounts_below((*approved, *(() if source is None else (source,))))
        return tuple(f"{point} is a file system of its own, which does not come along: it is empty" for point in below)

    # ---- run

    async def launch(self) -> None:
        """Start the container up to the open gate.

        :raises ForgeyardError: the attempt must then be cleaned up.
        """
        held, services = self._held, self._services
        channel = made(held.channel)
        made(held.ledger).intend("container", runtime_root=f"{made(held.placed).files}/runtime")
        held.container = JobContainer(
            ContainerParts(
                runtime=services.runtime,
                ref=self._ref(),
                plan=self.prepared.plan,
                placement=self.prepared.placement,
                channel=channel,
                spool=self.spool,
                cgroup=made(held.cgroup),
                own_namespaces=services.own_namespaces,
            )
        )
        await held.container.launch(self.prepared.bundle, self.rootfs, self._network, phase=self._note_phase)
        held.steps = StepRunner(
            held.container, channel, self.spool, held.scripts, merge_output=self.request.spec.merge_output
        )
        self._disk.start()

    @property
    def container(self) -> JobContainer:
        """The launched container."""
        return made(self._held.container)

    @property
    def spool(self) -> Spool:
        """The job's output."""
        return made(self._held.spool)

    @property
    def steps(self) -> StepRunner:
        """What runs steps in the launched container."""
        return made(self._held.steps)

    # ---- end

    async def read_evidence(self) -> tuple[Evidence, ResourceUsage]:
        """What the kernel counted, once the tree is dead and before its cgroup goes."""
        disk = await self._disk.stop()
        evidence = self.container.evidence()
        usage = self.container.usage()
        return Evidence(evidence.memory, evidence.pids, disk), usage

    async def collect_outputs(self) -> tuple[CollectedOutput, ...]:
        """Take what the job promised out of its writable layer."""
        source = Path(made(self._held.placed).sources["output"])
        declared, destination = self.request.spec.outputs, self.request.workspace.output
        if not declared and destination is None:
            return ()
        return await self._services.in_pool(lambda: collect(source, declared, destination))

    async def discard(self) -> None:
        """Undo an attempt that has no reader of its output."""
        await self.clean_up()
        if self._held.spool is not None:
            await self._services.in_pool(self._held.spool.remove)

    def _ref(self) -> ContainerRef:
        return ContainerRef(self.sandbox.container, Path(made(self._held.placed).files))

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
                    await _past_errors(errors, self._services.runtime.remove(self._ref()))
                if self._held.channel is not None:
                    self._held.channel.close()
                await shielded(self._services.in_pool(lambda: self._unwind(errors)))
        except TimeoutError:
            errors.append(f"took more than {CLEANUP_DEADLINE:g}s")
        for error in errors:
            log.error("cleanup of %s: %s", self.sandbox, error)
        return tuple(errors)

    def _unwind(self, errors: list[str]) -> None:
        """Section 199's order, by the ledger: the same undoing as after a crash."""
        held, services = self._held, self._services
        if held.placed is not None:  # a descriptor, which an attempt that is kept for its result would keep open
            held.placed = replace(held.placed, user_namespace=None)
        if held.ledger is None:
            return
        try:
            undo(held.ledger.record(), services.host, services.cgroups, orphans=False)
        except ForgeyardError as error:
            errors.append(str(error))
            held.ledger.close()
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
            seccomp=load_profile(prepared.plan.seccomp).identity,
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
