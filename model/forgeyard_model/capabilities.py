"""What an executor can do on this host (seed, sections 10, 182-185). Filled by probes, never by hope."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forgeyard_model.policy import IsolationLevel, NetworkMode


class ExecutorKind(StrEnum):
    """Kinds of executor (section 10)."""

    PROCESS = "process"
    CONTAINER = "container"
    VIRTUAL_MACHINE = "virtual_machine"
    CONFIDENTIAL = "confidential"


@dataclass(frozen=True, slots=True)
class ResourceControls:
    """Limits that the host really enforces."""

    cpu: bool
    memory: bool
    pids: bool
    disk: bool


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """Claims of one backend on this host."""

    runtime: str
    isolation_levels: frozenset[IsolationLevel]
    network_modes: frozenset[NetworkMode]
    resource_controls: ResourceControls
    user_namespace: bool
    seccomp: bool
