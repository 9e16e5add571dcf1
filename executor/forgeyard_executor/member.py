"""One container of an attempt, the job's or a service's: all that is made for it, and its undoing in reverse."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from forgeyard_executor.attempt_caches import AttemptCaches
from forgeyard_executor.disk import SampledDisk, WatchedDisk
from forgeyard_executor.images import ReadyImage
from forgeyard_executor.planning import UID_COUNT, Planned
from forgeyard_executor.refusals import refuse_uncarried
from forgeyard_executor.services import HostServices
from forgeyard_executor.step_runner import StepRunner, write_scripts
from forgeyard_host.cgroups import AttemptCgroup
from forgeyard_host.idmaps import bound_user_namespace
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import DEFAULT_FILES_SIZE, SandboxPlaced, SandboxSetup
from forgeyard_host.recovery import undo
from forgeyard_host.uids import UidLease
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import Bundle, NetworkAttachment, Placement, RootfsPlan
from forgeyard_model.result import DiskEvidence, Evidence, ResourceUsage
from forgeyard_oci.spec import compile_bundle
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_runtimes.container import AtGate, ContainerParts, JobContainer
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import Spool

log: Final = logging.getLogger("forgeyard.executor")

CLEANUP_DEADLINE: Final = 60.0
"""Seconds. Cleanup runs on a clock of its own, whatever ended the job."""
REMOVAL_DEADLINE: Final = 30.0
"""Seconds of it for the runtime's own removal: an engine that hangs must not keep what is on the host from going."""
DEATH_GRACE: Final = 1.0
"""Seconds between the death of PID 1 and giving up on its last report."""

T = TypeVar("T")
Disk = SampledDisk | WatchedDisk


def made(part: T | None) -> T:
    """`part`, which an earlier phase made.

    :raises ExecutorError: INTERNAL, when the phases were called in another order.
    """
    if part is None:
        raise ExecutorError(ExecutorErrorKind.INTERNAL, "attempt_order", "a phase of the attempt was left out")
    return part


