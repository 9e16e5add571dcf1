"""Cgroup limits. The runtime writes them for cgroup v1 or v2, whichever the host has."""

from __future__ import annotations

from typing import Any, Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.limits import ResourceLimits
from forgeyard_oci.spec.compose import Fields

CPU_PERIOD: Final = 100_000
"""Microseconds, the kernel's own default."""
_LEAST_QUOTA: Final = 1_000
_SHARES_PER_CPU: Final = 1024
_LEAST_SHARES, _MOST_SHARES = 2, 262_144


def with_resources(limits: ResourceLimits) -> Fields:
    """Memory, cpu and pids. Devices: none, to which the runtime adds the harmless ones (null, zero, urandom, tty ...).

    Swap is off: the limit on memory and swap together equals that on memory. Both cpu fields are set, so that a job
    is capped by its quota and gets its part by its shares when the machine is busy.
    """
    fields: dict[str, Any] = {"linux/resources/devices": [{"allow": False, "access": "rwm"}]}
    if limits.memory is not None:
        fields["linux/resources/memory"] = {"limit": limits.memory, "swap": limits.memory}
    if limits.cpus is not None:
        fields["linux/resources/cpu"] = {
            "period": CPU_PERIOD,
            "quota": max(_LEAST_QUOTA, round(limits.cpus * CPU_PERIOD)),
            "shares": min(_MOST_SHARES, max(_LEAST_SHARES, round(limits.cpus * _SHARES_PER_CPU))),
        }
    if limits.pids is not None:
        fields["linux/resources/pids"] = {"limit": limits.pids}
    return fields


def with_cgroup(path: str | None) -> Fields:
    """The cgroup's path below each hierarchy's root. None: the runtime chooses.

    :raises SandboxError: RESOURCE_LIMIT_FAILED for a path that is relative or climbs.
    """
    if path is None:
        return {}
    if not path.startswith("/") or ".." in path.split("/"):
        # runc takes a relative one as below its own cgroup, where nobody of ours would look for evidence.
        raise SandboxError(
            SandboxErrorKind.RESOURCE_LIMIT_FAILED, "bad_cgroup_path", "the cgroup's path is not absolute", details=path
        )
    return {"linux/cgroupsPath": path}
