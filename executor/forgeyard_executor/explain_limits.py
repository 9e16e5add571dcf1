"""Rows about resource limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from forgeyard_executor.config_load import shown_limit
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_model.capabilities import Feature
from forgeyard_model.enforcement import Enforcement, PlanRow
from forgeyard_model.errors import InvalidRequest, SandboxErrorKind
from forgeyard_model.profile import PROFILES
from forgeyard_model.request import ExecutionRequest

_FAILED = SandboxErrorKind.RESOURCE_LIMIT_FAILED
# Field of ResourceLimits, as users write it.
_FIELDS: Final = {
    "cpus": "resources.cpus",
    "memory": "resources.memory",
    "pids": "resources.pids",
    "disk": "resources.disk",
    "nofile": "resources.nofile",
    "shm": "resources.shm",
    "wall_time": "timeout",
}
_DEFAULT_NOFILE: Final = 1024
_DEFAULT_SHM: Final = 64 << 20


def limit_rows(request: ExecutionRequest, facts: HostFacts) -> Iterator[PlanRow]:
    """One row for each limit, and one for swap, which no job has."""
    for name, field in _FIELDS.items():
        value = getattr(request.limits, name)
        watched = PROFILES[request.profile].disk_watched if name == "disk" and value is None else None
        row = above_maximum(name, field, value, facts) or (
            _row(name, field, value, facts) if watched is None else _watched(field, watched)
        )
        yield _lowered(row, name, value, facts)
        if name == "memory":
            yield facts.row(
                "resources.swap", "0 MiB", Feature.SWAP_LIMIT, by="memory and swap have one limit", kind=_FAILED
            )


def lowered_notes(request: ExecutionRequest, facts: HostFacts) -> tuple[str, ...]:
    """What the result says of defaults that the configured maximum cut down."""
    rows = limit_rows(request, facts) if facts.lowered else ()
    names = {_FIELDS[name] for name in facts.lowered}
    return tuple(f"{row.field}: {row.note}" for row in rows if row.field in names and row.note)


def above_maximum(name: str, field: str, value: float | None, facts: HostFacts) -> PlanRow | None:
    """The row of a limit, shown as `field`, that is above the configured maximum; None where it is not."""
    maximum = getattr(facts.config.maximum_limits, name)
    if maximum is None or (value is not None and value <= maximum):
        return None
    key = "timeout" if name == "wall_time" else name
    origin = facts.config.origin(f"limits.maximum.{key}")
    asked = "no limit" if value is None else shown_limit(name, value)
    shown = shown_limit(name, maximum)
    error = InvalidRequest(field, asked, f"the maximum here is {shown} ({origin}): ask for that or less")
    note, cure = f"the maximum is {shown}", f"ask for {shown} or less"
    return PlanRow(field, asked, Enforcement.REFUSED, f"limits.maximum.{key} ({origin})", note, cure, error)


def _row(name: str, field: str, value: float | None, facts: HostFacts) -> PlanRow:
    if name == "nofile":
        return _nofile(field, _DEFAULT_NOFILE if value is None else int(value), facts)
    if name == "shm":
        by = "the size of its tmpfs; counted as memory"
        return facts.row(field, shown_limit(name, value or _DEFAULT_SHM), Feature.TMPFS, by=by, kind=_FAILED)
    if value is None:
        # Only a field that a limit can be given for; that none was asked is nothing to enforce.
        by = "the host's disk" if name == "disk" else "nothing"
        return PlanRow(field, "no limit", Enforcement.ENFORCED, by)
    asked = shown_limit(name, value)
    if name == "wall_time":
        return PlanRow(field, asked, Enforcement.ENFORCED, "the executor's clock; the tree is killed")
    return _controlled(name, field, asked, facts)


def _watched(field: str, limit: int) -> PlanRow:
    by = "watched: the executor counts what the job writes, and kills it past that"
    cure = "name a limit to have it held by a filesystem of that size"
    return PlanRow(field, shown_limit("disk", limit), Enforcement.EMULATED, by, cure=cure)


def _controlled(name: str, field: str, asked: str, facts: HostFacts) -> PlanRow:
    """A limit that the kernel holds."""
    backend = facts.backend
    controls = backend.resource_controls if backend is not None else None
    version = f"cgroup {backend.cgroup} " if backend is not None and backend.cgroup else "the cgroup's "
    by = {
        "cpus": f"{version}cpu controller: quota and shares",
        "memory": f"{version}memory controller, tmpfs included",
        "pids": f"{version}pids controller",
        "disk": "a filesystem of that size for all that the job writes, its room set aside",
    }[name]
    feature, claim = {
        "cpus": (Feature.CPU_LIMIT, controls is not None and controls.cpu),
        "memory": (Feature.MEMORY_LIMIT, controls is not None and controls.memory),
        "pids": (Feature.PIDS_LIMIT, controls is not None and controls.pids),
        "disk": (Feature.DISK_LIMIT, controls is not None and controls.disk),
    }[name]
    row = facts.row(field, asked, feature, by=by, kind=_FAILED, claim=claim)
    # A loop-mounted filesystem stands in for a quota: as hard, but its room is set aside for this job alone.
    return replace(row, status=Enforcement.EMULATED) if name == "disk" and not row.refused else row


def _nofile(field: str, wanted: int, facts: HostFacts) -> PlanRow:
    ceiling = facts.nofile_ceiling
    if wanted <= ceiling:
        return PlanRow(field, f"{wanted}", Enforcement.ENFORCED, "RLIMIT_NOFILE")
    note = f"{ceiling} instead: this executor may set no more"
    cure = f"ask for {ceiling} or less, or start the executor with a higher hard limit (LimitNOFILE=, ulimit -Hn)"
    if facts.config.exact_limits:
        by = f"exact_limits ({facts.config.origin('exact_limits')})"
        error = InvalidRequest(field, wanted, f"this executor may set no more than {ceiling}, and {by} allows no less")
        return PlanRow(field, f"{wanted}", Enforcement.REFUSED, by, note, cure, error)
    return PlanRow(field, f"{wanted}", Enforcement.CLAMPED, "RLIMIT_NOFILE", note, cure)


def _lowered(row: PlanRow, name: str, value: float | None, facts: HostFacts) -> PlanRow:
    """A default of the profile that the configured maximum cut down: said, since nobody asked for less."""
    if name not in facts.lowered or row.refused or value is None:
        return row
    default = facts.lowered[name]
    before = "no limit" if default is None else shown_limit(name, default)
    key = "timeout" if name == "wall_time" else name
    note = f"{shown_limit(name, value)} instead of the default: limits.maximum.{key} allows no more"
    return replace(row, asked=before, status=Enforcement.CLAMPED, note=note)
