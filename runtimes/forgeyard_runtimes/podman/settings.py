"""Which Podman, and how: given by configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from forgeyard_model.plan import NetworkAttachment
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.labels import sandbox_of
from forgeyard_runtimes.podman.client import Deadlines


@dataclass(frozen=True, slots=True)
class PodmanSettings:
    """How an executor uses Podman.

    :param executor: its id.
    :param state: what names its state directory (a digest); a sweep looks at no other's containers.
    :param url: of the service's socket; None takes CONTAINER_HOST, or the usual place.
    :param pods: the containers of an attempt with a network of its own are shown as a pod.
    :param own_rootfs: images are unpacked by the executor; False leaves it to the engine.
    :param images: directory of the executor's image store: what that forgets goes here too.
    """

    executor: str
    state: str
    url: str | None = None
    pods: bool = True
    own_rootfs: bool = True
    images: str = ""
    deadlines: Deadlines = field(default_factory=Deadlines)


def attempt_of(network: NetworkAttachment, ref: ContainerRef) -> str:
    """Id of the sandbox whose attempt a container is of: its job's; its own where nobody says."""
    return network.attempt or sandbox_of(ref.container_id)


def pod_of(network: NetworkAttachment, ref: ContainerRef) -> str | None:
    """The name of the pod that a container belongs to: one for all of an attempt with a network made for it."""
    return None if network.netns is None else f"fy-pod-{attempt_of(network, ref)}"
