"""Limits as the kernel really has them, compared with the plan while the shim waits at its gate.

A limit that was asked for and is not enforced is never silent: the container is destroyed unreleased.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from forgeyard_host.cgroups import AppliedLimits
from forgeyard_host.cgroups.evidence import swap_in_use
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.limits import ResourceLimits

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CPU_STEP: Final = 0.011
"""Cores. The least quota is 1 ms of each 100 ms, and the runtime may round to that."""


def verify_limits(applied: AppliedLimits, limits: ResourceLimits) -> None:
    """Compare the limits read back from the container's group with those of its plan.

    :raises SandboxError: RESOURCE_LIMIT_FAILED, naming the first that is not in force.
    """
    if limits.memory is not None:
        # The kernel cuts a limit down to whole pages.
        if applied.memory is None or not limits.memory - _PAGE < applied.memory <= limits.memory:
            raise _not_applied("memory", limits.memory, applied.memory)
        if applied.swap != 0 and (applied.swap is not None or swap_in_use()):
            raise _not_applied("swap", 0, applied.swap)
    if limits.pids is not None and applied.pids != limits.pids:
        raise _not_applied("pids", limits.pids, applied.pids)
    if limits.cpus is not None and (applied.cpus is None or abs(applied.cpus - limits.cpus) > _CPU_STEP):
        raise _not_applied("cpu", limits.cpus, applied.cpus)


def verify_membership(cgroups: Mapping[str, str], leaf: str, limits: ResourceLimits) -> None:
    """Whether PID 1 is in the group that has the limits, in the hierarchy of each.

    :param cgroups: its group by controller list, as /proc/<pid>/cgroup has it; "" is the unified hierarchy.
    :raises SandboxError: RESOURCE_LIMIT_FAILED.
    """
    groups = {name: path for names, path in cgroups.items() for name in names.split(",")}
    for name, wanted in (("memory", limits.memory), ("pids", limits.pids), ("cpu", limits.cpus)):
        if wanted is not None and groups.get(name, cgroups.get("")) != leaf:
            raise _not_applied(name, wanted, None)


def _not_applied(name: str, wanted: float, applied: float | None) -> SandboxError:
    found = "none" if applied is None else f"{applied:g}"
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED,
        f"gate_limit_{name}",
        f"the {name} limit is not in force",
        details=f"wanted {wanted:g}, the kernel has {found}; the job was not started",
        resolution="`forgeyard runner sandbox doctor` says what this host can limit",
    )
