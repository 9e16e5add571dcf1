"""Jobs and bare containers at a private containerd."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import shim_sandbox
from daemons import Containerd, TestedContainerd, remove_groups
from jobs import collect

from forgeyard_executor import Execution, ExecutionResult, Executor, Job
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.plan import Bundle, NetworkAttachment, RootfsPlan
from forgeyard_model.policy import NetworkMode
from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
from forgeyard_runtimes.containerd.settings import ContainerdSettings
from forgeyard_runtimes.contract import ContainerRef, Stdio

NETWORK = NetworkAttachment(NetworkMode.DENY)
ROOTFS = RootfsPlan(ExecutorKind.PROCESS, (), "")


def settings_for(daemon: Containerd, state: str = "test", **more: Any) -> ContainerdSettings:
    """Settings of an executor at a private daemon."""
    return ContainerdSettings(address=daemon.address, executor="executor-1", state=state, **more)


@contextlib.asynccontextmanager
async def runtime_at(daemon: Containerd, state: str = "test", **more: Any) -> AsyncIterator[ContainerdRuntime]:
    """An adapter, connected for as long as the block."""
    runtime = await ContainerdRuntime.find(settings_for(daemon, state, **more))
    try:
        yield runtime
    finally:
        await runtime.close()


@contextlib.asynccontextmanager
async def executor_at(
    daemon: Containerd, state: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Executor, ContainerdRuntime]]:
    """An executor whose jobs run at the daemon, and the adapter that it uses."""
    found: list[ContainerdRuntime] = []
    connect = ContainerdRuntime.find

    async def noted(settings: ContainerdSettings) -> ContainerdRuntime:
        found.append(await connect(settings))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setenv("CONTAINERD_ADDRESS", daemon.address)
        patch.setattr(ContainerdRuntime, "find", noted)
        async with Executor.open(state, runtime="containerd") as executor:
            yield executor, found[-1]
    for runtime in found:
        await runtime.close()


async def result_of(executor: Executor, job: Job) -> tuple[ExecutionResult, bytes]:
    """Run a job to its end; its standard output."""
    async with executor.run(job) as execution:
        out, _ = await collect(execution)
        return await execution.wait(), out


def ref_of(state: Path, execution: Execution) -> ContainerRef:
    """The container of a running job."""
    return ContainerRef(f"fy-{execution.sandbox_id}", state / "sandboxes" / execution.sandbox_id / "mnt/files")


@dataclass(frozen=True, slots=True)
class Bare:
    """A container that runs one command on the host's /usr, without an executor."""

    ref: ContainerRef
    spec: dict[str, Any]

    @property
    def bundle(self) -> Bundle:
        """As compiled."""
        return Bundle(json.dumps(self.spec).encode(), "sha256:plan", "sha256:bundle")

    def changed(self, **process: Any) -> Bare:
        """With other fields of `process`."""
        return replace(self, spec={**self.spec, "process": {**self.spec["process"], **process}})

    async def lay_down(self, runtime: ContainerdRuntime) -> None:
        """Create it."""
        await runtime.create(self.ref, self.bundle, ROOTFS, NETWORK, Stdio())

    async def run(self, runtime: ContainerdRuntime) -> int:
        """Create and start it."""
        await self.lay_down(runtime)
        return await runtime.start(self.ref)


def bare(directory: Path, *argv: str, name: str | None = None) -> Bare:
    """A container in `directory`, which others can walk through."""
    made = shim_sandbox.Sandbox(directory)
    if not (directory / "rootfs").exists():
        made.lay_out(argv or ("/bin/sleep", "600"))
    spec = json.loads((directory / "config.json").read_text())
    spec["process"]["args"] = list(argv or ("/bin/sleep", "600"))
    spec["process"]["env"] = ["PATH=/usr/bin:/bin"]
    spec["root"]["path"] = str(directory / "rootfs")
    name = name or f"fy-{os.urandom(8).hex()}"
    spec["linux"]["cgroupsPath"] = f"/forgeyard-test-{directory.name}/{name}"
    return Bare(ContainerRef(name, directory), spec)


def remove_test_groups(directory: Path) -> None:
    """The parent that bare containers' groups were in."""
    remove_groups(f"/forgeyard-test-{directory.name}")


def own_daemon() -> Iterator[Containerd]:
    """For the `daemon` fixture of a test module: one containerd for the file, which every test leaves running."""
    with TestedContainerd() as started:
        yield started


def bare_place() -> Iterator[Path]:
    """For the `place` fixture of a test module: a directory for containers without an executor."""
    path = Path(tempfile.mkdtemp(prefix="fy-ctd-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    remove_test_groups(path)
    shutil.rmtree(path)


def ctr(daemon: Containerd, *arguments: str) -> str:
    """What containerd's own command line says."""
    done = subprocess.run(daemon.ctr(*arguments), capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"ctr {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def shims(daemon: Containerd) -> Iterator[int]:
    """Pids of the daemon's shims."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                argv = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                if b"shim" in argv[0] and any(str(daemon.directory).encode() in word for word in argv):
                    yield int(entry)


def assert_empty(daemon: Containerd) -> None:
    """Nothing of ours is at the daemon. A shim ends by itself, a moment after it has answered for the last time."""
    assert ctr(daemon, "containers", "list", "-q") == ""
    assert ctr(daemon, "tasks", "list", "-q") == ""
    deadline = time.monotonic() + 60
    while left := list(shims(daemon)):
        assert time.monotonic() < deadline, f"shims are left: {left}"
        time.sleep(0.01)
