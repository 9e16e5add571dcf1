"""The adapter for containerd: records, tasks and processes over its gRPC services.

Containers run the literal bundle on a root that is ours, so that containerd mounts nothing. The task's own streams
are /dev/null: the FIFOs of the process shim carry everything, and a daemon that is restarted interrupts nothing.
PID 1 is watched and killed by its pidfd. The daemon's word is asked for where only it knows, and never believed to be
an exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from forgeyard_host.children import wait_readable
from forgeyard_host.processes import send_signal, wait_ended
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.plan import Bundle, EngineImage, NetworkAttachment, RootfsPlan
from forgeyard_runtimes.containerd import calls, effective
from forgeyard_runtimes.containerd.capabilities import NETWORK_JOIN, NETWORK_SHARE, claims
from forgeyard_runtimes.containerd.client import START_DEADLINE, Client
from forgeyard_runtimes.containerd.connect import connect
from forgeyard_runtimes.containerd.errors import Code, DaemonError, expecting, unsupported
from forgeyard_runtimes.containerd.events import EventWatch, Sight
from forgeyard_runtimes.containerd.images import ContainerdImages
from forgeyard_runtimes.containerd.messages import containers, task_types, tasks
from forgeyard_runtimes.containerd.metrics import ContainerUsage, read_usage
from forgeyard_runtimes.containerd.settings import HANDLERS, ContainerdSettings, owned_by
from forgeyard_runtimes.containerd.sweep import sweep
from forgeyard_runtimes.containerd.task import STATUS, get_task, kill_all, remove_container, run_process
from forgeyard_runtimes.containerd.translate import (
    container_record,
    parsed,
    refuse_inherited_network,
    refuse_uncarried,
    runtime_options,
    uncarried,
)
from forgeyard_runtimes.contract import (
    ContainerRef,
    ContainerState,
    ContainerStatus,
    NetworkJoin,
    NetworkShare,
    Stdio,
    SweepReport,
)
from forgeyard_runtimes.labels import DIRECTORY
from forgeyard_runtimes.shielding import shielded

_KILL_PATIENCE: Final = 1.0
"""Seconds after which a killed PID 1 is not left to the kernel alone."""


@dataclass(slots=True)
class _Live:
    """A container that this process made. `shim`: pidfd of containerd's shim, which holds it."""

    bundle: Bundle
    netns: str | None
    pid: int = 0
    shim: int = -1


