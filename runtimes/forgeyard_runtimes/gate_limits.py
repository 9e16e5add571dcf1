"""Limits as the kernel really has them, compared with the plan while the shim waits at its gate.

A limit that was asked for and is not enforced is never silent: the container is destroyed unreleased.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from forgeyard_host.cgroups import AppliedLimits
from forgeyard_host.cgroups.evidence import swap_in_use
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.limits import ResourceLimits
from forgeyard_runtimes.gate import Check, first_wrong

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CPU_STEP: Final = 0.011
"""Cores. The least quota is 1 ms of each 100 ms, and the runtime may round to that."""


def verify_limits(applied: AppliedLimits, limits: ResourceLimits) -> None:
    """Compare the limits read back from the container's group with those of its plan.

    :raises SandboxError: RESOURCE_LIMIT_FAILED, naming the first that is not in force.
    """
    first_wrong(limit_checks(applied, limits))


def verify_membership(cgroups: Mapping[str, str], leaf: str, limits: ResourceLimits) -> None:
    """Whether PID 1 is in the group that has the limits; see `membership_checks`.

    :raises SandboxError: RESOURCE_LIMIT_FAILED.
    """
    first_wrong(membership_checks(cgroups, leaf, limits))


def limit_checks(applied: AppliedLimits, limits: ResourceLimits) -> Iterator[Check]:
    """Each limit that the plan has, against what was read back. All values as AppliedLimits has them."""
    if limits.memory is not None:
        # The kernel cuts a limit down to whole pages.
        held = applied.memory is not None and limits.memory - _PAGE < applied.memory <= limits.memory
        yield _check("memory.limit", "memory", limits.memory, applied.memory, held=held)
        held = applied.swap == 0 or (applied.swap is None and not swap_in_use())
        yield _check("memory.swap", "swap", 0, applied.swap, held=held)
    if limits.pids is not None:
        yield _check("pids.limit", "pids", limits.pids, applied.pids, held=applied.pids == limits.pids)
    if limits.cpus is not None:
        held = applied.cpus is not None and abs(applied.cpus - limits.cpus) <= _CPU_STEP
        yield _check("cpu.quota", "cpu", limits.cpus, applied.cpus, held=held)


def membership_checks(cgroups: Mapping[str, str], leaf: str, limits: ResourceLimits) -> Iterator[Check]:
    """Whether PID 1 is in the group that has the limits, in the hierarchy of each.

    :param cgroups: its group by controller list, as /proc/<pid>/cgroup has it; "" is the unified hierarchy.
    """
    groups = {name: path for names, path in cgroups.items() for name in names.split(",")}
    for name, wanted in (("memory", limits.memory), ("pids", limits.pids), ("cpu", limits.cpus)):
        if wanted is not None:
            group = groups.get(name, cgroups.get(""))
            wrong = None if group == leaf else _not_applied(name, wanted, None)
            yield Check(f"linux.cgroupsPath.{name}", str(group), wrong)


def _check(field: str, name: str, wanted: float, applied: float | None, *, held: bool) -> Check:
    wrong = None if held else _not_applied(name, wanted, applied)
    return Check(f"linux.resources.{field}", "none" if applied is None else f"{applied:.15g}", wrong)


def _not_applied(name: str, wanted: float, applied: float | None) -> SandboxError:
    found = "none" if applied is None else f"{applied:g}"
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED,
        f"gate_limit_{name}",
        f"the {name} limit is not in force",
        details=f"wanted {wanted:g}, the kernel has {found}; the job was not started",
        resolution="`forgeyard runner sandbox doctor` says what this host can limit",
    )
