"""What a request needs of whoever runs it (seed, sections 178-181): for the choice of a backend, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from forgeyard_model.config import ExecutorConfig
from forgeyard_model.policy import CapabilityGrant, IsolationLevel, Need, NetworkMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import ExecutionRequest


@dataclass(frozen=True, slots=True)
class ExecutionRequirements:
    """A request's demands.

    :param image: it brings an image; otherwise it runs on the host rootfs.
    :param minimum: the weakest boundary it may run behind, as its profile or the job has it.
    :param user_namespace: it may not run without one of its own. Where it may, the level that it then lacks does not
        count against `minimum`; it does against an organisation's.
    :param profile: name of who demands it, for messages.
    """

    image: bool
    minimum: IsolationLevel
    network: NetworkMode
    user_namespace: bool
    disk_limit: bool
    profile: str = ""

    @classmethod
    def of(cls, request: ExecutionRequest, config: ExecutorConfig) -> ExecutionRequirements:
        """The demands of `request` under `config`."""
        return cls(
            image=request.spec.image is not None,
            minimum=request.sandbox.isolation.minimum,
            network=request.network.mode,
            user_namespace=needs_user_namespace(request, config),
            disk_limit=request.limits.disk is not None,
            profile=request.profile.value,
        )


def needs_user_namespace(request: ExecutionRequest, config: ExecutorConfig) -> bool:
    """Whether `request` may not run without a user namespace of its own.

    The operator's word lowers what standard-ci demands and nothing above it, and never for a job with root's rights.
    """
    if request.sandbox.privileges.capabilities is not CapabilityGrant.NONE:
        return True
    if request.sandbox.isolation.user_namespace is Need.PREFERRED:
        return False
    return request.profile is not ExecutionProfile.STANDARD_CI or config.user_namespace is not Need.PREFERRED
