"""The contract every runtime adapter keeps: the life of one container, in ten verbs.

PID 1 of the container is our shim, which holds at a gate of its own. So `start` may return with the container
running and no byte of the workload executed; the gate is opened by the owner of the shim's channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.plan import Bundle, NetworkAttachment, RootfsPlan


class Carrier(StrEnum):
    """What carries the shim's control and the steps' output out of the container."""

    FIFO = "fifo"


@dataclass(frozen=True, slots=True)
class Stdio:
    """How the container's streams travel. With FIFO its own stdio is /dev/null."""

    carrier: Carrier = Carrier.FIFO


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container at a runtime. `directory` is for the attempt's own files: its bundle, and the runtime's state."""

    container_id: str
    directory: Path

    @property
    def bundle(self) -> Path:
        """Where config.json is."""
        return self.directory / "bundle"


class ContainerStatus(StrEnum):
    """States as the runtime spec names them, and ABSENT."""

    CREATING = "creating"
    CREATED = "created"
    RUNNING = "running"
    STOPPED = "stopped"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What the runtime says of a container. `pid` 0 when it has no process."""

    container_id: str
    status: ContainerStatus
    pid: int = 0


NetworkJoin: TypeAlias = Literal["inherited", "path", "plumbed"]
"""How a container gets into a network that is made for it. Inherited: the runtime is started in it. By path: the bundle
names it. Plumbed: the container has a new one, which is connected while the shim waits at its gate."""

NetworkShare: TypeAlias = Literal["made", "container"]
"""How two containers of an attempt get into one network namespace. Made: it is made for them, and each joins it; by
path, where containers are plumbed otherwise. Container: the second is told the first's name, which runs by then."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found of ours at a runtime, each as ``kind name``.

    :param kept: of sandboxes that are alive.
    :param failed: with the reason why it is still there.
    """

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


class EngineImages(Protocol):
    """Images that an engine is given by digest and unpacks itself, for an operator who wants its store to be used.

    The root is still put together by the executor, of the engine's layers: no engine bounds what a job writes, and few
    give a layer the ids of a user namespace.
    """

    async def unpacked(self, plan: RootfsPlan, hold: str, layout: Path) -> RootfsPlan:
        """`plan` on the engine's layers, which are put there if it lacks them, and kept until `release`.

        :param hold: a new name.
        :param layout: an OCI layout that has the image's blobs.
        :raises ForgeyardError: the engine could not take or unpack it; nothing is held then.
        """

    async def release(self, hold: str) -> None:
        """Keep nothing for `hold` any more. Repeating it is no error. The image stays, for the next job."""


class ContainerRuntime(Protocol):
    """One adapter. Every method raises only ForgeyardError types; each has its own bounded time."""

    @property
    def network_join(self) -> NetworkJoin:
        """How a container gets into a network that is made for it."""

    @property
    def network_share(self) -> NetworkShare:
        """How a container gets into the network namespace of another one of its attempt."""

    @property
    def joins_user_namespace(self) -> bool:
        """A bundle may name a user namespace that is there already; otherwise it has a new one, or none.

        Not both a network by path and a user namespace by path, where a network is usually plumbed.
        """

    @property
    def images(self) -> EngineImages | None:
        """The engine's own images; None where the executor unpacks them, as it does by default."""

    @property
    def literal(self) -> bool:
        """The kernel is given the bundle by a program that we start, so there is nothing of an engine's to read back.

        Its control group is the one that the bundle names, and stays until `remove`.
        """

    @property
    def declared_weaker(self) -> frozenset[str]:
        """Fields of which a comparison of the bundle with `effective_spec` may find less, and why is documented."""

    @property
    def declared_stricter(self) -> frozenset[str]:
        """Fields of which it always applies more than a bundle says; the table of `cells` shows them."""

    @property
    def name(self) -> str:
        """Name and version, such as ``runc 1.1.5``."""

    @property
    def address(self) -> str:
        """Where its daemon listens, as `find_runtime` takes it back; empty for a command line, which keeps nothing."""

    async def create(
        self, ref: ContainerRef, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment, stdio: Stdio
    ) -> None:
        """Lay the container down. A failure leaves nothing at the runtime."""

    async def start(self, ref: ContainerRef, *, netns: str | None = None) -> int:
        """Start PID 1 and return its host pid. A failure leaves nothing at the runtime.

        :param netns: path of the network namespace that was made for the container.
        """

    async def exec(self, ref: ContainerRef, process: bytes, *, deadline: float) -> int:
        """Run one more process from a compiled process.json; its exit code."""

    async def wait(self, pidfd: int) -> None:
        """Until PID 1 is dead. Its status is no fact of ours: the shim reports those."""

    async def kill(self, ref: ContainerRef, pidfd: int) -> None:
        """SIGKILL PID 1, which takes its pid namespace along."""

    async def remove(self, ref: ContainerRef) -> None:
        """Forget a dead container. Repeating it is no error."""

    async def state(self, ref: ContainerRef) -> ContainerState:
        """What the runtime knows."""

    async def list(self, directories: tuple[Path, ...]) -> tuple[ContainerState, ...]:
        """The containers of the attempts in `directories`."""

    def effective_spec(self, ref: ContainerRef) -> Mapping[str, Any]:
        """The spec this container really runs with, as the runtime has it."""

    def capabilities(self) -> ExecutorCapabilities:
        """What this adapter claims on this host."""

    def carries(self, bundle: Bundle) -> tuple[str, ...]:
        """Names of the bundle's fields that can't be honoured; `create` refuses a bundle that has any."""

    def cgroup(self, ref: ContainerRef) -> str | None:
        """The started container's own group below each hierarchy's root; None: the one that its bundle names."""

    async def loss(self, ref: ContainerRef) -> ForgeyardError | None:
        """Once PID 1 died unasked: whether its engine took it along, as far as that is known by now.

        Such a death says nothing of the job. Nor does None: what made PID 1 die is then not known here.

        :raises ForgeyardError: the engine does not say.
        """

    async def sweep(self, alive: Callable[[str], bool]) -> SweepReport:
        """Remove what this state directory's dead executors left at the runtime, past errors.

        :param alive: whether the sandbox of that id is; of what belongs to no sandbox, whether its executor is.
        :raises ForgeyardError: the daemon can't be asked: nothing can be said of what is left.
        """

    async def close(self) -> None:
        """Disconnect. Containers live on."""
