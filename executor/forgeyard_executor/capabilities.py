"""What of a host each job needs, and the refusal where a probe saw that it is not there.

A job never waits for probes. Before the first ones are done, and beside them, each job rests on what its own
preparation and the gate verify; the probes make a refusal early, and say what is missing and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.policy import NetworkMode, SourceMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.requirements import needs_user_namespace

if TYPE_CHECKING:
    from forgeyard_networks.manager import NetworkCapabilities

DEFAULTS: Final = ExecutorConfig()

PROBE_NAME: Final = "forgeyard-probe"
"""Name of the job that looks at its own sandbox."""

ALWAYS: Final = frozenset(
    {
        Feature.USER_NAMESPACE,
        Feature.MOUNT_NAMESPACE,
        Feature.PID_NAMESPACE,
        Feature.CGROUP_NAMESPACE,
        Feature.SECCOMP,
        Feature.NO_NEW_PRIVS,
        Feature.CAPABILITY_DROP,
        Feature.KILL_TREE,
        Feature.READ_ONLY_BIND,
        Feature.TMPFS,
        Feature.IDMAPPED_MOUNT,
    }
)
"""What every sandbox is made of."""

LIMITS: Final = frozenset(
    {Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.PIDS_LIMIT, Feature.CPU_LIMIT, Feature.OOM_EVIDENCE}
)
NETWORK: Final = frozenset({Feature.NETWORK_NAMESPACE, Feature.NETWORK_DENY})
STANDARD_CI: Final = ALWAYS | LIMITS | NETWORK | {Feature.OVERLAY}
"""What a job of the profile standard-ci needs, with a source and without a disk limit."""


def needed(request: ExecutionRequest, config: ExecutorConfig = DEFAULTS) -> Iterator[Feature]:
    """The features that a sandbox for `request` is made of under `config`."""
    limits = request.limits
    spared = frozenset() if needs_user_namespace(request, config) else frozenset({Feature.USER_NAMESPACE})
    yield from sorted(ALWAYS - spared)
    if request.network.mode is not NetworkMode.HOST:
        yield Feature.NETWORK_NAMESPACE
    if request.network.mode is NetworkMode.DENY:
        yield Feature.NETWORK_DENY
    if limits.memory is not None:
        yield from (Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.OOM_EVIDENCE)
    if limits.pids is not None:
        yield Feature.PIDS_LIMIT
    if limits.cpus is not None:
        yield Feature.CPU_LIMIT
    if limits.disk is not None:
        yield Feature.DISK_LIMIT
    cow = request.workspace.source is not None and request.sandbox.filesystem.source_mode is SourceMode.COW
    if cow or request.spec.image is not None:
        yield Feature.OVERLAY


def refuse_missing(
    request: ExecutionRequest, capabilities: ExecutorCapabilities | None, config: ExecutorConfig = DEFAULTS
) -> None:
    """Refuse `request` when a probe saw that something it needs does not work.

    :param capabilities: None: nothing is known at the moment, and the gate decides alone.
    :raises SandboxError: UNSUPPORTED_ISOLATION or RESOURCE_LIMIT_FAILED, with the probe's own words and cure.
    """
    if capabilities is None:
        return
    wanted = frozenset(needed(request, config))
    for probe in capabilities.probes:
        if probe.feature in wanted and probe.seen and not probe.works:
            raise _missing(probe)


def conclusive(capabilities: ExecutorCapabilities | None) -> ExecutorCapabilities | None:
    """`capabilities`, if every probe could be carried out.

    One that could not be (its sandbox did not start, for a moment's want of something) claims nothing, but is no
    reason to refuse jobs: they rest on the gate, as before the first probe.
    """
    if capabilities is None or not all(probe.seen for probe in capabilities.probes):
        return None
    return capabilities


def with_networks(found: ExecutorCapabilities, networks: NetworkCapabilities) -> ExecutorCapabilities:
    """`found`, with what networks of jobs' own this host can make."""
    works = {NetworkMode.RESTRICTED, NetworkMode.ALLOW} <= networks.modes
    probe = Probe(Feature.NETWORK_EGRESS, works, networks.backend, networks.problem, networks.cure)
    modes = found.network_modes | (networks.modes - {NetworkMode.DENY, NetworkMode.HOST})
    return replace(found, network_modes=modes, probes=(*found.probes, probe))


def _missing(probe: Probe) -> SandboxError:
    limit = probe.feature in LIMITS or probe.feature is Feature.DISK_LIMIT
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED if limit else SandboxErrorKind.UNSUPPORTED_ISOLATION,
        f"no_{probe.feature.value}",
        f"this host does not provide {probe.feature.value}, which the job needs",
        details=probe.details,
        resolution=probe.cure,
    )


def reason_of(error: ForgeyardError) -> str:
    """The reason word of an error, that of the sandbox's own where there is one."""
    sandbox = getattr(error, "sandbox", None)
    return str(getattr(sandbox or error, "reason", ""))
