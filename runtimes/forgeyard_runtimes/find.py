"""An adapter by its name. Adapters of daemons are imported when they are asked for: their libraries are not small."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.contract import ContainerRuntime

COMMAND_LINES: Final = ("runc", "crun", "runsc")
CONTRACT_ONLY: Final = {
    "runsc": "PID 1 is a process of gVisor's own kernel, where what was applied can't be read back before a job starts",
}
"""Command lines whose adapter keeps the contract, and whose isolation of a job would be an unverified claim."""


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What an adapter of a daemon has to know of its executor.

    :param executor: the executor's id, for labels.
    :param state: what names its state directory, for labels: see `state_name`. A sweep looks at no other's objects.
    :param address: of the daemon; None takes CONTAINERD_ADDRESS, CONTAINER_HOST, or DOCKER_HOST and Docker's
        contexts, and then the usual place.
    :param own_rootfs: images are unpacked by the executor; False leaves it to the engine.
    :param images: directory of the executor's image store, which decides what an engine keeps for it.
    """

    executor: str = ""
    state: str = ""
    address: str | None = None
    own_rootfs: bool = True
    images: str = ""


def state_name(state_dir: str) -> str:
    """A state directory as labels have it: a digest, for labels are short and shown to everybody."""
    return hashlib.sha256(os.path.realpath(state_dir).encode("utf-8", "surrogateescape")).hexdigest()[:32]


async def find_runtime(name: str, settings: RuntimeSettings | None = None) -> ContainerRuntime:
    """The adapter called `name`, once its runtime or daemon has answered.

    :raises ExecutorError: UNSUPPORTED when it is unknown, not installed, too old or can't run our shim; what is wrong
        with a daemon (not there, no permission, no answer).
    """
    settings = settings or RuntimeSettings()
    if name in CONTRACT_ONLY:
        raise _unsupported("runtime_unverified", f"no jobs run on {name}: {CONTRACT_ONLY[name]}", "use --runtime runc")
    if name in COMMAND_LINES:
        return await CliRuntime.find(name)
    connect = DAEMONS.get(name)
    if connect is None:
        known = ", ".join((*COMMAND_LINES, *DAEMONS))
        raise _unsupported("runtime_unknown", f"no runtime is called {name!r}", f"use one of {known}")
    try:
        return await connect(settings)
    except ModuleNotFoundError as error:
        raise _unsupported(
            "runtime_library",
            f"the adapter for {name} needs the Python package {error.name}",
            f"install forgeyard-executor[{name}]",
        ) from error


@asynccontextmanager
async def open_runtime(name: str, settings: RuntimeSettings | None = None) -> AsyncIterator[ContainerRuntime]:
    """`find_runtime`, disconnected at the end."""
    runtime = await find_runtime(name, settings)
    try:
        yield runtime
    finally:
        await runtime.close()


async def _containerd(settings: RuntimeSettings) -> ContainerRuntime:
    from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
    from forgeyard_runtimes.containerd.settings import ContainerdSettings

    return await ContainerdRuntime.find(
        ContainerdSettings(
            address=settings.address or "",
            executor=settings.executor,
            state=settings.state,
            own_rootfs=settings.own_rootfs,
            images=settings.images,
        )
    )


async def _podman(settings: RuntimeSettings) -> ContainerRuntime:
    from forgeyard_runtimes.podman.runtime import PodmanRuntime
    from forgeyard_runtimes.podman.settings import PodmanSettings

    return await PodmanRuntime.find(
        PodmanSettings(
            settings.executor,
            settings.state,
            settings.address,
            own_rootfs=settings.own_rootfs,
            images=settings.images,
        )
    )


async def _docker(settings: RuntimeSettings) -> ContainerRuntime:
    from forgeyard_runtimes.docker.client import DockerSettings
    from forgeyard_runtimes.docker.runtime import DockerRuntime

    return await DockerRuntime.find(
        DockerSettings(
            host=settings.address or "",
            executor=settings.executor,
            state=settings.state,
            own_rootfs=settings.own_rootfs,
            images=settings.images,
        )
    )


DAEMONS: Final[dict[str, Callable[[RuntimeSettings], Awaitable[ContainerRuntime]]]] = {
    "containerd": _containerd,
    "podman": _podman,
    "docker": _docker,
}


def _unsupported(reason: str, brief: str, resolution: str) -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, resolution=resolution)
