"""What a runtime applied of a bundle, row by row, for people: see `JobContainer.inspect`.

The rows come from two places. By spec: what the runtime says that it applied, compared with the bundle. By kernel: what
/proc and the control groups say of the container's PID 1 while it waits, which needs nobody's word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from forgeyard_model.plan import ContainerPlan, Placement
from forgeyard_runtimes.comparison import compare, undeclared
from forgeyard_runtimes.comparison.fields import intended_fields
from forgeyard_runtimes.comparison.isolation import DEFAULT_DEVICES
from forgeyard_runtimes.container import AtGate
from forgeyard_runtimes.gate import applied_checks
from forgeyard_runtimes.gate_limits import limit_checks, membership_checks
from forgeyard_runtimes.mount_table import Mounted, parse_mountinfo

_FLAGS: Final = ("ro", "nosuid", "nodev", "noexec")
_DEVICES: Final = frozenset(path for path, *_ in DEFAULT_DEVICES)
"""In a user namespace each is a bind of the host's own, for nodes can't be made there."""


class Applied(StrEnum):
    """How a field was applied, the worst first."""

    WEAKER = "weaker"
    STRICTER = "stricter"
    EQUAL = "equal"


class Source(StrEnum):
    """Who says so."""

    SPEC = "spec"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class AppliedRow:
    """One field.

    :param declared: the adapter's documentation says that it always differs there; jobs run all the same.
    """

    field: str
    applied: Applied
    by: Source
    what: str
    declared: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """Names of fields that an adapter says it always applies weaker, or stricter."""

    weaker: frozenset[str]
    stricter: frozenset[str]


def spec_rows(intended: Mapping[str, Any], effective: Mapping[str, Any], declared: Declared) -> Iterator[AppliedRow]:
    """Every difference of two specs, and each field of the bundle that has none."""
    found = compare(intended, effective)
    different: list[str] = []
    for applied, lines, allowed in (
        (Applied.WEAKER, found.weaker, declared.weaker),
        (Applied.STRICTER, found.stricter, declared.stricter),
    ):
        for line in lines:
            field, _, what = line.partition(": ")
            different.append(field)
            yield AppliedRow(field, applied, Source.SPEC, what, declared=not undeclared((line,), allowed))
    for field, what in intended_fields(intended):
        if not any(other == field or other.startswith(f"{field}.") for other in different):
            yield AppliedRow(field, Applied.EQUAL, Source.SPEC, what)


def kernel_rows(
    seen: AtGate,
    plan: ContainerPlan,
    placement: Placement,
    *,
    own_namespaces: Mapping[str, int],
    intended: Mapping[str, Any],
    root_device: str,
) -> Iterator[AppliedRow]:
    """What the gate checks of every job, and the flags of each mount.

    :param intended: the bundle's config.json.
    :param root_device: ``MAJOR:MINOR`` of the file system of the root that was made for the container.
    """
    for checks in (
        applied_checks(seen.facts, plan, placement, own_namespaces),
        membership_checks(seen.facts.cgroups, seen.leaf, plan.limits),
        limit_checks(seen.limits, plan.limits),
    ):
        for check in checks:
            yield _kernel_row(check.field, check.applied, weaker=check.wrong is not None)
    mounts = parse_mountinfo(seen.mountinfo)
    yield from _mounts(intended, mounts)
    # A root that may be written may also be put together from its parts.
    root = "" if intended["root"].get("readonly") else root_device
    yield from _writable_beside(
        intended, seen.spec, {at: mount for at, mount in mounts.items() if mount.device != root}
    )


def _mounts(intended: Mapping[str, Any], seen: Mapping[str, Mounted]) -> Iterator[AppliedRow]:
    """Whether each mount of a bundle is there, with the flags that it has to have."""
    for mount in intended["mounts"]:
        point = mount["destination"]
        field = f"mounts.{point}"
        if mount["type"] == "cgroup":
            # Runtimes put together what is at the top in ways of their own; what lies below it are the groups.
            open_ = [
                path for path, mounted in seen.items() if path.startswith(f"{point}/") and "ro" not in mounted.flags
            ]
            yield _kernel_row(field, f"{open_[0]} can be written" if open_ else "read-only", weaker=bool(open_))
        elif point not in seen:
            yield _kernel_row(field, "not there", weaker=True)
        else:
            mounted = seen[point]
            options = mount.get("options") or ()
            missing = [
                flag for flag in _FLAGS if not {flag, f"r{flag}"}.isdisjoint(options) and flag not in mounted.flags
            ]
            fine = f"{mounted.kind} {','.join(flag for flag in _FLAGS if flag in mounted.flags)}".rstrip()
            yield _kernel_row(field, f"{', '.join(missing)} not set" if missing else fine, weaker=bool(missing))


def _writable_beside(
    intended: Mapping[str, Any], effective: Mapping[str, Any], seen: Mapping[str, Mounted]
) -> Iterator[AppliedRow]:
    """What can be written and is in neither spec, so that no comparison of them tells of it."""
    told = {mount["destination"] for spec in (intended, effective) for mount in spec["mounts"]}
    hidden = {path for spec in (intended, effective) for path in spec["linux"].get("maskedPaths") or ()}
    for point, mounted in sorted(seen.items()):
        if point == "/" or "ro" in mounted.flags or point in told or point in hidden or point in _DEVICES:
            continue
        if not point.startswith("/sys/fs/cgroup/"):
            yield _kernel_row(f"mounts.{point}", f"writable {mounted.kind}, not intended", weaker=True)


def _kernel_row(field: str, what: str, *, weaker: bool) -> AppliedRow:
    return AppliedRow(field, Applied.WEAKER if weaker else Applied.EQUAL, Source.KERNEL, what)
