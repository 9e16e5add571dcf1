"""What the executor makes of a request before anything is made: which images, which roots, which plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forgeyard_executor.attempt import Companions
from forgeyard_executor.config_apply import canonical_image
from forgeyard_executor.engine_images import at_engine
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_executor.images import AS_USUAL, ImageOptions, ImageRequest, Images, ReadyImage
from forgeyard_executor.networked import is_networked
from forgeyard_executor.networks import Networks
from forgeyard_executor.planning import Planned, plan_request, process_mode_user
from forgeyard_executor.requested import Requested, request_for
from forgeyard_executor.services import HostServices
from forgeyard_executor.sources import canonical_request, split_root_approvals
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job
from forgeyard_model.plan import RootfsPlan
from forgeyard_model.policy import IsolationLevel
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace
from forgeyard_model.services import ServiceSpec
from forgeyard_process_shim.hostroot import HostRootfs

if TYPE_CHECKING:
    from forgeyard_oci.registry.budget import Budget

T = TypeVar("T")


class Planner:
    """Decides, for one executor. Nothing it returns holds anything but images, which are their taker's to close."""

    def __init__(self, services: HostServices, config: ExecutorConfig, images: Images, networks: Networks) -> None:
        self._services = services
        self._config = config
        self._images = images
        self._networks = networks
        self._host_rootfs: dict[tuple[bool, bool], HostRootfs] = {}

    async def ready_images(self, requested: Requested) -> tuple[ReadyImage | None, Mapping[str, ReadyImage]]:
        """The job's image and those of its services, by name, all at once. After a failure none is held."""
        services = requested.service_images
        own = () if requested.image is None else (requested.image,)
        found = await self._images.all_ready((*own, *services.values()), requested.options, self._services.in_pool)
        if (engine := self._services.runtime.images) is not None and found:
            found = await at_engine(found, engine)
        return (found[0] if own else None), dict(zip(services, found[len(own) :], strict=True))

    def companions(
        self, request: ExecutionRequest, isolation: IsolationLevel, images: Mapping[str, ReadyImage]
    ) -> Companions | None:
        """What `request` has beside its job; None for a job alone on a network that nothing is made for."""
        if not is_networked(request):
            return None

        def plan(service: ServiceSpec, image: ReadyImage | None) -> tuple[RootfsPlan, Planned]:
            return self.plan_service(request, service, isolation, image)

        return Companions(lambda sandbox: self._networks.attach(sandbox, request), plan, images)

    async def blocking(self, requested: Requested, call: Callable[[Budget | None], T]) -> T:
        """Run `call` in the pool for host work, or in that for pulls when it may have to pull."""
        if requested.image is None and not requested.service_images:
            return await self._services.in_pool(lambda: call(None))
        return await self._images.work(call, seconds=requested.request.timeouts.prepare)

    @contextmanager
    def held(
        self, wanted: ImageRequest | None, requested: Requested, budget: Budget | None
    ) -> Iterator[ReadyImage | None]:
        """An image, held for the block; None on the host rootfs. Blocking."""
        if wanted is None:
            yield None
            return
        with closing(self._images.take(wanted, requested.options, budget)) as image:
            yield image

    async def requested(
        self,
        job: Job,
        context: AttemptContext,
        source: str | Path | None,
        output: str | Path | None = None,
        *,
        images: ImageOptions = AS_USUAL,
    ) -> Requested:
        """`job` as a request, under the configuration and the lock of `images`."""
        workspace = PreparedWorkspace(None if source is None else str(source), None if output is None else str(output))
        return await request_for(job, context, workspace, config=self._config, images=self._images, options=images)

    def canonical(self, request: ExecutionRequest) -> ExecutionRequest:
        """`request` with its paths and its image as rules are matched against them."""
        return canonical_image(canonical_request(request, self._services.paths.root), self._config)

    def facts(self, known: ExecutorCapabilities | None, lowered: Mapping[str, float | None]) -> HostFacts:
        """What requests are judged by: the probes' findings, or the adapter's claims while there are none."""
        backend = known or self._services.runtime.capabilities()
        backend = replace(backend, network_modes=backend.network_modes | self._networks.modes)
        network = self._networks.known
        return HostFacts((backend,), self._services.nofile_ceiling, self._config, lowered=lowered, networks=network)

    def plan(
        self,
        request: ExecutionRequest,
        isolation: IsolationLevel,
        image: ReadyImage | None,
        notes: tuple[str, ...] = (),
        *,
        user_namespace: bool | None = None,
    ) -> tuple[RootfsPlan, Planned]:
        """The root and the plan of the job itself. Blocking."""
        if image is not None:
            rootfs = image.rootfs
        else:
            request, local, opt = split_root_approvals(request)
            rootfs = replace(self._host_root(local=local, opt=opt), user=process_mode_user(request.spec.user))
        ceiling = self._services.nofile_ceiling
        planned = plan_request(
            request,
            rootfs,
            isolation=isolation,
            nofile_ceiling=ceiling,
            networked=is_networked(request),
            user_namespace=self._user_namespaces if user_namespace is None else user_namespace,
        )
        return rootfs, replace(planned, notes=(*notes, *planned.notes))

    def plan_service(
        self, request: ExecutionRequest, service: ServiceSpec, isolation: IsolationLevel, image: ReadyImage | None
    ) -> tuple[RootfsPlan, Planned]:
        """The root and the plan of a service. Blocking."""
        from forgeyard_executor.service_planning import plan_service

        if image is not None:
            rootfs = image.rootfs
        else:
            rootfs = replace(self._host_root(local=False, opt=False), user=process_mode_user(service.user))
        ceiling = self._services.nofile_ceiling
        return rootfs, plan_service(
            service,
            request,
            rootfs,
            isolation=isolation,
            nofile_ceiling=ceiling,
            user_namespace=self._user_namespaces,
        )

    @property
    def _user_namespaces(self) -> bool:
        return self._services.runtime.capabilities().user_namespace

    def _host_root(self, *, local: bool, opt: bool) -> RootfsPlan:
        if (local, opt) not in self._host_rootfs:
            self._host_rootfs[local, opt] = HostRootfs(self._services.paths.rootfs, local=local, opt=opt)
        return self._host_rootfs[local, opt].plan()