def attempt_group(executor_id: str, job: SandboxId) -> str:
    """The control group of a whole attempt: its job and its services are groups in it."""
    return f"/forgeyard/{executor_id}/{job}"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What one container will be, decided before anything of it is made.

    :param group: of the attempt. leaf: this container's own below it. leaves: of all of the attempt, for the job's
        ledger, which whoever recovers kills them by; a service's has none but its own group.
    :param about: for the ledger: whose attempt it is, and what it is called.
    :param files: texts that are put into the sandbox, by their name.
    :param hostname: None takes the sandbox's own.
    :param probes: commands can be run beside its program, with an output of their own.
    :param plumb: connects it to its network once it is there; None where it joins one, or has none.
    """

    sandbox: SandboxId
    group: str
    leaf: str
    about: Mapping[str, str]
    rootfs: RootfsPlan
    planned: Planned
    network: NetworkAttachment
    files: Mapping[str, str]
    output_cap: int
    disk_limit: int | None
    leaves: tuple[str, ...] = ()
    hostname: str | None = None
    merge_output: bool = False
    probes: bool = False
    image: ReadyImage | None = None
    caches: AttemptCaches | None = None
    plumb: Callable[[int], Awaitable[None]] | None = None


@dataclass(slots=True)
class _Held:
    """What a member holds on the host; filled while it is made, emptied in reverse.

    :ivar bounds: the user namespace is the runtime's to make, and gets our limits at the gate.
    """

    ledger: Ledger | None = None
    lease: UidLease | None = None
    cgroup: AttemptCgroup | None = None
    placed: SandboxPlaced | None = None
    bounds: bool = False
    channel: ShimChannel | None = None
    scripts: dict[int, str] = field(default_factory=dict)
    spool: Spool | None = None
    placement: Placement | None = None
    bundle: Bundle | None = None
    container: JobContainer | None = None
    steps: StepRunner | None = None


class Member:
    """One container from `make` to the last trace of it. Whoever makes it calls `clean_up`, also after a failure.

    :param disk: what looks at its writable layer.
    """

    def __init__(self, services: HostServices, blueprint: Blueprint, disk: Disk) -> None:
        self.blueprint = blueprint
        self.phases: dict[str, float] = {}
        self._services = services
        self._disk = disk
        self._held = _Held()
        self._removing: asyncio.Future[None] | None = None

    @property
    def sandbox(self) -> SandboxId:
        """Its name on the host."""
        return self.blueprint.sandbox

    # ---- made: blocking, in the pool

    def make(self) -> None:
        """Make everything the container needs, up to the container itself. Blocking.

        :raises ForgeyardError: what could not be made.
        """
        services, blueprint, held = self._services, self.blueprint, self._held
        held.ledger = ledger = Ledger.open(str(services.paths.root), self.sandbox, services.executor_id)
        ledger.intend("attempt", **blueprint.about)
        services.host.create_directory(self.sandbox, ledger)
        own = blueprint.group if blueprint.leaves else f"{blueprint.group}/{blueprint.leaf}"
        if blueprint.planned.plan.user_namespace:
            held.lease = services.uids.acquire(self.sandbox.value, services.executor_id, cgroup=own)
            ledger.intend("uid_range", lock_file=held.lease.lock_file)
        ledger.intend("cgroup", path=own, leaves=list(blueprint.leaves))
        held.cgroup = AttemptCgroup.create(services.cgroups, blueprint.group)
        held.placed = self._usable(services.host.setup(self._setup_request(), ledger))
        if blueprint.caches is not None:
            blueprint.caches.make_places(blueprint.planned, held.placed, self.uid_base)
        self._make_channel(held.placed, self.uid_base)
        held.spool = Spool.create(
            services.paths.spool(services.executor_id, self.sandbox), services.pump, blueprint.output_cap
        )
        self._compile(held.cgroup, held.placed)

    def _usable(self, placed: SandboxPlaced) -> SandboxPlaced:
        """`placed` without a user namespace that this runtime could not put a container into."""
        runtime = self._services.runtime
        # Made by us it comes first, and from inside of it no network of the host's can be joined any more.
        apart = runtime.network_join == "plumbed" and self.blueprint.network.netns is not None
        if placed.user_namespace is None or (runtime.joins_user_namespace and not apart):
            return placed
        self._held.bounds = True
        return replace(placed, user_namespace=None)

    def _setup_request(self) -> SandboxSetup:
        planned, user = self.blueprint.planned, self.blueprint.planned.plan.user
        return SandboxSetup(
            sandbox=self.sandbox,
            directory=str(self._services.paths.attempt(self.sandbox)),
            uid_base=None if self._held.lease is None else self._held.lease.base,
            uid_count=UID_COUNT,
            job_uid=user.uid,
            job_gid=user.gid,
            binds=planned.binds,
            overlays=planned.overlays,
            scratch=planned.scratch,
            disk_limit=self.blueprint.disk_limit,
            files_size=DEFAULT_FILES_SIZE + sum(len(resolved.step.stdin or b"") for resolved in planned.steps),
        )

    def _make_channel(self, placed: SandboxPlaced, base: int) -> None:
        planned, held, files = self.blueprint.planned, self._held, Path(placed.files)
        _write(files, self.blueprint.files)
        user = planned.plan.user
        held.channel = ShimChannel.create(
            files / "ctl",
            shim=self._services.shim,
            uid=base + user.uid,
            gid=base + user.gid,
            probes=self.blueprint.probes,
        )
        held.scripts = write_scripts(held.channel, planned.steps)

    def rewrite(self, files: Mapping[str, str]) -> None:
        """Put other texts into the files of its blueprint, in place: the container has them mounted. Microseconds."""
        _write(Path(self.placed.files), files)

    def _compile(self, cgroup: AttemptCgroup, placed: SandboxPlaced) -> None:
        planned = self.blueprint.planned
        sources = {slot: f"{placed.files}/{name}" for slot, name in planned.attempt_files.items()}
        sources |= {**planned.host_sources, **placed.sources}
        self._held.placement = placement = Placement(
            sandbox=self.sandbox,
            rootfs=sources.pop("rootfs"),
            sources=sources,
            uid_base=None if self._held.lease is None else self._held.lease.base,
            uid_count=UID_COUNT,
            cgroup=cgroup.leaf(self.blueprint.leaf),
            netns=self.blueprint.network.netns,
            argv=ShimChannel.argv,
            userns=None if placed.user_namespace is None else placed.user_namespace.path,
            hostname=self.blueprint.hostname,
            plumbed=self.blueprint.plumb is not None,
        )
        self._held.bundle = bundle = compile_bundle(planned.plan, placement, machine=platform.machine())
        refuse_uncarried(self._services.runtime, bundle)

    # ---- what there is

    @property
    def placement(self) -> Placement:
        """Where it is put on this host."""
        return made(self._held.placement)

    @property
    def bundle(self) -> Bundle:
        """Its compiled bundle."""
        return made(self._held.bundle)

    @property
    def placed(self) -> SandboxPlaced:
        """Its mounts and directories."""
        return made(self._held.placed)

    @property
    def cgroup(self) -> AttemptCgroup:
        """The attempt's group."""
        return made(self._held.cgroup)

    @property
    def uid_base(self) -> int:
        """Host id of its root: the first of its range; without a user namespace the host's own."""
        return made(self._held.lease).base if self.blueprint.planned.plan.user_namespace else 0

    @property
    def container(self) -> JobContainer:
        """The launched container."""
        return made(self._held.container)

    @property
    def channel(self) -> ShimChannel:
        """The way to its PID 1."""
        return made(self._held.channel)

    @property
    def spool(self) -> Spool:
        """Its output."""
        return made(self._held.spool)

    @property
    def steps(self) -> StepRunner:
        """What runs steps in the launched container."""
        return made(self._held.steps)

    @property
    def launched(self) -> bool:
        """Whether there was a launch, and so perhaps processes."""
        return self._held.container is not None

    @property
    def disk(self) -> DiskEvidence:
        """What was seen of its writable layer up to now."""
        return self._disk.seen

    # ---- run

    async def launch(self) -> None:
        """Start the container up to the open gate.

        :raises ForgeyardError: the member must then be cleaned up.
        """
        held, blueprint, container = self._held, self.blueprint, self._contained()
        await container.launch(self.bundle, blueprint.rootfs, blueprint.network, phase=self.note_phase)
        held.steps = StepRunner(container, self.channel, self.spool, held.scripts, merge_output=blueprint.merge_output)
        self._disk.start(container.kill)

    async def inspect(self) -> AtGate:
        """In the place of `launch`: start the container up to its gate, which stays shut; what was applied.

        :raises ForgeyardError: the member must then be cleaned up.
        """
        return await self._contained().inspect(self.bundle, self.blueprint.rootfs, self.blueprint.network)

    def _contained(self) -> JobContainer:
        """Its container, which may exist at the runtime from now on."""
        services, blueprint = self._services, self.blueprint
        made(self._held.ledger).intend("container", runtime_root=f"{self.placed.files}/runtime")
        self._held.container = container = JobContainer(
            ContainerParts(
                runtime=services.runtime,
                ref=self._ref(),
                plan=blueprint.planned.plan,
                placement=self.placement,
                channel=self.channel,
                spool=self.spool,
                cgroup=self.cgroup,
                own_namespaces=services.own_namespaces,
                leaf=blueprint.leaf,
                plumb=self._finish if self._held.bounds else blueprint.plumb,
            )
        )
        return container

    async def _finish(self, pid: int) -> None:
        """What is left to do at the gate."""
        await shielded(self._services.in_pool(lambda: bound_user_namespace(pid)))
        if self.blueprint.plumb is not None:
            await self.blueprint.plumb(pid)

    def note_phase(self, name: str, seconds: float) -> None:
        """Remember how long a part of the start took."""
        self.phases[name] = seconds

    # ---- end

    async def kill(self) -> None:
        """Kill all of it; never launched, or dead already, is fine.

        :raises ForgeyardError: what survives.
        """
        if self._held.container is not None:
            await self._held.container.kill()

    async def read_evidence(self) -> tuple[Evidence, ResourceUsage]:
        """What the kernel counted, once the tree is dead and before its cgroup goes."""
        await self._disk.stop()
        return self.evidence(), self.container.usage()

    async def stop_watching(self) -> None:
        """Look at the writable layer no more. Repeating it is no error."""
        await self._disk.stop()

    def evidence(self) -> Evidence:
        """What the kernel counted up to now, as long as its control group is there."""
        counted = self.container.evidence()
        return Evidence(counted.memory, counted.pids, self._disk.seen)

    def _ref(self) -> ContainerRef:
        return ContainerRef(self.sandbox.container, Path(self.placed.files))

    async def clean_up(self) -> tuple[str, ...]:
        """Undo everything in reverse, past errors. Repeating it is no error.

        :returns: what could not be undone, a line each; the ledger then stays for `recover`.
        """
        errors: list[str] = []
        try:
            async with asyncio.timeout(CLEANUP_DEADLINE):
                await self._disk.stop()
                if self._held.container is None and self._held.spool is not None:
                    await self._held.spool.close_input()  # whoever reads it would wait for a launch that never comes
                if self._held.container is not None:
                    await past_errors(errors, self._held.container.kill())
                    await past_errors(errors, self._remove_container())
                if self._held.channel is not None:
                    self._held.channel.close()
                await shielded(self._services.in_pool(lambda: self._unwind(errors)))
        except TimeoutError:
            errors.append(f"took more than {CLEANUP_DEADLINE:g}s")
        for error in errors:
            log.error("cleanup of %s: %s", self.sandbox, error)
        return tuple(errors)

    async def _remove_container(self) -> None:
        """Have the runtime forget it. What hangs goes on to its own deadline, and a sweep finds what that leaves.

        :raises ForgeyardError: it is not removed, as far as is known.
        """
        runtime = self._services.runtime
        self._removing = removing = asyncio.ensure_future(runtime.remove(self._ref()))
        done, _ = await asyncio.wait((removing,), timeout=REMOVAL_DEADLINE)
        if not done:
            removing.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise SandboxError(
                SandboxErrorKind.CLEANUP_FAILED,
                "runtime_hangs",
                f"{runtime.name} did not remove the container within {REMOVAL_DEADLINE:g}s",
                resolution="look at the daemon; `forgeyard gc` tries again",
            )
        removing.result()

    def _unwind(self, errors: list[str]) -> None:
        """Section 199's order, by the ledger: the same undoing as after a crash."""
        held, services = self._held, self._services
        if held.placed is not None:  # a descriptor, which an attempt that is kept for its result would keep open
            held.placed = replace(held.placed, user_namespace=None)
        if held.ledger is None:
            self._let_go()
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
        self._let_go()

    def _let_go(self) -> None:
        """Not before the mounts are gone: what could not be undone keeps its image while this process lives."""
        if self.blueprint.caches is not None:
            self.blueprint.caches.close()
        if self.blueprint.image is not None:
            self.blueprint.image.close()

    async def remove_output(self) -> None:
        """Delete what it wrote; nothing written is fine."""
        if self._held.spool is not None:
            await self._services.in_pool(self._held.spool.remove)


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (directory / name).write_text(text)


async def past_errors(errors: list[str], act: Awaitable[None]) -> None:
    """Await `act`; an error of ours goes to `errors`."""
    try:
        await act
    except ForgeyardError as error:
        errors.append(str(error))


Plan = Callable[[], tuple[RootfsPlan, Planned]]
"""Decides what a member is; blocking."""
