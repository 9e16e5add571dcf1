"""One container with our shim in it, on any adapter: its root, its group, its bundle and its channel."""

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

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import (
    ContainerPlan,
    JobUser,
    MountKind,
    NetworkAttachment,
    Placement,
    PlanMount,
    Rlimit,
    RootfsPlan,
)
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES, NetworkMode
from forgeyard_oci.spec import compile_bundle, compile_exec
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.build import build
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.protocol import Exited, NoExec, StepCommand
from forgeyard_runtimes.contract import ContainerRef, ContainerRuntime, Stdio

UID_BASE = 1_660_000_000
ENV = {"PATH": "/bin", "HOME": "/tmp"}
ROOTFS = RootfsPlan(kind=ExecutorKind.CONTAINER, lowers=(), identity="sha256:" + "0" * 64)
MEMORY = 96 << 20
PIDS = 40
CPUS = 0.5
PLAN = ContainerPlan(
    kind=ExecutorKind.CONTAINER,
    rootfs_identity=ROOTFS.identity,
    root_read_only=True,
    mounts=(
        PlanMount("/tmp", MountKind.BIND, slot="tmp", read_only=False),
        PlanMount("/noexec", MountKind.BIND, slot="tmp", read_only=False, executable=False),
        PlanMount("/data", MountKind.BIND, slot="data"),
        PlanMount("/.forgeyard", MountKind.BIND, slot="control", recursive=False),
    ),
    user=JobUser(1000, 1000, (1234,)),
    user_namespace=True,
    network=NetworkMode.DENY,
    capabilities=(),
    seccomp="general-build",
    limits=ResourceLimits(cpus=CPUS, memory=MEMORY, pids=PIDS, shm=2 << 20),
    rlimits=(Rlimit("RLIMIT_NOFILE", 1024, 2048),),
    umask=0o022,
    env=ENV,
    workdir="/",
    steps=(Step("true"),),
)
RAM = PlanMount("/ram", MountKind.TMPFS, read_only=False, size=1 << 20, mode=0o1777)
RAM_PLAN = dataclasses.replace(PLAN, mounts=(*PLAN.mounts, RAM))
UMASK_PLAN = dataclasses.replace(PLAN, umask=0o027)
ROOT_PLAN = dataclasses.replace(PLAN, user=JobUser(0, 0), capabilities=ROOT_IN_USERNS_CAPABILITIES)


