"""By which labels containers and pods of ours are found, and nothing of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forgeyard_host.processes import boot_id
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.podman.client import Deadlines

SANDBOX: Final = "forgeyard.sandbox"
EXECUTOR: Final = "forgeyard.executor"
STATE: Final = "forgeyard.state"
BOOT: Final = "forgeyard.boot"
DIRECTORY: Final = "forgeyard.directory"
_ANNOTATION: Final = "dev.forgeyard.sandbox"


@dataclass(frozen=True, slots=True)
class PodmanSettings:
    """How an executor uses Podman.

    :param executor: its id.
    :param state: what names its state directory (a digest); a sweep looks at no other's containers.
    :param url: of the service's socket; None takes CONTAINER_HOST, or the usual place.
    :param pods: containers that share a network are shown as a pod.
    """

    executor: str
    state: str
    url: str | None = None
    pods: bool = True
    deadlines: Deadlines = field(default_factory=Deadlines)

    def labels(self, sandbox: str) -> dict[str, str]:
        """Of everything that is made for `sandbox`."""
        return {SANDBOX: sandbox, EXECUTOR: self.executor, STATE: self.state, BOOT: boot_id()}

    def container_labels(self, sandbox: str, ref: ContainerRef) -> dict[str, str]:
        """Of a container."""
        return {**self.labels(sandbox), DIRECTORY: str(ref.directory)}

    def ours(self, **more: str) -> str:
        """The filter of a listing that shows what belongs to this state directory, and has `more` labels by name."""
        wanted = [f"{STATE}={self.state}", *(f"forgeyard.{name}={value}" for name, value in more.items())]
        return json.dumps({"label": wanted})


def sandbox_of(spec: Mapping[str, Any], ref: ContainerRef) -> str:
    """Whose bundle it is."""
    return str(spec.get("annotations", {}).get(_ANNOTATION, ref.container_id))


def pod_of(spec: Mapping[str, Any], ref: ContainerRef) -> str | None:
    """The name of the pod that a bundle's container belongs to: one for all that are in a network made for them."""
    joins = any(entry["type"] == "network" and entry.get("path") for entry in spec["linux"]["namespaces"])
    return f"fy-pod-{sandbox_of(spec, ref)}" if joins else None
