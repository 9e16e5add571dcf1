"""One request as the executor takes it (seed, section 7), and how a Job becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forgeyard_model.cache import CacheRequest, checked_caches
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job, Output, Step, Timeouts
from forgeyard_model.limits import ResourceLimits, ResourceReservation
from forgeyard_model.policy import (
    CapabilityGrant,
    DevicePolicy,
    FilesystemPolicy,
    Need,
    NetworkMode,
    NetworkPolicy,
    PrivilegePolicy,
    ProcessPolicy,
    SandboxPolicy,
)
from forgeyard_model.profile import PROFILES, ExecutionProfile, ProfileRules
from forgeyard_model.services import ServiceSpec, checked_services


@dataclass(frozen=True, slots=True)
class PlannedJobSpec:
    """The work itself: which root filesystem, which steps, what is promised."""

    name: str
    image: str | None
    steps: tuple[Step, ...]
    user: str | None = None
    workdir: str | None = None
    outputs: tuple[Output, ...] = ()
    platform: str | None = None
    entrypoint: tuple[str, ...] | None = None
    merge_output: bool = False
    caches: tuple[CacheRequest, ...] = ()
    services: tuple[ServiceSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedWorkspace:
    """Host paths of the attempt: the source tree (None: no source) and where outputs go (None: nowhere)."""

    source: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class RuntimeEnvironment:
    """Variables that the job sees beside the fixed ones. Nothing is inherited."""

    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ExecutionRequest:
    """A request whose every field has been checked; nothing on the host has been touched."""

    context: AttemptContext
    spec: PlannedJobSpec
    workspace: PreparedWorkspace
    resources: ResourceReservation
    limits: ResourceLimits
    sandbox: SandboxPolicy
    network: NetworkPolicy
    environment: RuntimeEnvironment
    profile: ExecutionProfile
    timeouts: Timeouts
    output_cap: int


def request_from_job(
    job: Job, *, context: AttemptContext, workspace: PreparedWorkspace, caches_anywhere: bool = False
) -> ExecutionRequest:
    """Expand a job by its profile (section 172). Pure.

    :param caches_anywhere: the configuration lets every profile use caches.
    :raises InvalidRequest: for a value the profile does not allow, named with the cure.
    """
    rules = PROFILES[job.profile]
    network = job.network or NetworkPolicy(rules.default_network)
    _check_allowed(job, rules, network)
    if job.caches and not (rules.caches or caches_anywhere):
        raise InvalidRequest(
            "caches",
            job.caches[0].key,
            f"profile {job.profile.value} takes nothing from earlier jobs: take caches out, or choose another profile",
        )
    limits = job.limits.or_default(rules.limits)
    services = checked_services(job.services, digest_required=rules.digest_required)
    if limits.cpus is None or limits.memory is None or limits.pids is None:
        raise InvalidRequest("resources", job.profile.value, "cpus, memory and pids need a value")
    return ExecutionRequest(
        context=context,
        spec=PlannedJobSpec(
            name=job.name,
            image=job.image,
            steps=tuple(job.steps),
            user=job.user,
            workdir=job.workdir,
            outputs=job.outputs,
            platform=job.platform,
            entrypoint=job.entrypoint,
            merge_output=job.merge_output,
            caches=checked_caches(job.caches, taken=(path.destination for path in (*job.toolchains, *job.host_paths))),
            services=services,
        ),
        workspace=workspace,
        resources=_reserved(limits.cpus, limits.memory, limits.disk, limits.pids, services),
        limits=limits,
        sandbox=_policy(job, rules, network),
        network=network,
        environment=RuntimeEnvironment(MappingProxyType(dict(job.env))),
        profile=job.profile,
        timeouts=job.timeouts,
        output_cap=job.output_cap,
    )


def _reserved(
    cpus: float, memory: int, disk: int | None, pids: int, services: tuple[ServiceSpec, ...]
) -> ResourceReservation:
    """What the scheduler sets aside: the job's own limits and those of its services together."""
    limits = [service.limits for service in services]
    return ResourceReservation(
        cpus + sum(limit.cpus or 0.0 for limit in limits),
        memory + sum(limit.memory or 0 for limit in limits),
        disk,
        pids + sum(limit.pids or 0 for limit in limits),
    )


