"""Execution profiles: one table, printed in docs/, expanded into policy (seed, sections 171-174; CONTRACT.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import (
    CapabilityGrant,
    IsolationLevel,
    IsolationRequirement,
    Need,
    NetworkMode,
    SourceMode,
)


class ExecutionProfile(StrEnum):
    """Named sets of defaults. Command line, job file and API all start from STANDARD_CI."""

    DEVELOPMENT = "development"
    STANDARD_CI = "standard-ci"
    RELEASE = "release"
    HIGH_ASSURANCE = "high-assurance"


@dataclass(frozen=True, slots=True)
class ProfileRules:
    """One column of the table.

    disk_watched: bytes that a job without a disk limit may write before it is killed. Watched, not held by a
    filesystem: that would cost every short job more than it runs. None: the host's disk is the only bound.
    """

    digest_required: bool
    networks: tuple[NetworkMode, ...]
    source_mode: SourceMode
    source_modes: tuple[SourceMode, ...]
    root_read_only: bool
    isolation: IsolationRequirement
    capabilities: tuple[CapabilityGrant, ...]
    limits: ResourceLimits
    unlimited_allowed: bool
    disk_watched: int | None
    caches: bool

    @property
    def default_network(self) -> NetworkMode:
        """Deny in every profile."""
        return NetworkMode.DENY


_MIB, _GIB = 1 << 20, 1 << 30
_LIMITS = ResourceLimits(cpus=2.0, memory=2 * _GIB, disk=None, pids=512, nofile=4096, shm=64 * _MIB, wall_time=3600.0)

PROFILES: dict[ExecutionProfile, ProfileRules] = {
    ExecutionProfile.DEVELOPMENT: ProfileRules(
        digest_required=False,
        networks=(
            NetworkMode.DENY,
            NetworkMode.ALLOW,
            NetworkMode.RESTRICTED,
            NetworkMode.FETCH_ONLY,
            NetworkMode.HOST,
            NetworkMode.CONFLIST,
        ),
        source_mode=SourceMode.COW,
        source_modes=(SourceMode.RO, SourceMode.COW, SourceMode.RW),
        root_read_only=False,
        isolation=IsolationRequirement(IsolationLevel.PROCESS, Need.PREFERRED),
        capabilities=(CapabilityGrant.NONE, CapabilityGrant.ROOT_IN_USERNS),
        limits=_LIMITS,
        unlimited_allowed=True,
        disk_watched=None,
        caches=True,
    ),
    ExecutionProfile.STANDARD_CI: ProfileRules(
        digest_required=True,
        networks=(
            NetworkMode.DENY,
            NetworkMode.RESTRICTED,
            NetworkMode.FETCH_ONLY,
            NetworkMode.ALLOW,
            NetworkMode.CONFLIST,
        ),
        source_mode=SourceMode.COW,
        source_modes=(SourceMode.RO, SourceMode.COW),
        root_read_only=False,
        isolation=IsolationRequirement(IsolationLevel.NAMESPACE, Need.REQUIRED),
        capabilities=(CapabilityGrant.NONE, CapabilityGrant.ROOT_IN_USERNS),
        limits=_LIMITS,
        unlimited_allowed=False,
        disk_watched=10 * _GIB,
        caches=True,
    ),
    ExecutionProfile.RELEASE: ProfileRules(
        digest_required=True,
        networks=(NetworkMode.DENY, NetworkMode.FETCH_ONLY),
        source_mode=SourceMode.RO,
        source_modes=(SourceMode.RO,),
        root_read_only=True,
        isolation=IsolationRequirement(IsolationLevel.NAMESPACE, Need.REQUIRED),
        capabilities=(CapabilityGrant.NONE,),
        limits=_LIMITS,
        unlimited_allowed=False,
        disk_watched=10 * _GIB,
        caches=False,
    ),
    ExecutionProfile.HIGH_ASSURANCE: ProfileRules(
        digest_required=True,
        networks=(NetworkMode.DENY,),
        source_mode=SourceMode.RO,
        source_modes=(SourceMode.RO,),
        root_read_only=True,
        isolation=IsolationRequirement(IsolationLevel.VIRTUAL_MACHINE, Need.REQUIRED),
        capabilities=(CapabilityGrant.NONE,),
        limits=_LIMITS,
        unlimited_allowed=False,
        disk_watched=10 * _GIB,
        caches=False,
    ),
}
