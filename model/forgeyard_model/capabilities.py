"""What an executor can do on this host (seed, sections 10, 175-185): filled by probes, not by hope."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from forgeyard_model.policy import IsolationLevel, NetworkMode


class ExecutorKind(StrEnum):
    """Kinds of executor (section 10)."""

    PROCESS = "process"
    CONTAINER = "container"
    VIRTUAL_MACHINE = "virtual_machine"
    CONFIDENTIAL = "confidential"


class Feature(StrEnum):
    """Single things that a sandbox is made of, each with a probe that uses it (sections 182-188)."""

    USER_NAMESPACE = "user_namespace"
    MOUNT_NAMESPACE = "mount_namespace"
    PID_NAMESPACE = "pid_namespace"
    NETWORK_NAMESPACE = "network_namespace"
    CGROUP_NAMESPACE = "cgroup_namespace"
    SECCOMP = "seccomp"
    NO_NEW_PRIVS = "no_new_privs"
    CAPABILITY_DROP = "capability_drop"
    KILL_TREE = "kill_tree"
    CPU_LIMIT = "cpu_limit"
    MEMORY_LIMIT = "memory_limit"
    SWAP_LIMIT = "swap_limit"
    PIDS_LIMIT = "pids_limit"
    DISK_LIMIT = "disk_limit"
    READ_ONLY_BIND = "read_only_bind"
    TMPFS = "tmpfs"
    OVERLAY = "overlay"
    IDMAPPED_MOUNT = "idmapped_mount"
    REFLINK = "reflink"
    QUOTA = "quota"
    OOM_EVIDENCE = "oom_evidence"
    NETWORK_DENY = "network_deny"
    NETWORK_EGRESS = "network_egress"


@dataclass(frozen=True, slots=True)
class Probe:
    """What one probe found.

    :param works: the feature was used and did what it is for.
    :param by: what enforces it, such as "cgroup v1 memory controller".
    :param details: what was seen; for one that does not work, the error.
    :param cure: what an operator can do about it; empty when it works.
    :param seen: False when the probe could not be carried out. Nothing is known then, and nothing is claimed.
    """

    feature: Feature
    works: bool
    by: str = ""
    details: str = ""
    cure: str = ""
    seen: bool = True


@dataclass(frozen=True, slots=True)
class ResourceControls:
    """Limits that the host really enforces."""

    cpu: bool
    memory: bool
    pids: bool
    disk: bool


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """Claims of one backend on this host, and the probes behind them.

    :param cgroup: "v1" (also hybrid) or "v2"; empty when none was found. controllers: those really there.
    :param rootfs: who unpacks images: ``own`` (the executor), or the engine's ``snapshotter`` or ``image`` store.
    """

    runtime: str
    isolation_levels: frozenset[IsolationLevel]
    network_modes: frozenset[NetworkMode]
    resource_controls: ResourceControls
    user_namespace: bool
    seccomp: bool
    kinds: frozenset[ExecutorKind] = frozenset({ExecutorKind.PROCESS, ExecutorKind.CONTAINER})
    cgroup: str = ""
    controllers: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = field(default=())
    probed_at: datetime | None = None
    rootfs: str = "own"

    def has(self, feature: Feature) -> bool:
        """Whether a probe saw `feature` work. One that was not probed is not had."""
        return any(probe.feature is feature and probe.works for probe in self.probes)