def _check_allowed(job: Job, rules: ProfileRules, network: NetworkPolicy) -> None:
    if network.mode not in rules.networks:
        allowed = ", ".join(mode.value for mode in rules.networks)
        raise InvalidRequest("network", network.mode.value, f"profile {job.profile.value} allows {allowed}")
    _check_network(job, network)
    if job.source_mode is not None and job.source_mode not in rules.source_modes:
        allowed = ", ".join(mode.value for mode in rules.source_modes)
        raise InvalidRequest("source.mode", job.source_mode.value, f"profile {job.profile.value} allows {allowed}")
    if job.capabilities is not None and job.capabilities not in rules.capabilities:
        raise InvalidRequest("capabilities", job.capabilities.value, f"profile {job.profile.value} allows none")
    if job.services and network.mode is NetworkMode.HOST:
        cure = "services need a network of the job's own: choose deny, restricted or allow"
        raise InvalidRequest("network", network.mode.value, cure)
    if job.image is not None and rules.digest_required and "@sha256:" not in job.image:
        raise InvalidRequest(
            "image", job.image, f"profile {job.profile.value} takes a pinned image: add @sha256:DIGEST"
        )


def _check_network(job: Job, network: NetworkPolicy) -> None:
    if network.audit and network.mode is not NetworkMode.ALLOW:
        raise InvalidRequest("network.audit", network.mode.value, "an audit lets through what allow does: choose allow")
    if bool(network.conflist) != (network.mode is NetworkMode.CONFLIST):
        raise InvalidRequest("network", network.mode.value, "name the operator's network: network: {conflist: NAME}")
    if not network.publish:
        return
    if job.profile is not ExecutionProfile.DEVELOPMENT:
        raise InvalidRequest("network.publish", job.profile.value, "only profile development publishes ports")
    if network.mode in (NetworkMode.HOST, NetworkMode.CONFLIST):
        raise InvalidRequest("network.publish", network.mode.value, "this network is not ours to publish ports of")
    names = {name for service in job.services for name in service.names}
    for port in network.publish:
        port.check()
        if port.service not in names:
            raise InvalidRequest("network.publish.service", port.service, "no service has this name")


def _policy(job: Job, rules: ProfileRules, network: NetworkPolicy) -> SandboxPolicy:
    grant = job.capabilities
    if grant is None:
        # CONTRACT: on by default in development for root, since apt-get is what people try first there.
        as_root = job.user in ("root", "0") and job.profile is ExecutionProfile.DEVELOPMENT
        grant = CapabilityGrant.ROOT_IN_USERNS if as_root else CapabilityGrant.NONE
    if grant is CapabilityGrant.ROOT_IN_USERNS and job.image is None:
        raise InvalidRequest("capabilities", grant.value, "needs image mode: the host's /usr is read-only")
    isolation = rules.isolation
    if grant is CapabilityGrant.ROOT_IN_USERNS:
        # Those capabilities are safe only inside a user namespace of the job's own.
        isolation = type(isolation)(isolation.minimum, Need.REQUIRED)
    return SandboxPolicy(
        isolation=isolation,
        filesystem=FilesystemPolicy(
            source_mode=job.source_mode or rules.source_mode,
            root_read_only=rules.root_read_only or job.image is None,
            allow_host_paths=job.host_paths,
            toolchains=job.toolchains,
        ),
        network=network,
        process=ProcessPolicy(),
        devices=DevicePolicy(),
        privileges=PrivilegePolicy(grant),
    )


def impurities(request: ExecutionRequest) -> tuple[str, ...]:
    """Why a run of `request` is not hermetic, for provenance (sections 168-170). Empty: nothing impure was asked."""
    reasons = []
    if request.network.mode is NetworkMode.HOST:
        reasons.append("host network")
    elif request.network.mode is NetworkMode.CONFLIST:
        reasons.append(f"network conflist {request.network.conflist}")
    elif request.network.mode is not NetworkMode.DENY:
        reasons.append(f"network {'audit' if request.network.audit else request.network.mode.value}")
    reasons.extend(f"published port {port.host_port} of {port.service}" for port in request.network.publish)
    if request.spec.image is None:
        reasons.append("host rootfs")
    if request.sandbox.filesystem.source_mode.value == "rw":
        reasons.append("source written in place")
    reasons.extend(f"cache {cache.key} {cache.mode.value}" for cache in request.spec.caches)
    reasons.extend(f"host rootfs of service {item.name}" for item in request.spec.services if item.image is None)
    reasons.extend(f"host path {path.source}" for path in request.sandbox.filesystem.allow_host_paths)
    return tuple(reasons)
