"""What the runtime really applies to an attempt: each of its containers is started up to its gate, and looked at there.

Nothing of the workload runs. The attempt is prepared as any other, and undone as any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forgeyard_executor.refusals import state_io
from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_runtimes.applied import Applied, AppliedRow, Declared, kernel_rows, spec_rows
from forgeyard_runtimes.shielding import shielded

if TYPE_CHECKING:
    from forgeyard_executor.attempt import Attempt
    from forgeyard_executor.member import Member
    from forgeyard_executor.services import HostServices

JOB: Final = "job"


@dataclass(frozen=True, slots=True)
class InspectedContainer:
    """One container of the attempt.

    :param name: ``job``, or the service's.
    :param rows: the worst first.
    """

    name: str
    bundle_digest: str
    rows: tuple[AppliedRow, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was seen, and what of it could not be undone, a line each: `recover` tries those again.

    :param runtime: name and version.
    """

    runtime: str
    containers: tuple[InspectedContainer, ...]
    left: tuple[str, ...]

    @property
    def weaker(self) -> bool:
        """Whether a runtime applied less than it declares: such a job is never released."""
        return any(
            row.applied is Applied.WEAKER and not row.declared
            for container in self.containers
            for row in container.rows
        )


async def inspect_attempt(services: HostServices, attempt: Attempt) -> Inspection:
    """Look at each container of a prepared attempt in turn, and undo the attempt, whatever comes of it.

    :raises ExecutorError: a container could not be started or looked at.
    """
    members = ((JOB, attempt.job), *((container.spec.name, container.member) for container in attempt.services))
    try:
        containers = [await _inspect(services, name, member) for name, member in members]
    except BaseException as error:
        await shielded(attempt.discard())
        if isinstance(error, SandboxError):
            raise ExecutorError.prepare(error) from error
        if isinstance(error, OSError):
            raise state_io(error) from error
        raise
    left = await shielded(attempt.clean_up())
    await shielded(attempt.remove_outputs())
    return Inspection(services.runtime.name, tuple(containers), left)


async def _inspect(services: HostServices, name: str, member: Member) -> InspectedContainer:
    seen = await member.inspect()
    runtime = services.runtime
    declared = Declared(runtime.declared_weaker, runtime.declared_stricter)
    plan, intended = member.blueprint.planned.plan, json.loads(member.bundle.config)

    root = os.stat(member.placement.rootfs).st_dev  # noqa: PTH116  pathlib is for code outside of the event loop

    def rows() -> Iterator[AppliedRow]:
        yield from spec_rows(intended, seen.spec, declared)
        yield from kernel_rows(
            seen,
            plan,
            member.placement,
            own_namespaces=services.own_namespaces,
            intended=intended,
            root_device=f"{os.major(root)}:{os.minor(root)}",
        )

    ranks = list(Applied)
    found = sorted(rows(), key=lambda row: (ranks.index(row.applied), row.declared, row.field, row.by))
    return InspectedContainer(name, member.bundle.bundle_digest, tuple(found))
