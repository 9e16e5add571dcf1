"""A job's container on a Docker daemon without an executor: everything that one would make for it, made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgeyard_executor.planning import Planned, plan_request, process_mode_user
from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import SandboxPlaced, SandboxSetup
from forgeyard_host.recovery import undo
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job
from forgeyard_model.plan import Bundle, JobUser, NetworkAttachment, Placement, RootfsPlan
from forgeyard_model.policy import IsolationLevel
from forgeyard_model.request import PreparedWorkspace, request_from_job
from forgeyard_oci.spec import compile_bundle
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.build import build
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.hostroot import HostRootfs, hosts_file
from forgeyard_process_shim.protocol import Exited, NoExec, StepCommand
from forgeyard_runtimes.contract import ContainerRef, Stdio
from forgeyard_runtimes.docker.client import DockerSettings
from forgeyard_runtimes.docker.runtime import DockerRuntime
from forgeyard_runtimes.find import state_name

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
EXECUTOR = "tests-of-docker"
Edit = Callable[[dict[str, Any]], None]


def settings(daemon: Any, state: Path, **more: Any) -> DockerSettings:
    """Settings for a private daemon."""
    return DockerSettings(host=daemon.address, executor=EXECUTOR, state=state_name(str(state)), **more)


def busybox_root(directory: Path) -> RootfsPlan:
    """An image's root of busybox alone, as a plan: writable, with links at its top."""
    lower = directory / "lower"
    for name in ("usr/bin", "etc", "home", "srv", "tmp"):
        (lower / name).mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", lower / "usr/bin/busybox")
    for applet in ("sh", "cat", "ls", "touch", "id", "mkdir", "sleep", "readlink", "test", "stat"):
        (lower / "usr/bin" / applet).symlink_to("busybox")
    (lower / "bin").symlink_to("usr/bin")
    (lower / "marker").write_text("a file at the top\n")
    (lower / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\njob:x:1000:1000::/home:/bin/sh\n")
    return RootfsPlan(
        ExecutorKind.CONTAINER, (str(lower),), "sha256:" + "1" * 64, writable=True, user=JobUser(1000, 1000)
    )


@dataclass(slots=True)
class DockerJob:
    """What was made for one container, and its runtime."""

    runtime: DockerRuntime
    host: Host
    cgroups: CgroupHost
    ledger: Ledger
    cgroup: AttemptCgroup
    planned: Planned
    placed: SandboxPlaced
    placement: Placement
    bundle: Bundle
    rootfs: RootfsPlan
    channel: ShimChannel
    ref: ContainerRef
    pid: int = 0
    pidfd: int = -1
    steps: int = 0
    fds: tuple[int, ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """The bundle's config.json."""
        spec: dict[str, Any] = json.loads(self.bundle.config)
        return spec

    def edit(self, change: Edit) -> None:
        """Another bundle than the compiled one."""
        spec = self.spec
        change(spec)
        self.bundle = replace(self.bundle, config=json.dumps(spec).encode())

    async def create(self) -> None:
        """Lay the container down."""
        await self.runtime.create(
            self.ref, self.bundle, self.rootfs, NetworkAttachment(self.planned.plan.network), Stdio()
        )

    async def start(self) -> None:
        """Start it, up to the closed gate."""
        self.pid = await self.runtime.start(self.ref)
        self.pidfd = os.pidfd_open(self.pid)
        await self.channel.hello(timeout=20)

    async def open_gate(self) -> None:
        """All of it, up to the open gate."""
        await self.create()
        await self.start()
        self.channel.unlink()
        self.fds = self.channel.take_output()
        self.channel.release()

    async def sh(self, script: str) -> tuple[Exited | NoExec, str]:
        """Run a shell script as a step: how it ended, and its standard output with its errors."""
        self.steps += 1
        step = StepCommand(self.steps, ("/bin/sh", "-c", script), ENV, "/tmp", merge_output=True)
        end = await self.channel.run_step(step)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.fds[0], 1 << 16):
                data += piece
        return end, data.decode(errors="replace")

    async def out(self, script: str) -> str:
        """Output of a script that has to succeed."""
        end, text = await self.sh(script)
        assert isinstance(end, Exited), end
        assert end.status == 0, (end, text)
        return text.strip()

    async def end(self) -> None:
        """Kill it and remove every trace."""
        if self.pidfd >= 0:
            await self.runtime.kill(self.ref, self.pidfd)
            await self.runtime.wait(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        await self.runtime.remove(self.ref)

    def undo(self) -> None:
        """What an executor's ledger undoes."""
        self.channel.close()
        for fd in self.fds:
            os.close(fd)
        if self.pidfd >= 0:
            os.close(self.pidfd)
        undo(self.ledger.record(), self.host, self.cgroups, orphans=False)
        self.cgroups.remove_empty(f"/forgeyard/{EXECUTOR}")
        self.ledger.close_and_remove()
        self.host.close()


def lay_out(runtime: DockerRuntime, state: Path, job: Job, rootfs: RootfsPlan | None = None) -> DockerJob:
    """Everything up to the compiled bundle, without a user namespace. Blocking."""
    build()
    sandbox, host, cgroups = SandboxId.mint(), Host(str(state)), CgroupHost.detect()
    request = request_from_job(job, context=AttemptContext("a"), workspace=PreparedWorkspace())
    rootfs = rootfs or replace(HostRootfs(state / "rootfs").plan(), user=process_mode_user(job.user))
    planned = plan_request(request, rootfs, isolation=IsolationLevel.CONTAINER, nofile_ceiling=16384)
    planned = replace(planned, plan=replace(planned.plan, user_namespace=False))
    ledger = Ledger.open(str(state), sandbox, EXECUTOR)
    ledger.intend("attempt", attempt="a", name="test")
    host.create_directory(sandbox, ledger)
    group = f"/forgeyard/{EXECUTOR}/{sandbox}"
    ledger.intend("cgroup", path=group, leaves=["job"])
    cgroup = AttemptCgroup.create(cgroups, group)
    user = planned.plan.user
    placed = host.setup(
        SandboxSetup(
            sandbox=sandbox,
            directory=host.directory_of(sandbox),
            uid_base=None,
            uid_count=65536,
            job_uid=user.uid,
            job_gid=user.gid,
            binds=planned.binds,
            overlays=planned.overlays,
            scratch=planned.scratch,
        ),
        ledger,
    )
    files = Path(placed.files)
    (files / "hosts").write_text(hosts_file(sandbox.hostname))
    channel = ShimChannel.create(files / "ctl", shim=shim_binary(), uid=user.uid, gid=user.gid)
    sources = {slot: f"{files}/{name}" for slot, name in planned.attempt_files.items()}
    sources |= {**planned.host_sources, **placed.sources}
    placement = Placement(
        sandbox=sandbox,
        rootfs=sources.pop("rootfs"),
        sources=sources,
        uid_base=None,
        uid_count=65536,
        cgroup=cgroup.leaf("job"),
        netns=None,
        argv=ShimChannel.argv,
    )
    bundle = compile_bundle(planned.plan, placement, machine=platform.machine())
    return DockerJob(
        runtime, host, cgroups, ledger, cgroup, planned, placed, placement, bundle, rootfs, channel,
        ContainerRef(sandbox.container, files),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def docker_job(
    runtime: DockerRuntime, state: Path, job: Job | None = None, rootfs: RootfsPlan | None = None
) -> AsyncIterator[DockerJob]:
    """A laid out job, and its end."""
    made = await asyncio.to_thread(lay_out, runtime, state, job or Job(rootfs="host", steps=()), rootfs)
    try:
        yield made
    finally:
        try:
            await made.end()
        finally:
            made.undo()


def mounts_of(pid: int) -> dict[str, list[str]]:
    """Flags by mount point."""
    lines = (line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape").splitlines())
    return {fields[4]: fields[5].split(",") for fields in lines}


def docker(daemon: Any, *arguments: str) -> str:
    """Output of the daemon's own command line."""
    return subprocess.run(daemon.docker(*arguments), check=True, capture_output=True, text=True, timeout=60).stdout
