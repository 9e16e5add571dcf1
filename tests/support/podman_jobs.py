"""Containers with our shim in them under a private Podman, from a plan with what Podman does in its own way."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from contract_box import ROOTFS, Box
from daemons import Daemon

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.job import Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import ContainerPlan, JobUser, MountKind, PlanMount, Rlimit
from forgeyard_model.policy import NetworkMode
from forgeyard_runtimes.podman.runtime import PodmanRuntime
from forgeyard_runtimes.podman.settings import PodmanSettings

PLAN = ContainerPlan(
    kind=ExecutorKind.CONTAINER,
    rootfs_identity=ROOTFS.identity,
    root_read_only=True,
    mounts=(
        PlanMount("/tmp", MountKind.BIND, slot="tmp", read_only=False),
        PlanMount("/ram", MountKind.TMPFS, read_only=False, size=1 << 20, mode=0o1777),
        PlanMount("/.forgeyard", MountKind.BIND, slot="control", recursive=False),
    ),
    user=JobUser(1000, 1000),
    user_namespace=True,
    network=NetworkMode.DENY,
    capabilities=(),
    seccomp="general-build",
    limits=ResourceLimits(cpus=1.0, memory=128 << 20, pids=64),
    rlimits=(Rlimit("RLIMIT_NOFILE", 1024, 1024),),
    umask=0o022,
    env={"PATH": "/bin"},
    workdir="/",
    steps=(Step("true"),),
)


@contextlib.asynccontextmanager
async def podman_runtime(service: Daemon, **more: Any) -> AsyncIterator[PodmanRuntime]:
    """The adapter, connected to `service`."""
    runtime = await PodmanRuntime.find(PodmanSettings("test", f"state-{os.getpid()}", service.address, **more))
    try:
        yield runtime
    finally:
        await runtime.close()


@contextlib.asynccontextmanager
async def podman_job(
    runtime: PodmanRuntime, plan: ContainerPlan = PLAN, *, netns: str | None = None, start: bool = True
) -> AsyncIterator[Box]:
    """A container that waits at its gate."""
    job = Box(runtime, plan, netns)
    try:
        if start:
            await job.create()
            await job.start()
        yield job
    finally:
        await asyncio.shield(job.close())
