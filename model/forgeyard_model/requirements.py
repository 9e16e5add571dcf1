"""What a request needs of whoever runs it (seed, sections 178-181): for the choice of a backend, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.request import ExecutionRequest


@dataclass(frozen=True, slots=True)
class ExecutionRequirements:
    """A request's demands.

    :param image: it brings an image; otherwise it runs on the host rootfs.
    :param minimum: the weakest boundary it may run behind, as its profile or the job has it.
    :param profile: name of who demands it, for messages.
    """

    image: bool
    minimum: IsolationLevel
    network: NetworkMode
    user_namespace: bool
    disk_limit: bool
    profile: str = ""

    @classmethod
    def of(cls, request: ExecutionRequest) -> ExecutionRequirements:
        """The demands of `request`. Every bundle has a user namespace, also where a profile only prefers one."""
        return cls(
            image=request.spec.image is not None,
            minimum=request.sandbox.isolation.minimum,
            network=request.network.mode,
            user_namespace=True,
            disk_limit=request.limits.disk is not None,
            profile=request.profile.value,
        )
