"""One attempt on this host: its job's container, its services', and the network between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forgeyard_executor.attempt_caches import AttemptCaches
from forgeyard_executor.attempt_members import MemberMaking, MemberPlan, ServicePlan, service_notes
from forgeyard_executor.images import ReadyImage
from forgeyard_executor.member import Member, Plan, made, past_errors
from forgeyard_executor.outputs import collect
from forgeyard_executor.planning import Planned
from forgeyard_executor.services import HostServices
from forgeyard_executor.step_runner import StepRunner
from forgeyard_host.mounts import mounts_below
from forgeyard_model.cache import CacheReport
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import NetworkAttachment, PreparedExecution, RootfsPlan
from forgeyard_model.request import ExecutionRequest, impurities
from forgeyard_model.result import (
    CollectedOutput,
    Evidence,
    Provenance,
    ResourceUsage,
)
from forgeyard_model.services import ServiceSpec
from forgeyard_oci.spec import load_profile
from forgeyard_runtimes.container import JobContainer
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import Spool

A = TypeVar("A")
B = TypeVar("B")

if TYPE_CHECKING:
    from forgeyard_executor.networked import Networked
    from forgeyard_executor.service_members import ServiceContainer
    from forgeyard_services.supervisor import ServiceFailure, ServiceSet

PlanService = Callable[[ServiceSpec, "ReadyImage | None"], tuple[RootfsPlan, Planned]]
"""Decides what a service is; blocking."""


@dataclass(frozen=True, slots=True)
class Companions:
    """What an attempt has beside its job.

    :param attach: makes the network; its names are known, its members are not made yet.
    :param images: of services that have one, by the service's name.
    """

    attach: Callable[[SandboxId], Awaitable[Networked]]
    plan_service: PlanService
    images: Mapping[str, ReadyImage]


@dataclass(slots=True)
class Held:
    """What an attempt holds on the host beside its members."""

    images: list[ReadyImage] = field(default_factory=list)
    caches: AttemptCaches | None = None
    rootfs: RootfsPlan | None = None
    planned: Planned | None = None
    job: Member | None = None
    services: tuple[ServiceContainer, ...] = ()
    network: Networked | None = None
    supervisor: ServiceSet | None = None
    starting: asyncio.Task[ServiceFailure | None] | None = None
    prepared: PreparedExecution | None = None


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
        self._making = MemberMaking(services, request, self.sandbox)

    @property
    def prepared(self) -> PreparedExecution:
        """The validated plan."""
        return made(self._held.prepared)

    # ---- prepare

    async def prepare(
        self,
        plan: Plan,
        *,
        image: ReadyImage | None = None,
        caches: Callable[[], AttemptCaches | None] = lambda: None,
        companions: Companions | None = None,
    ) -> None:
        """Make everything the containers need. A failure leaves nothing behind.

        :param image: what the root is made of; this attempt's from now on, until nothing is mounted any more.
        :param caches: opens those that the request names.
        :param plan: decides what that is; blocking, like the making, so that both run in one go in the pool.
        :param companions: None for a job alone on a network that nothing has to be made for.
        :raises ForgeyardError: what could not be made.
        """
        self._held.images = [] if image is None else [image]
        self._held.images += companions.images.values() if companions is not None else ()
        waited = max((ready.seconds for ready in self._held.images), default=0.0)
        if waited:
            self._note_phase("pull", waited)
        try:
            # To its end even when cancelled: cleaning up beside a thread that still makes things would race it.
            if companions is None:
                await shielded(self._services.in_pool(lambda: self._prepare(plan, image, caches)))
            else:
                await shielded(self._prepare_all(plan, image, caches, companions))
        except BaseException:
            await shielded(self.discard())
            raise

    def _prepare(self, plan: Plan, image: ReadyImage | None, caches: Callable[[], AttemptCaches | None]) -> None:
        clock = time.monotonic()
        self._plan(plan, caches)
        self._note_phase("plan", time.monotonic() - clock)
        clock = time.monotonic()
        self._held.job = job = self._job_member(image)
        job.make()
        self._complete()
        self._note_phase("setup", time.monotonic() - clock)

    def _plan(self, plan: Plan, caches: Callable[[], AttemptCaches | None]) -> None:
        held = self._held
        held.rootfs, held.planned = plan()
        held.caches = caches()
        if held.caches is not None:
            held.planned = held.caches.join(held.planned)

    async def _prepare_all(
        self,
        plan: Plan,
        image: ReadyImage | None,
        caches: Callable[[], AttemptCaches | None],
        companions: Companions,
    ) -> None:
        """The network beside the plans, which need nothing of it; then all members at once."""
        clock = time.monotonic()
        services, held = self._services, self._held
        attaching = asyncio.ensure_future(self._attach(companions))
        planning = services.in_pool(lambda: self._plan_all(plan, caches, companions))
        network, plans = await _both(attaching, planning)
        self._note_phase("plan", time.monotonic() - clock)
        clock = time.monotonic()
        held.planned = network.for_job(self.planned)
        held.job = job = self._job_member(image)
        held.services = tuple(
            self._making.service(number, planned, network, companions.images) for number, planned in enumerate(plans, 1)
        )
        members = (job, *(container.member for container in held.services))
        await _all_of([services.in_pool(member.make) for member in members])
        await services.in_pool(self._complete)
        self._note_phase("setup", time.monotonic() - clock)

    async def _attach(self, companions: Companions) -> Networked:
        clock = time.monotonic()
        self._held.network = network = await companions.attach(self.sandbox)
        self._note_phase("network", time.monotonic() - clock)
        return network

    def _plan_all(
        self, plan: Plan, caches: Callable[[], AttemptCaches | None], companions: Companions
    ) -> tuple[ServicePlan, ...]:
        self._plan(plan, caches)
        specs = self.request.spec.services
        return tuple(
            [ServicePlan(spec, *companions.plan_service(spec, companions.images.get(spec.name))) for spec in specs]
        )

    @property
    def rootfs(self) -> RootfsPlan:
        """The root filesystem that was planned."""
        return made(self._held.rootfs)

    @property
    def planned(self) -> Planned:
        """What was planned."""
        return made(self._held.planned)

    @property
    def job(self) -> Member:
        """The job's own container."""
        return made(self._held.job)

    @property
    def services(self) -> tuple[ServiceContainer, ...]:
        """The services' containers, in the order declared."""
        return self._held.services

    @property
    def network(self) -> Networked | None:
        """The attempt's own network; None where nothing had to be made."""
        return self._held.network

    @property
    def group(self) -> str:
        """The control group of the whole attempt."""
        return self._making.group

    def _job_member(self, image: ReadyImage | None) -> Member:
        plan, held = MemberPlan(self.rootfs, self.planned), self._held
        return self._making.job(plan, held.network or self._network, image=image, caches=held.caches)

    def _complete(self) -> None:
        """What takes the members as they were made. Blocking."""
        job, planned, network = self.job, self.planned, self._held.network
        notes: tuple[str, ...] = ()
        if network is not None:
            network.plumbing.put = [partial(self._put_network_files, network)]
            network.put_home_files(job)
            notes = (*network.notes, *network.covered(planned))
        if self._held.services:
            job.cgroup.bound(memory=self.request.resources.memory, pids=self.request.resources.pids)
            notes = (*notes, *(note for container in self._held.services for note in service_notes(container)))
        self._held.prepared = PreparedExecution(
            sandbox_id=self.sandbox,
            context=self.request.context,
            plan=planned.plan,
            placement=job.placement,
            bundle=job.bundle,
            filesystem=self.request.sandbox.filesystem,
            resource_limits=self.request.limits,
            notes=(*planned.notes, *job.placed.notes, *self._mount_notes(), *notes),
        )

    def _put_network_files(self, network: Networked) -> None:
        """What of the network was not known when the members were made."""
        self.job.rewrite(network.files())
        for container in self._held.services:
            container.member.rewrite(network.files(container.spec))

    def _mount_notes(self) -> tuple[str, ...]:
        """A bind shows one file system: what is mounted below a path of the caller's is not there, and that is said."""
        filesystem, source = self.request.sandbox.filesystem, self.request.workspace.source
        approved = [path.source for path in (*filesystem.toolchains, *filesystem.allow_host_paths)]
        below = mounts_below((*approved, *(() if source is None else (source,))))
        return tuple(f"{point} is a file system of its own, which does not come along: it is empty" for point in below)

    # ---- run

    async def launch(self) -> None:
        """Start the job's container up to the open gate; its services beside it.

        :raises ForgeyardError: the attempt must then be cleaned up.
        """
        if self._held.services:
            self._start_services()
        await self.job.launch()
        self.phases.update(self.job.phases)

    def _start_services(self) -> None:
        from forgeyard_executor.service_members import ServiceLauncher
        from forgeyard_services.supervisor import ServiceSet

        self._held.supervisor = supervisor = ServiceSet(self.request.spec.services, ServiceLauncher(self.services))
        self._held.starting = asyncio.ensure_future(self._bring_up(supervisor))

    async def _bring_up(self, supervisor: ServiceSet) -> ServiceFailure | None:
        clock = time.monotonic()
        failure = await supervisor.start(timeout=self.request.timeouts.services)
        self._note_phase("services", time.monotonic() - clock)
        return failure

    @property
    def supervisor(self) -> ServiceSet | None:
        """What watches over the services; None without any."""
        return self._held.supervisor

    @property
    def services_up(self) -> asyncio.Future[ServiceFailure | None] | None:
        """Done once all services are ready, or one of them never will be. None without any."""
        return self._held.starting

    async def stop_services(self) -> None:
        """Kill them, whatever they were at. Repeating it is no error.

        :raises ForgeyardError: something survived.
        """
        held = self._held
        if held.supervisor is None or held.starting is None:
            return
        if not held.starting.done():
            held.starting.cancel()
        await asyncio.wait((held.starting,))
        if not held.starting.cancelled():
            held.starting.exception()  # it stands in the supervisor's `failed` as well
        await held.supervisor.stop()

    @property
    def container(self) -> JobContainer:
        """The job's launched container."""
        return self.job.container

    @property
    def spool(self) -> Spool:
        """The job's output."""
        return self.job.spool

    @property
    def steps(self) -> StepRunner:
        """What runs steps in the job's launched container."""
        return self.job.steps

    # ---- end

    async def read_evidence(self) -> tuple[Evidence, ResourceUsage]:
        """What the kernel counted for the job, once the tree is dead and before its cgroup goes."""
        return await self.job.read_evidence()

    async def collect_outputs(self) -> tuple[CollectedOutput, ...]:
        """Take what the job promised out of its writable layer."""
        source = Path(self.job.placed.sources["output"])
        declared, destination = self.request.spec.outputs, self.request.workspace.output
        if not declared and destination is None:
            return ()
        return await self._services.in_pool(lambda: collect(source, declared, destination))

    async def save_caches(self, *, keep: bool) -> tuple[CacheReport, ...]:
        """Keep what the job left in its caches, if `keep`. While its mounts are up, once its tree is dead."""
        caches = self._held.caches
        if caches is None:
            return ()
        if not keep:
            return caches.unsaved("the job did not succeed")
        planned, placed, base = self.planned, self.job.placed, self.job.uid_base
        # Not in the pool of host work: a cache may be large, and other jobs' clean-up would wait for it.
        return await shielded(asyncio.to_thread(caches.save, planned, placed, base))

    async def discard(self) -> None:
        """Undo an attempt that has no reader of its output."""
        await self.clean_up()
        await self.remove_outputs()

    async def remove_outputs(self) -> None:
        """Delete what its containers wrote."""
        for member in self._members():
            await member.remove_output()

    def _members(self) -> tuple[Member, ...]:
        held = self._held
        job = () if held.job is None else (held.job,)
        return (*job, *(container.member for container in held.services))

    async def clean_up(self) -> tuple[str, ...]:
        """Undo everything in reverse, past errors. Repeating it is no error.

        :returns: what could not be undone, a line each; the ledger then stays for `recover`.
        """
        held = self._held
        members = self._members()
        errors: list[str] = []
        if held.supervisor is not None:
            await past_errors(errors, self.stop_services())
        for found in await asyncio.gather(*(member.clean_up() for member in members)):
            errors.extend(found)
        if held.network is not None:
            errors += await held.network.close()
        if held.job is None or not errors:
            # What can't be undone keeps its image: that goes with the container made of it.
            for image in held.images:
                await past_errors(errors, image.let_go())
                image.close()
            if held.caches is not None:
                held.caches.close()
        return tuple(errors)

    def provenance(self) -> Provenance:
        """What really ran; every claim was checked at the gate."""
        prepared = self.prepared
        image = self.job.blueprint.image
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
            image=None if image is None else image.used,
            stricter=self.job.container.stricter if self.job.launched else (),
            engine_image="" if self.rootfs.engine is None else self.rootfs.engine.identity,
        )

    def _note_phase(self, name: str, seconds: float) -> None:
        self.phases[name] = seconds


async def _both(attaching: asyncio.Future[A], planning: asyncio.Future[B]) -> tuple[A, B]:
    """Both to their end, whatever comes of one: what either made is then known, and can be undone."""
    await asyncio.wait((attaching, planning))
    failures = [error for error in (planning.exception(), attaching.exception()) if error is not None]
    if failures:
        raise failures[0]
    return attaching.result(), planning.result()


async def _all_of(makings: Sequence[asyncio.Future[None]]) -> None:
    """All to their end; then the first failure."""
    await asyncio.wait(makings)
    failures = [error for making in makings if (error := making.exception()) is not None]
    if failures:
        raise failures[0]
