"""One container with our shim in it, under a private Podman: its root, its group, its bundle and its channel."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from daemons import Daemon

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import (
    Bundle,
    ContainerPlan,
    JobUser,
    MountKind,
    NetworkAttachment,
    Placement,
    PlanMount,
    Rlimit,
    RootfsPlan,
)
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec import compile_bundle, compile_exec
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.build import build
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.protocol import Exited, NoExec, StepCommand
from forgeyard_runtimes.contract import ContainerRef, Stdio
from forgeyard_runtimes.podman.labels import PodmanSettings
from forgeyard_runtimes.podman.runtime import PodmanRuntime

UID_BASE = 1_650_000_000
ROOTFS = RootfsPlan(kind=ExecutorKind.CONTAINER, lowers=(), identity="sha256:" + "0" * 64)
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
_PROGRAMS = ("sh", "sleep", "cat", "id", "ls", "env", "hostname", "grep", "touch", "dd", "kill", "wc", "true")


class PodmanJob:
    """One container. `open_gate` once it is started, then steps."""

    def __init__(self, runtime: PodmanRuntime, plan: ContainerPlan, netns: str | None) -> None:
        self.runtime = runtime
        self.plan = plan
        self.sandbox = SandboxId.mint()
        self.directory = Path(tempfile.mkdtemp(prefix="fy-podman-job-", dir="/var/tmp"))
        self.ref = ContainerRef(f"fy-{self.sandbox.value}", self.directory)
        self.group = AttemptCgroup.create(CgroupHost.detect(), f"/{self.directory.name}")
        self.pidfd = -1
        self.pid = 0
        self._fds: tuple[int, ...] = ()
        self._steps = 0
        self.channel = self._channel()
        self.placement = Placement(
            sandbox=self.sandbox,
            rootfs=str(_rootfs(self.directory)),
            sources={"tmp": str(self._scratch()), "control": str(self.directory / "ctl")},
            uid_base=UID_BASE,
            uid_count=65536,
            cgroup=self.group.leaf("job"),
            netns=netns,
            argv=ShimChannel.argv,
        )
        self.bundle = compile_bundle(plan, self.placement)

    def _channel(self) -> ShimChannel:
        build()
        self.directory.chmod(0o711)
        control = self.directory / "ctl"
        control.mkdir()
        control.chmod(0o711)
        user = self.plan.user
        return ShimChannel.create(control, shim=shim_binary(), uid=UID_BASE + user.uid, gid=UID_BASE + user.gid)

    def _scratch(self) -> Path:
        scratch = self.directory / "scratch"
        scratch.mkdir()
        os.chown(scratch, UID_BASE + self.plan.user.uid, UID_BASE + self.plan.user.gid)
        return scratch

    @property
    def intended(self) -> dict[str, Any]:
        """The bundle's config.json."""
        spec: dict[str, Any] = json.loads(self.bundle.config)
        return spec

    async def create(self, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Create it, from an edited bundle if need be."""
        if edit is not None:
            spec = self.intended
            edit(spec)
            self.bundle = dataclasses.replace(self.bundle, config=json.dumps(spec).encode())
        attachment = NetworkAttachment(self.plan.network, self.placement.netns)
        await self.runtime.create(self.ref, self.bundle, ROOTFS, attachment, Stdio())

    async def start(self) -> None:
        """Start it and wait for the shim's first word; the gate stays shut."""
        self.pid = await self.runtime.start(self.ref)
        self.pidfd = os.pidfd_open(self.pid)
        await self.channel.hello(timeout=20)
        self.channel.unlink()

    def open_gate(self) -> None:
        """Let steps run."""
        self._fds = self.channel.take_output()
        self.channel.release()

    async def step(self, script: str) -> tuple[int, str]:
        """Run a shell script; its raw status and its output."""
        self._steps += 1
        command = StepCommand(self._steps, ("/bin/sh", "-c", script), env={"PATH": "/bin"}, cwd="/")
        end = await self.channel.run_step(command)
        assert isinstance(end, Exited), end
        output = b""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fds[0], 1 << 16):
                output += data
        return end.status, output.decode()

    def process(self, *argv: str) -> bytes:
        """A compiled process.json."""
        return compile_exec(self.plan, self.placement, argv, {"PATH": "/bin"}, "/")

    async def close(self) -> None:
        """End it, whatever state it is in, and remove all that was made for it."""
        if self.pidfd >= 0:
            await self.runtime.kill(self.ref, self.pidfd)
            await self.runtime.wait(self.pidfd)
            os.close(self.pidfd)
        try:
            await self.runtime.remove(self.ref)
        finally:
            self.channel.close()
            for fd in self._fds:
                os.close(fd)
            self.group.remove()
            shutil.rmtree(self.directory)


def _rootfs(directory: Path) -> Path:
    """busybox and mountpoints, owned by the container's root: the runtime makes the missing ones."""
    root = directory / "rootfs"
    for name in ("bin", "etc", "run", "proc", "dev", "sys", "tmp", "ram", ".forgeyard"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin/busybox")
    for name in _PROGRAMS:
        (root / "bin" / name).symlink_to("busybox")
    # runc takes the mode of a tmpfs from its mountpoint.
    (root / "ram").chmod(0o1777)
    for path in (root, *root.rglob("*")):
        os.chown(path, UID_BASE, UID_BASE, follow_symlinks=False)
    return root


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
) -> AsyncIterator[PodmanJob]:
    """A container that waits at its gate."""
    job = PodmanJob(runtime, plan, netns)
    try:
        if start:
            await job.create()
            await job.start()
        yield job
    finally:
        await asyncio.shield(job.close())


__all__ = ["PLAN", "ROOTFS", "UID_BASE", "Bundle", "NoExec", "PodmanJob", "podman_job", "podman_runtime"]