class ContainerdRuntime:
    """Containers of one containerd. Use `find`, and `close` at the end."""

    network_join: ClassVar[NetworkJoin] = NETWORK_JOIN
    network_share: ClassVar[NetworkShare] = NETWORK_SHARE
    joins_user_namespace: ClassVar[bool] = True
    literal: ClassVar[bool] = False
    declared_weaker: ClassVar[frozenset[str]] = frozenset()
    declared_stricter: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, client: Client, settings: ContainerdSettings, number: str) -> None:
        self.client = client
        self._settings = settings
        self._version = number
        self.images = None if settings.own_rootfs else ContainerdImages(client, settings)
        self._live: dict[str, _Live] = {}
        self._events = EventWatch(client)

    @classmethod
    async def find(cls, settings: ContainerdSettings) -> Self:
        """Connect, ask the version, and have our namespace made.

        :raises ExecutorError: UNSUPPORTED when it is not there, not open to us, too old, or the handler can't run our
            shim; TIMEOUT when it does not answer.
        """
        client, number = await connect(settings)
        return cls(client, settings, number)

    @property
    def name(self) -> str:
        """Name and version, such as ``containerd 1.6.20``."""
        return f"containerd {self._version}"

    @property
    def address(self) -> str:
        """Where the daemon listens."""
        return f"unix://{self.client.socket}"

    def carries(self, bundle: Bundle) -> tuple[str, ...]:
        """Fields of the bundle that can't be honoured here, by name; empty for all that the compiler makes."""
        return uncarried(parsed(bundle), self._settings)

    async def create(
        self, ref: ContainerRef, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment, stdio: Stdio
    ) -> None:
        """Make the container's record. No process yet.

        :raises SandboxError: UNSUPPORTED_ISOLATION or NETWORK_SETUP_FAILED for what can't be carried.
        :raises DaemonError: the record could not be made.
        """
        if stdio.carrier not in HANDLERS[self._settings.handler]:
            raise unsupported("runtime_carrier", f"{self.name} has no carrier {stdio.carrier}", "use FIFOs")
        spec = parsed(bundle)
        refuse_uncarried(spec, self._settings, self.name)
        refuse_inherited_network(spec, network)
        self._events.start(ref.container_id)
        record = container_record(ref, bundle, self._settings)
        if self.images is not None and rootfs.engine is not None:
            self.images.describe(record, rootfs.engine)
        request = containers.CreateContainerRequest(container=record)
        await shielded(self._create(ref, request, rootfs.engine))
        self._live[ref.container_id] = _Live(bundle, _network_path(spec))

    async def _create(
        self, ref: ContainerRef, request: containers.CreateContainerRequest, image: EngineImage | None
    ) -> None:
        try:
            answer = await self.client.call(calls.CONTAINER_CREATE, request)
        except DaemonError as error:
            if error.code is not Code.ALREADY_EXISTS:
                await self._undo(ref)
            raise
        if self.images is not None and image is not None:
            try:
                await self.images.check(answer.container, image)
            except BaseException:
                await self._undo(ref)
                raise

    async def start(self, ref: ContainerRef, *, netns: str | None = None) -> int:
        """Create the task and start it; the pid of PID 1.

        :param netns: can't be inherited from a daemon: None, or the path that the bundle names.
        """
        live = self._live.get(ref.container_id)
        if netns is not None and (live is None or live.netns != netns):
            raise unsupported(
                "network_inherited", "containerd can't start a container in a network namespace", "plumb it at the gate"
            )
        try:
            return await shielded(self._start(ref))
        except BaseException:
            await self._undo(ref)
            raise

    async def _start(self, ref: ContainerRef) -> int:
        request = tasks.CreateTaskRequest(container_id=ref.container_id, options=runtime_options(self._settings))
        created = await self.client.call(calls.TASK_CREATE, request, deadline=START_DEADLINE)
        if (live := self._live.get(ref.container_id)) is not None:
            live.pid = created.pid
            live.shim = effective.shim_of(created.pid)
        self._events.started(ref.container_id)
        await self.client.call(
            calls.TASK_START, tasks.StartRequest(container_id=ref.container_id), deadline=START_DEADLINE
        )
        return created.pid

    async def _undo(self, ref: ContainerRef) -> None:
        """After a failure, whose error is the caller's. What can't be removed now is reported by its own `remove`."""
        with contextlib.suppress(ForgeyardError):
            await shielded(self.remove(ref))

    async def exec(self, ref: ContainerRef, process: bytes, *, deadline: float) -> int:
        """Run a compiled process.json in the container; its exit code, 128+n for a death by signal n.

        :raises ExecutorError: SPAWN_FAILED when it could not be started, TIMEOUT when it outlived `deadline`.
        """
        return await run_process(self.client, ref.container_id, process, deadline)

    async def wait(self, pidfd: int) -> None:
        """Until PID 1 is dead."""
        await wait_readable(pidfd)

    async def kill(self, ref: ContainerRef, pidfd: int) -> None:
        """SIGKILL PID 1 by its pidfd. The daemon is asked to kill everything only if that does not do it."""
        if send_signal(pidfd, signal.SIGKILL) and not await _dead_within(pidfd, _KILL_PATIENCE):
            await kill_all(self.client, ref.container_id)

    async def remove(self, ref: ContainerRef) -> None:
        """Delete the task, which ends containerd's shim, and the record. Neither there is no error.

        :raises DaemonError: something could not be removed; also after waiting for a daemon that is away.
        """
        await remove_container(self.client, ref.container_id)
        self._events.forget(ref.container_id)
        self._let_go(ref.container_id)

    def _let_go(self, container_id: str) -> None:
        live = self._live.pop(container_id, None)
        if live is not None and live.shim >= 0:
            os.close(live.shim)

    async def state(self, ref: ContainerRef) -> ContainerState:
        """What the daemon and its shim know; CREATING for a record without a task."""
        if (process := await get_task(self.client, ref.container_id)) is not None:
            return _state(process)
        with expecting(Code.NOT_FOUND):
            request = containers.GetContainerRequest(id=ref.container_id)
            await self.client.call(calls.CONTAINER_GET, request, patient=True)
            return ContainerState(ref.container_id, ContainerStatus.CREATING)
        return ContainerState(ref.container_id, ContainerStatus.ABSENT)

    async def list(self, directories: tuple[Path, ...]) -> tuple[ContainerState, ...]:
        """The containers of the attempts in `directories`."""
        wanted = {str(directory) for directory in directories}
        request = containers.ListContainersRequest(filters=[owned_by(self._settings)])
        records = (await self.client.call(calls.CONTAINER_LIST, request, patient=True)).containers
        answer = await self.client.call(calls.TASK_LIST, tasks.ListTasksRequest(), patient=True)
        running = {process.id: _state(process) for process in answer.tasks}
        return tuple(
            running.get(record.id, ContainerState(record.id, ContainerStatus.CREATING))
            for record in sorted(records, key=lambda record: record.id)
            if record.labels.get(DIRECTORY) in wanted
        )

    def cgroup(self, ref: ContainerRef) -> None:
        """The group that the bundle names."""

    def effective_spec(self, ref: ContainerRef) -> Mapping[str, Any]:
        """The spec in containerd's own bundle, which is the one that runc was given.

        :raises ExecutorError: LOST, when it can't be read.
        """
        live = self._live.get(ref.container_id)
        return effective.written_spec(live.pid if live is not None else 0)

    async def read_back(self, ref: ContainerRef) -> effective.ReadBack:
        """Both specs that containerd has of a container, whoever made it.

        :raises ForgeyardError: one can't be read.
        """
        return await effective.read_back(self.client, ref.container_id)

    async def loss(self, ref: ContainerRef) -> ExecutorError | None:
        """Once PID 1 is dead: whether it died because its runtime did. Such a death says nothing of the job."""
        live = self._live.get(ref.container_id)
        if live is None or live.shim < 0 or not wait_ended(live.shim, 0):
            return None
        return ExecutorError(
            ExecutorErrorKind.LOST,
            "runtime_lost",
            "containerd's shim ended, and took the container along",
            details="how the job would have ended is not known",
            resolution="look at the daemon's log, and for whoever kills processes on this host",
        )

    def sight(self, ref: ContainerRef) -> Sight:
        """What the daemon's events said of a container. A note: verdicts rest on the kernel's own counters."""
        return self._events.sight(ref.container_id)

    async def usage(self, ref: ContainerRef) -> ContainerUsage:
        """What the container uses now, as the shim reads it."""
        return await read_usage(self.client, ref.container_id)

    async def sweep(self, alive: Callable[[str], bool]) -> SweepReport:
        """Remove what dead executors left at the daemon. See `sweep.sweep`."""
        return await sweep(self.client, self._settings, alive)

    def capabilities(self) -> ExecutorCapabilities:
        """What this adapter claims."""
        return replace(claims(self.name), rootfs="own" if self.images is None else "snapshotter")

    async def close(self) -> None:
        """Stop listening and disconnect. Containers live on."""
        await self._events.close()
        for container_id in tuple(self._live):
            self._let_go(container_id)
        await self.client.close()


def _state(process: task_types.Process) -> ContainerState:
    status = STATUS.get(process.status, ContainerStatus.CREATING)
    return ContainerState(process.id, status, 0 if status is ContainerStatus.STOPPED else process.pid)


def _network_path(spec: Mapping[str, Any]) -> str | None:
    entries = spec.get("linux", {}).get("namespaces", ())
    return next((entry.get("path") for entry in entries if entry["type"] == "network"), None)


async def _dead_within(pidfd: int, seconds: float) -> bool:
    """A duplicate is watched: the loop may have a reader on the descriptor itself."""
    own = os.dup(pidfd)
    try:
        async with asyncio.timeout(seconds):
            await wait_readable(own)
    except TimeoutError:
        return False
    finally:
        os.close(own)
    return True
