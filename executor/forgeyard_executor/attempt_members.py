"""What the containers of an attempt will be, the job's and its services': each decided here, and made by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forgeyard_executor.disk import watch_disk, watch_layer
from forgeyard_executor.member import Blueprint, Member, attempt_group
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import NetworkAttachment, RootfsPlan
from forgeyard_model.profile import PROFILES
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.services import ServiceSpec
from forgeyard_process_shim.hostroot import hosts_file
from forgeyard_runtimes.container import LEAF

if TYPE_CHECKING:
    from forgeyard_executor.attempt_caches import AttemptCaches
    from forgeyard_executor.images import ReadyImage
    from forgeyard_executor.networked import Networked
    from forgeyard_executor.planning import Planned
    from forgeyard_executor.service_members import ServiceContainer
    from forgeyard_executor.services import HostServices

SERVICE_OUTPUT: Final = 64 << 20
"""Bytes of a service's output that are kept, the first half and the last, where the job's own cap is no less."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """A container and what it will be."""

    rootfs: RootfsPlan
    planned: Planned


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service and what it will be."""

    spec: ServiceSpec
    rootfs: RootfsPlan
    planned: Planned


@dataclass(frozen=True, slots=True)
class MemberMaking:
    """Whose containers they are."""

    services: HostServices
    request: ExecutionRequest
    sandbox: SandboxId

    @property
    def group(self) -> str:
        """The control group of the whole attempt."""
        return attempt_group(self.services.executor_id, self.sandbox)

    def job(
        self,
        plan: MemberPlan,
        network: Networked | NetworkAttachment,
        *,
        image: ReadyImage | None,
        caches: AttemptCaches | None,
    ) -> Member:
        """The job's own container, not made yet.

        :param network: the attempt's own, or what there is without any.
        """
        services, request = self.services, self.request
        own = None if isinstance(network, NetworkAttachment) else network
        blueprint = Blueprint(
            sandbox=self.sandbox,
            group=self.group,
            leaf=LEAF,
            leaves=self._leaf_names(),
            about={"attempt": request.context.attempt_id, "name": request.spec.name},
            rootfs=plan.rootfs,
            planned=plan.planned,
            network=network if isinstance(network, NetworkAttachment) else network.attachment(),
            plumb=None if own is None else own.plumb(),
            files={"hosts": hosts_file(self.sandbox.hostname)} if own is None else own.files(),
            output_cap=request.output_cap,
            disk_limit=request.limits.disk,
            merge_output=request.spec.merge_output,
            image=image,
            caches=caches,
        )
        directory = str(services.paths.attempt(self.sandbox))
        return Member(services, blueprint, watch_disk(services.host, directory, request))

    def service(
        self, number: int, planned: ServicePlan, network: Networked, images: Mapping[str, ReadyImage]
    ) -> ServiceContainer:
        """A service's container, not made yet.

        :param number: from 1, in the order declared.
        :param images: by the service's name.
        """
        from forgeyard_executor.service_members import ServiceContainer

        services, request, spec, sandbox = self.services, self.request, planned.spec, SandboxId.mint()
        blueprint = Blueprint(
            sandbox=sandbox,
            group=self.group,
            leaf=self._leaf_names()[number],
            about={"attempt": request.context.attempt_id, "name": spec.name, "of": self.sandbox.value},
            rootfs=planned.rootfs,
            planned=network.for_service(spec, planned.planned),
            network=network.attachment(spec),
            plumb=network.plumb(spec),
            files=network.files(spec),
            output_cap=min(request.output_cap, SERVICE_OUTPUT),
            disk_limit=spec.limits.disk,
            hostname=spec.name,
            probes=True,
            image=images.get(spec.name),
        )
        watched = PROFILES[request.profile].disk_watched
        directory = str(services.paths.attempt(sandbox))
        disk = watch_layer(services.host, directory, spec.limits.disk, watched=watched)
        return ServiceContainer(spec, Member(services, blueprint, disk), network)

    def _leaf_names(self) -> tuple[str, ...]:
        """The control groups of an attempt: the job's, then its services'."""
        return (LEAF, *(f"svc-{number}" for number in range(1, len(self.request.spec.services) + 1)))


def service_notes(container: ServiceContainer) -> tuple[str, ...]:
    """What a reader of the result should know of a service as it was made."""
    member = container.member
    plan = member.blueprint.planned.plan
    notes = [f"service {container.spec.name}: {note}" for note in member.placed.notes]
    if plan.capabilities:
        held = ", ".join(name.removeprefix("CAP_").lower() for name in plan.capabilities)
        notes.append(f"service {container.spec.name} starts as root of a user namespace of its own, with {held}")
    return (*member.blueprint.planned.notes, *notes)
