"""A container runtime that pretends: a state machine, without a process or a file.

    runtime = FakeRuntime()
    runtime.fail("start", error)            # the next start
    pid = await runtime.start(ref)
    runtime.die(ref, error)                 # PID 1 was killed from outside; `loss` tells `error`

Pids are numbers that no kernel gives (above its highest), and a pid stands for its own pidfd: what would send it a
signal by mistake meets nobody.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forgeyard_executor.testing.fake_sandbox import RUNTIME
from forgeyard_executor.testing.script import Script
from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.plan import SHIM_DIR, Bundle, NetworkAttachment, RootfsPlan
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_runtimes.contract import (
    ContainerRef,
    ContainerState,
    ContainerStatus,
    EngineImages,
    NetworkJoin,
    NetworkShare,
    Stdio,
    SweepReport,
)

FIRST_PID: Final = (1 << 22) + 1
"""Above the highest pid that Linux gives."""
CLAIMS: Final = ExecutorCapabilities(
    runtime="fake",
    isolation_levels=frozenset({IsolationLevel.NONE}),
    network_modes=frozenset(NetworkMode),
    resource_controls=ResourceControls(cpu=False, memory=False, pids=False, disk=False),
    user_namespace=True,
    seccomp=False,
)


@dataclass(slots=True)
class _Container:
    ref: ContainerRef
    spec: Mapping[str, Any]
    status: ContainerStatus = ContainerStatus.CREATED
    pid: int = 0
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    loss: ForgeyardError | None = None


class FakeRuntime:
    """Keeps the contract of `ContainerRuntime`, and starts nothing. Within a running event loop.

    :param claims: what it says that it can do; by default no isolation, for there is none.
    :param refuses: names of bundle fields that it can't honour: `create` refuses each bundle then.
    :param exits: what a process of `exec` exits with, by its arguments.
    :ivar script: failures and delays by verb. See `fail` and `delay`.
    """

    network_join: NetworkJoin = "path"
    network_share: NetworkShare = "made"
    joins_user_namespace = True
    images: EngineImages | None = None
    literal = True
    declared_weaker: frozenset[str] = frozenset()
    declared_stricter: frozenset[str] = frozenset()
    name = RUNTIME
    address = ""

    def __init__(
        self,
        *,
        claims: ExecutorCapabilities = CLAIMS,
        refuses: tuple[str, ...] = (),
        exits: Callable[[list[str]], int] = lambda _: 0,
    ) -> None:
        self.script = Script()
        self._claims, self._refuses, self._exits = claims, refuses, exits
        self._containers: dict[str, _Container] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._pid = FIRST_PID

    # ---- what tests tell it

    def fail(self, verb: str, error: ForgeyardError, *, times: int = 1) -> None:
        """The next `times` calls of `verb` raise `error`. A failed create or start leaves nothing, as with all of them.

        :param verb: a method's name, such as ``create``.
        """
        self.script.fail(verb, error, times)

    def delay(self, verb: str, seconds: float) -> None:
        """Each call of `verb` takes so long from here on."""
        self.script.delay(verb, seconds)

    def die(self, ref: ContainerRef, loss: ForgeyardError | None = None) -> None:
        """PID 1 dies, unasked. `loss`: what the runtime knows of that."""
        container = self._containers[ref.container_id]
        container.loss = loss
        self._end(container)

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the containers that are there, in whatever state."""
        return tuple(self._containers)

    # ---- the contract

    async def create(
        self, ref: ContainerRef, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment, stdio: Stdio
    ) -> None:
        """Lay it down.

        :raises ExecutorError: its name is taken, or the bundle has what can't be honoured.
        """
        await self.script.play("create", ref.container_id)
        if ref.container_id in self._containers:
            raise _failed("container_exists", f"there is a container {ref.container_id} already")
        if refused := self.carries(bundle):
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "bundle_not_carried",
                f"this runtime can't honour {', '.join(refused)}",
                resolution="take it out, or use another runtime",
            )
        self._containers[ref.container_id] = _Container(ref, json.loads(bundle.config))

    async def start(self, ref: ContainerRef, *, netns: str | None = None) -> int:
        """Start PID 1, which has to be the shim; a number in the place of its pid.

        :raises ExecutorError: it is no such program, or the container is in no state to be started.
        """
        try:
            await self.script.play("start", ref.container_id)
            container = self._startable(ref)
        except BaseException:
            if (left := self._containers.get(ref.container_id)) is not None and not left.pid:
                del self._containers[ref.container_id]
            raise
        self._pid += 1
        container.pid, container.status = self._pid, ContainerStatus.RUNNING
        self._ended[self._pid] = container.dead
        return container.pid

    async def exec(self, ref: ContainerRef, process: bytes, *, deadline: float) -> int:
        """What `exits` says of its arguments.

        :raises ExecutorError: LOST, nothing runs there; TIMEOUT, its delay was longer than `deadline`.
        """
        try:
            async with asyncio.timeout(deadline):
                await self.script.play("exec", ref.container_id)
        except TimeoutError as error:
            raise ExecutorError(ExecutorErrorKind.TIMEOUT, "exec", f"exec took longer than {deadline:g}s") from error
        if self._status(ref) is not ContainerStatus.RUNNING:
            raise ExecutorError(ExecutorErrorKind.LOST, "not_running", f"{ref.container_id} does not run")
        return self._exits(list(json.loads(process)["args"]))

    async def wait(self, pidfd: int) -> None:
        """Until that PID 1 is dead."""
        await self.script.play("wait", str(pidfd))
        await self._known(pidfd).wait()

    async def kill(self, ref: ContainerRef, pidfd: int) -> None:
        """End it. One that is dead is what was wanted."""
        await self.script.play("kill", ref.container_id)
        self._known(pidfd)
        container = self._containers.get(ref.container_id)
        if container is not None:
            self._end(container)

    async def remove(self, ref: ContainerRef) -> None:
        """Forget a dead container. Repeating it is no error.

        :raises ExecutorError: it runs.
        """
        await self.script.play("remove", ref.container_id)
        if self._status(ref) is ContainerStatus.RUNNING:
            raise _failed("still_running", f"{ref.container_id} still runs")
        self._containers.pop(ref.container_id, None)

    async def state(self, ref: ContainerRef) -> ContainerState:
        """As it is."""
        await self.script.play("state", ref.container_id)
        return self._shown(ref)

    async def list(self, directories: tuple[Path, ...]) -> tuple[ContainerState, ...]:
        """Those of the attempts in `directories`."""
        await self.script.play("list", "")
        return tuple(self._shown(item.ref) for item in self._containers.values() if item.ref.directory in directories)

    def effective_spec(self, ref: ContainerRef) -> Mapping[str, Any]:
        """The bundle's own: nothing is changed on the way, and nothing applied.

        :raises ExecutorError: LOST, there is no such container.
        """
        if ref.container_id not in self._containers:
            raise ExecutorError(ExecutorErrorKind.LOST, "no_container", f"there is no container {ref.container_id}")
        return self._containers[ref.container_id].spec

    def capabilities(self) -> ExecutorCapabilities:
        """What it claims."""
        return self._claims

    def carries(self, bundle: Bundle) -> tuple[str, ...]:
        """What it refuses."""
        return self._refuses

    def cgroup(self, ref: ContainerRef) -> str | None:
        """The one that the bundle names."""
        return None

    async def loss(self, ref: ContainerRef) -> ForgeyardError | None:
        """What `die` was told."""
        await self.script.play("loss", ref.container_id)
        container = self._containers.get(ref.container_id)
        return None if container is None else container.loss

    async def sweep(self, alive: Callable[[str], bool]) -> SweepReport:
        """Remove what belongs to sandboxes that are dead."""
        await self.script.play("sweep", "")
        removed, kept = [], []
        for name, container in list(self._containers.items()):
            if alive(name.removeprefix("fy-")):
                kept.append(f"container {name}")
                continue
            self._end(container)
            del self._containers[name]
            removed.append(f"container {name}")
        return SweepReport(tuple(removed), tuple(kept))

    async def close(self) -> None:
        """Disconnect. Containers live on."""
        await self.script.play("close", "")

    # ---- inside

    def _startable(self, ref: ContainerRef) -> _Container:
        container = self._containers.get(ref.container_id)
        if container is None or container.status is not ContainerStatus.CREATED:
            raise _failed("not_created", f"{ref.container_id} is not waiting to be started")
        program = container.spec.get("process", {}).get("args", [""])[0]
        if program != f"{SHIM_DIR}/init":
            raise _failed("no_program", f"{program!r} is not in the container: no such file or directory")
        return container

    def _status(self, ref: ContainerRef) -> ContainerStatus:
        container = self._containers.get(ref.container_id)
        return ContainerStatus.ABSENT if container is None else container.status

    def _shown(self, ref: ContainerRef) -> ContainerState:
        status = self._status(ref)
        pid = self._containers[ref.container_id].pid if status is ContainerStatus.RUNNING else 0
        return ContainerState(ref.container_id, status, pid)

    def _known(self, pidfd: int) -> asyncio.Event:
        ended = self._ended.get(pidfd)
        if ended is None:
            raise ExecutorError(
                ExecutorErrorKind.LOST, "no_such_process", f"{pidfd} is no pid that this runtime's start returned"
            )
        return ended

    @staticmethod
    def _end(container: _Container) -> None:
        if container.status is ContainerStatus.RUNNING:
            container.status = ContainerStatus.STOPPED
            container.dead.set()


def _failed(reason: str, brief: str) -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.SPAWN_FAILED, reason, brief)
