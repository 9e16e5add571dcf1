"""What an executor that was killed leaves at a daemon: containers that its adapter made, and things of its label."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

from contract_box import PLAN, ROOTFS, Box
from daemons import Containerd, Daemon, Dockerd, PodmanService

from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import NetworkAttachment
from forgeyard_runtimes.contract import ContainerRef, ContainerRuntime, ContainerStatus, Stdio
from forgeyard_runtimes.find import RuntimeSettings, open_runtime, state_name
from forgeyard_runtimes.labels import STATE

Stage = Literal["created", "running", "exited"]
WAIT = 20.0
"""Seconds for a daemon to see that a container has ended."""


class Leftovers:
    """Containers of one executor, on one small root. They run no shim of ours: nobody would open its channel."""

    def __init__(self, runtime: ContainerRuntime) -> None:
        self.runtime = runtime
        self._box = Box(runtime, PLAN)
        self._refs: list[ContainerRef] = []

    @property
    def rootfs(self) -> Path:
        """A root that containers can be made of."""
        return Path(self._box.placement.rootfs)

    async def make(self, stage: Stage, sandbox: SandboxId | None = None) -> str:
        """One more container; its name."""
        sandbox = sandbox or SandboxId.mint()
        ref = ContainerRef(sandbox.container, self._box.directory)
        self._refs.append(ref)
        spec = self._box.intended
        spec["process"]["args"] = ["/bin/sleep", "600"]
        spec["annotations"]["dev.forgeyard.sandbox"] = sandbox.value
        spec["linux"]["cgroupsPath"] += f"/{sandbox.value}"
        bundle = dataclasses.replace(self._box.bundle, config=json.dumps(spec).encode())
        await self.runtime.create(ref, bundle, ROOTFS, NetworkAttachment(PLAN.network), Stdio())
        if stage != "created":
            pid = await self.runtime.start(ref)
            if stage == "exited":
                os.kill(pid, signal.SIGKILL)
                await self._ended(ref)
        return ref.container_id

    async def _ended(self, ref: ContainerRef) -> None:
        async with asyncio.timeout(WAIT):
            while (await self.runtime.state(ref)).status is not ContainerStatus.STOPPED:
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Remove what is still there, and what was made for it here."""
        for ref in self._refs:
            await self.runtime.remove(ref)
        await self._box.close()


@contextlib.asynccontextmanager
async def leftovers(name: str, daemon: Daemon, state: Path) -> AsyncIterator[Leftovers]:
    """Containers at `daemon` of an executor of the state directory `state` that has no lock: it is dead."""
    settings = RuntimeSettings(SandboxId.mint().value, state_name(str(state)), daemon.address)
    async with open_runtime(name, settings) as runtime:
        made = Leftovers(runtime)
        try:
            yield made
        finally:
            await asyncio.shield(made.close())


def label_of(state: Path) -> str:
    """As command lines take it."""
    return f"{STATE}={state_name(str(state))}"


def say(daemon: Daemon, *words: str) -> str:
    """What the daemon's own command line says."""
    argv = {Containerd: "ctr", Dockerd: "docker", PodmanService: "podman"}
    command = next(getattr(daemon, name) for kind, name in argv.items() if isinstance(daemon, kind))(*words)
    done = subprocess.run(
        command,
        env=daemon.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def containers_of(daemon: Daemon, state: Path) -> set[str]:
    """Names of the containers that the daemon has of the state directory `state`."""
    if isinstance(daemon, Containerd):
        words = ("containers", "ls", "-q", f'labels."{STATE}"=={state_name(str(state))}')
    else:
        words = ("ps", "-a", "--filter", f"label={label_of(state)}", "--format", "{{.Names}}")
    return set(say(daemon, *words).split())


@contextlib.contextmanager
def unremovable(daemon: Daemon, made: Leftovers, name: str) -> Iterator[None]:
    """While in the block the daemon can't remove the container `name`, each for a reason of its own."""
    if isinstance(daemon, Dockerd):
        with _immutable(daemon, name):
            yield
    elif isinstance(daemon, PodmanService):
        with _joined(daemon, made, name):
            yield
    else:
        with _hung(daemon, name):
            yield


@contextlib.contextmanager
def _immutable(daemon: Dockerd, name: str) -> Iterator[None]:
    """A file of the container's can't be deleted, as on a disk with faults."""
    identity = say(daemon, "inspect", "--type", "container", "--format", "{{.Id}}", name).strip()
    path = daemon.directory / "data/containers" / identity / "hostconfig.json"
    subprocess.run(["chattr", "+i", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


@contextlib.contextmanager
def _joined(daemon: PodmanService, made: Leftovers, name: str) -> Iterator[None]:
    """Somebody else's container is in a namespace of it."""
    other = f"others-{os.urandom(4).hex()}"
    say(daemon, "create", "--name", other, "--uts", f"container:{name}", "--rootfs", str(made.rootfs), "/bin/true")
    try:
        yield
    finally:
        say(daemon, "rm", "--force", "--time", "0", other)


@contextlib.contextmanager
def _hung(daemon: Daemon, name: str) -> Iterator[None]:
    """Its shim does not answer. It runs: a container without a task has none."""
    assert isinstance(daemon, Containerd)
    tasks = dict(line.split()[:2] for line in say(daemon, "tasks", "ls").splitlines()[1:])
    shim = int(Path(f"/proc/{tasks[name]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(shim, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(shim, signal.SIGCONT)
