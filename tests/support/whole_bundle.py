"""A compiled bundle that has everything a bundle can have, for tests that change one thing in it."""

from __future__ import annotations

import json
from typing import Any

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import ContainerPlan, JobUser, MountKind, Placement, PlanMount, Rlimit
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec import compile_bundle

PLAN = ContainerPlan(
    kind=ExecutorKind.PROCESS,
    rootfs_identity="sha256:0",
    root_read_only=True,
    mounts=(
        PlanMount("/usr", MountKind.BIND, "usr"),
        PlanMount("/usr/local", MountKind.BIND, "cover", executable=False),
        PlanMount("/etc/hosts", MountKind.BIND, "hosts", executable=False, recursive=False),
        PlanMount("/work/build", MountKind.BIND, "build", read_only=False),
        PlanMount("/tmp", MountKind.TMPFS, read_only=False, size=64 << 20, mode=0o1777),
        PlanMount("/.forgeyard", MountKind.BIND, "control", recursive=False),
    ),
    user=JobUser(1000, 1000, (1000, 1001)),
    user_namespace=True,
    network=NetworkMode.DENY,
    capabilities=(),
    seccomp="general-build",
    limits=ResourceLimits(cpus=2.0, memory=2 << 30, pids=512),
    rlimits=(Rlimit("RLIMIT_NOFILE", 4096, 8192),),
    umask=0o022,
    env={"PATH": "/nonexistent"},
    workdir="/work/source",
    steps=(Step("true"),),
)
PLACEMENT = Placement(
    sandbox=SandboxId("01jd0000000000000000000000"),
    rootfs="/state/rootfs",
    sources={"usr": "/usr", "cover": "/state/c", "hosts": "/state/h", "build": "/state/b", "control": "/state/ctl"},
    uid_base=2_000_000_000,
    uid_count=65536,
    cgroup="/forgeyard/e/s",
    netns=None,
    argv=("/.forgeyard/init", "fifo"),
)


def whole_bundle() -> dict[str, Any]:
    """config.json of the bundle, a copy for the caller."""
    spec: dict[str, Any] = json.loads(compile_bundle(PLAN, PLACEMENT).config)
    return spec
