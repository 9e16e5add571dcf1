"""Which backend runs a request: the least costly one that meets every demand, or none (seed, sections 178-181)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_model.capabilities import ExecutorCapabilities, ExecutorKind
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.policy import IsolationLevel
from forgeyard_model.requirements import ExecutionRequirements

COST: Final = (ExecutorKind.PROCESS, ExecutorKind.CONTAINER, ExecutorKind.VIRTUAL_MACHINE, ExecutorKind.CONFIDENTIAL)
"""Least costly first: a VM boots a kernel, a confidential one also proves it."""
_LEVELS: Final = {
    # A process-mode sandbox has all namespaces of its own too; what it shares is the host's /usr.
    ExecutorKind.PROCESS: IsolationLevel.NAMESPACE,
    ExecutorKind.CONTAINER: IsolationLevel.CONTAINER,
    ExecutorKind.VIRTUAL_MACHINE: IsolationLevel.VIRTUAL_MACHINE,
    ExecutorKind.CONFIDENTIAL: IsolationLevel.CONFIDENTIAL_VIRTUAL_MACHINE,
}
_LOWERED: Final = {
    IsolationLevel.NAMESPACE: IsolationLevel.PROCESS,
    IsolationLevel.CONTAINER: IsolationLevel.NAMESPACE,
}
"""What is left of a level without a user namespace: root's bugs are then the host's."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice: a backend, how it runs the request, and the boundary that gives."""

    kind: ExecutorKind
    candidate: ExecutorCapabilities
    isolation: IsolationLevel


@dataclass(frozen=True, slots=True)
class Rejection:
    """One way to run the request that is not good enough. `why`: each unmet demand."""

    runtime: str
    kind: ExecutorKind
    why: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.runtime} ({self.kind.value}): {', '.join(self.why)}"


class ExecutorSelectionError(SandboxError):
    """No backend of this host meets the request's demands. `rejections`: each candidate, and why not."""

    def __init__(self, brief: str, rejections: tuple[Rejection, ...], resolution: str) -> None:
        super().__init__(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "isolation_minimum",
            brief,
            details="; ".join(map(str, rejections)) or "there is no candidate",
            resolution=resolution,
        )
        self.rejections = rejections


class ExecutorSelector:
    """Chooses among backends. Pure."""

    def select(
        self,
        requirements: ExecutionRequirements,
        candidates: Sequence[ExecutorCapabilities],
        organisation_minimum: IsolationLevel = IsolationLevel.NONE,
    ) -> Selection:
        """The least costly choice; among equally costly ones, the first candidate.

        :param organisation_minimum: raises the request's own minimum, never lowers it.
        :raises ExecutorSelectionError: naming each candidate and what it lacks.
        """
        minimum = max(requirements.minimum, organisation_minimum)
        rejections = []
        for kind in COST:
            for candidate in candidates:
                if kind not in candidate.kinds or not _serves(kind, image=requirements.image):
                    continue
                why = tuple(_unmet(requirements, organisation_minimum, kind, candidate))
                if not why:
                    return Selection(kind, candidate, _real(kind, candidate))
                rejections.append(Rejection(candidate.runtime, kind, why))
        who = "the organisation's minimum" if minimum > requirements.minimum else f"profile {requirements.profile}"
        raise ExecutorSelectionError(
            f"no executor of this host meets the demands: {who} needs isolation {minimum.value}",
            tuple(rejections),
            _cure(minimum, image=requirements.image),
        )


def _serves(kind: ExecutorKind, *, image: bool) -> bool:
    """Process mode is the host rootfs, container mode an image; a VM takes both."""
    if kind is ExecutorKind.PROCESS:
        return not image
    return image if kind is ExecutorKind.CONTAINER else True


def _real(kind: ExecutorKind, candidate: ExecutorCapabilities) -> IsolationLevel:
    """The level that a job gets."""
    level = _LEVELS[kind]
    return level if candidate.user_namespace else _LOWERED.get(level, level)


def _unmet(
    requirements: ExecutionRequirements,
    organisation_minimum: IsolationLevel,
    kind: ExecutorKind,
    candidate: ExecutorCapabilities,
) -> Iterator[str]:
    level, real = _LEVELS[kind], _real(kind, candidate)
    if level < requirements.minimum:
        yield f"isolation {level.value} is below {requirements.minimum.value}"
    elif real < organisation_minimum:
        yield f"isolation {real.value} is below {organisation_minimum.value}"
    elif level not in candidate.isolation_levels:
        yield f"isolation {level.value} does not work on this host"
    if requirements.network not in candidate.network_modes:
        yield f"network {requirements.network.value} can't be enforced"
    if requirements.user_namespace and not candidate.user_namespace:
        yield "no user namespace"
    if not candidate.seccomp:
        yield "no seccomp filter"
    if requirements.disk_limit and not candidate.resource_controls.disk:
        yield "no disk limit"


def _cure(minimum: IsolationLevel, *, image: bool) -> str:
    if minimum > IsolationLevel.CONTAINER:
        return "use a runner with a VM backend, or a profile that this host can serve"
    if minimum is IsolationLevel.CONTAINER and not image:
        return "run the job in an image: process mode shares the host's programs"
    return "`forgeyard runner sandbox doctor` says what this host lacks and how to get it"
