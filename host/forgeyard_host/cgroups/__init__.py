"""Control groups of attempts: made, read as evidence, killed and removed. v1 (also hybrid) and v2."""

from forgeyard_host.cgroups.attempt import AttemptCgroup
from forgeyard_host.cgroups.detect import CgroupHost, CgroupMode
from forgeyard_host.cgroups.evidence import AppliedLimits

__all__ = ["AppliedLimits", "AttemptCgroup", "CgroupHost", "CgroupMode"]
