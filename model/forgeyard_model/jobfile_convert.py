"""A job file's meaning as a Job. What this version can't run is refused by name, never dropped (law 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, TypeVar

from forgeyard_model.cache import CacheRequest
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.job import Job, Output, Shell, Step, Timeouts
from forgeyard_model.jobfile_services import describe_service, refuse_unlimited_services
from forgeyard_model.jobfile_support import (
    UNLIMITED,
    refuse_unlimited,
    resolve,
    resolve_image,
    unsupported,
)
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import (
    ApprovedHostPath,
    NetworkDestination,
    NetworkMode,
    NetworkPolicy,
    PublishedPort,
)
from forgeyard_model.profile import PROFILES

if TYPE_CHECKING:
    from forgeyard_model.jobfile import JobFile
    from forgeyard_model.jobfile_parts import Network, StepFile

_T = TypeVar("_T", int, float)

SOURCE_DIR: Final = "/work/source"
TOOLCHAINS_DIR: Final = "/toolchains"


def not_supported(file: JobFile) -> Iterator[ExecutorError]:
    """Every part of `file` that this version can't run, as the refusals that `JobFile.to_job` raises."""
    for field in ("secrets", "devices"):
        if getattr(file, field):
            yield unsupported(field, "not supported in this version", "take it out")
    try:
        refuse_unlimited_services(file.services)
    except ExecutorError as error:
        yield error
    for field, value in _unlimited_fields(file):
        try:
            # No profile sets a default for disk, so leaving it unlimited is what happens anyway.
            refuse_unlimited(field, None if field == "resources.disk" else value)
        except ExecutorError as error:
            yield error


def job_from_file(file: JobFile, *, base: str) -> Job:
    """See `JobFile.to_job`."""
    _check_unlimited(file)
    for error in not_supported(file):
        raise error
    return describe_job(file, base=base)


def describe_job(file: JobFile, *, base: str) -> Job:
    """The parts of `file` that a Job can hold, also of a file that can't be run: for checks, never for a run.

    :raises InvalidRequest: for an ``unlimited`` that the profile does not allow.
    """
    _check_unlimited(file)
    return Job(
        steps=tuple(_step(step, index) for index, step in enumerate(file.steps)),
        rootfs=file.rootfs,
        image=None if file.image is None else resolve_image(file.image, base=base),
        name=file.name,
        profile=file.profile,
        limits=_limits(file),
        network=None if file.network is None else _network(file.network),
        env=dict(file.env),
        user=file.user,
        workdir=_inside(file.workdir),
        source_mode=None if file.source is None else file.source.mode,
        toolchains=tuple(
            ApprovedHostPath(resolve(item.path, base=base), f"{TOOLCHAINS_DIR}/{item.name}") for item in file.toolchains
        ),
        outputs=tuple(Output(item.path, item.optional) for item in file.outputs),
        capabilities=file.capabilities,
        timeouts=Timeouts(file.prepare_timeout, file.grace, file.finally_timeout, file.services_timeout),
        merge_output=file.merge_output,
        output_cap=file.output_cap,
        platform=file.platform,
        caches=tuple(CacheRequest(item.key, item.path, item.mode) for item in file.caches),
        services=tuple(describe_service(name, entry, base=base) for name, entry in file.services.items()),
    )


def _inside(path: str | None) -> str | None:
    return None if path is None else str(PurePosixPath(SOURCE_DIR, path))


def _network(network: Network) -> NetworkPolicy:
    if isinstance(network, NetworkMode):
        return NetworkPolicy(network)
    if network.conflist is not None:
        return NetworkPolicy.operator(network.conflist)
    destinations = tuple(
        NetworkDestination(item.host or "", item.cidr or "", item.ports, item.protocols)
        for item in (() if network.restricted is None else network.restricted.allow)
    )
    if network.audit:
        policy = NetworkPolicy.audited(*destinations)
    elif destinations:
        policy = NetworkPolicy.restricted(*destinations)
    else:
        policy = NetworkPolicy(network.mode or NetworkMode.DENY)
    ports = tuple(PublishedPort(item.service, item.port, item.host_port) for item in network.publish)
    return replace(policy, publish=ports)


def _unlimited_fields(file: JobFile) -> tuple[tuple[str, object], ...]:
    limits = file.resources
    return (
        ("resources.cpus", limits.cpus),
        ("resources.memory", limits.memory),
        ("resources.pids", limits.pids),
        ("resources.disk", limits.disk),
        ("timeout", file.timeout),
    )


def _check_unlimited(file: JobFile) -> None:
    if PROFILES[file.profile].unlimited_allowed:
        return
    for field, value in _unlimited_fields(file):
        if value == UNLIMITED:
            raise InvalidRequest(field, value, f"profile {file.profile.value} needs a limit: write a value")


def _limits(file: JobFile) -> ResourceLimits:
    limits = file.resources
    return ResourceLimits(
        cpus=_value(limits.cpus),
        memory=_value(limits.memory),
        disk=_value(limits.disk),
        pids=_value(limits.pids),
        nofile=limits.nofile,
        shm=limits.shm,
        wall_time=_value(file.timeout),
    )


def _value(limit: _T | str | None) -> _T | None:
    # `unlimited` is None here for disk alone: no profile sets a default for it, so None is no limit.
    return None if isinstance(limit, str) else limit


def _step(step: StepFile, index: int) -> Step:
    name = step.name or ("" if step.argv else f"step {index + 1}")
    return Step(
        *(step.argv or ()),
        script=step.run,
        interpreter=step.shell or Shell.SH,
        name=name,
        env=step.env,
        workdir=_inside(step.workdir),
        continue_on_error=step.continue_on_error,
        when=step.when,
        background=step.background,
    )