class Box:
    """One container on one adapter. `create`, `start`, `open_gate`, then steps."""

    def __init__(self, runtime: ContainerRuntime, plan: ContainerPlan, netns: str | None = None) -> None:
        self.runtime = runtime
        claims = runtime.capabilities()
        self.plan = dataclasses.replace(plan, user_namespace=claims.user_namespace)
        if not claims.resource_controls.pids:  # the threads of a kernel of its own count, which dies of a refusal
            self.plan = dataclasses.replace(self.plan, limits=dataclasses.replace(plan.limits, pids=1000))
        self.base = UID_BASE if self.plan.user_namespace else 0
        self.sandbox = SandboxId.mint()
        self.directory = Path(tempfile.mkdtemp(prefix="fy-box-", dir="/var/tmp"))
        self.directory.chmod(0o711)
        self.ref = ContainerRef(f"fy-{self.sandbox.value}", self.directory)
        self.group = AttemptCgroup.create(CgroupHost.detect(), f"/forgeyard-test/{self.sandbox.value}")
        self.pidfd = -1
        self.pid = 0
        self._fds: tuple[int, ...] = ()
        self._steps = 0
        self.channel = self._channel()
        self.placement = Placement(
            sandbox=self.sandbox,
            rootfs=str(self._rootfs()),
            sources={"tmp": self._owned("scratch"), "data": self._owned("data"), "control": self._path("ctl")},
            uid_base=UID_BASE if self.plan.user_namespace else None,
            uid_count=65536,
            cgroup=self.group.leaf("job"),
            netns=netns,
            argv=ShimChannel.argv,
        )
        self.bundle = compile_bundle(self.plan, self.placement)

    def _path(self, name: str) -> str:
        return str(self.directory / name)

    def _channel(self) -> ShimChannel:
        build()
        control = self.directory / "ctl"
        control.mkdir()
        control.chmod(0o711)
        user = self.plan.user
        return ShimChannel.create(control, shim=shim_binary(), uid=self.base + user.uid, gid=self.base + user.gid)

    def _owned(self, name: str) -> str:
        path = self.directory / name
        path.mkdir()
        (path / "there").write_text("already\n")
        for each in (path, path / "there"):
            os.chown(each, self.base + self.plan.user.uid, self.base + self.plan.user.gid)
        return str(path)

    def _rootfs(self) -> Path:
        """busybox, and a directory for each mount: the root is read-only."""
        root = self.directory / "rootfs"
        for name in ("bin", "etc", "proc", "dev", "sys", "tmp", "noexec", "data", "ram", "run", ".forgeyard"):
            (root / name).mkdir(parents=True)
        # runc gives a tmpfs the mode of the directory it is mounted on, whatever the bundle says.
        (root / "ram").chmod(0o1777)
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, root / "bin/busybox")
        for name in _programs():
            (root / "bin" / name).symlink_to("busybox")
        for path in (root, *root.rglob("*")):
            os.chown(path, self.base, self.base, follow_symlinks=False)
        return root

    @property
    def intended(self) -> dict[str, Any]:
        """The bundle's config.json."""
        spec: dict[str, Any] = json.loads(self.bundle.config)
        return spec

    @property
    def own_group(self) -> str:
        """The group that PID 1 is in; some engines make one of their own below that of the bundle. While it lives."""
        lines = Path(f"/proc/{self.pid}/cgroup").read_text().splitlines()
        return next(line.split(":", 2)[2] for line in lines if line.split(":")[1] in ("pids", ""))

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
        await self.channel.hello(timeout=30)
        self.channel.unlink()

    def open_gate(self) -> None:
        """Let steps run."""
        self._fds = self.channel.take_output()
        self.channel.release()

    def command(self, *argv: str, **more: Any) -> StepCommand:
        """A step with the next id."""
        self._steps += 1
        return StepCommand(self._steps, argv, **{"env": ENV, "cwd": "/", **more})

    async def run(self, *argv: str, **more: Any) -> tuple[Exited | NoExec, bytes, bytes]:
        """Run a step; its end, its output and its errors, up to a pipe's size."""
        for fd in self._fds:
            _drained(fd)  # what a step that was run in another way wrote
        end = await self.channel.run_step(self.command(*argv, **more))
        out, err = (_drained(fd) for fd in self._fds)
        return end, out, err

    async def sh(self, script: str, **more: Any) -> tuple[int, str]:
        """Run a shell script; its raw wait status, and its output with its errors after it."""
        end, out, err = await self.run("/bin/sh", "-c", script, **more)
        assert isinstance(end, Exited), end
        return end.status, (out + err).decode(errors="replace")

    async def says(self, script: str, **more: Any) -> str:
        """The output of a script that succeeds, without the last newline."""
        status, output = await self.sh(script, **more)
        assert status == 0, (script, status, output)
        return output.rstrip("\n")

    def process(self, *argv: str) -> bytes:
        """A compiled process.json."""
        return compile_exec(self.plan, self.placement, argv, ENV, "/")

    async def kill(self) -> None:
        """Kill PID 1 and wait for its end."""
        await self.runtime.kill(self.ref, self.pidfd)
        async with asyncio.timeout(20):
            await self.runtime.wait(self.pidfd)

    async def close(self) -> None:
        """End it, whatever state it is in, and remove all that was made for it."""
        try:
            if self.pidfd >= 0:
                await self.kill()
            await self.runtime.remove(self.ref)
        finally:
            self.channel.close()
            for fd in (*self._fds, *((self.pidfd,) if self.pidfd >= 0 else ())):
                os.close(fd)
            self.group.remove()
            for hierarchy in self.group.host.hierarchies:
                # Of all boxes: it goes with the last.
                with contextlib.suppress(OSError):
                    os.rmdir(hierarchy + os.path.dirname(self.group.path))
            shutil.rmtree(self.directory)


def _programs() -> tuple[str, ...]:
    return (
        *("sh", "sleep", "cat", "id", "ls", "env", "hostname", "grep", "touch", "dd", "kill", "wc", "true", "echo"),
        *("pwd", "mkdir", "stat", "chmod", "cp", "head", "tr", "mount", "unshare", "ps", "seq", "tail", "readlink"),
        *("cut", "test", "mknod", "chroot", "ip", "printf", "false", "nproc", "rm", "sort", "df", "chown", "ping"),
    )


def _drained(fd: int) -> bytes:
    output = b""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, 1 << 18):
            output += data
    return output


def _pretended(runtime: ContainerRuntime) -> Box | None:
    from fake_box import FakeBox

    from forgeyard_executor.testing import FakeRuntime

    return FakeBox(runtime) if isinstance(runtime, FakeRuntime) else None


@contextlib.asynccontextmanager
async def box(runtime: ContainerRuntime, plan: ContainerPlan = PLAN) -> AsyncIterator[Box]:
    """A container that nothing was done with yet."""
    made = _pretended(runtime) or Box(runtime, plan)
    try:
        yield made
    finally:
        await asyncio.shield(made.close())


async def opened(runtime: ContainerRuntime, plan: ContainerPlan = PLAN) -> Box:
    """A container whose gate is open, for the caller to close."""
    made = Box(runtime, plan)
    try:
        await made.create()
        await made.start()
        made.open_gate()
    except BaseException:
        await asyncio.shield(made.close())
        raise
    return made


@contextlib.asynccontextmanager
async def open_box(runtime: ContainerRuntime, plan: ContainerPlan = PLAN) -> AsyncIterator[Box]:
    """A container whose gate is open."""
    made = await opened(runtime, plan)
    try:
        yield made
    finally:
        await asyncio.shield(made.close())
