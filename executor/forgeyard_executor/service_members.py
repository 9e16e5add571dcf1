"""A job's services as containers: what the supervisor of services asks for, on members of the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Final

from forgeyard_executor.member import DEATH_GRACE, Member
from forgeyard_executor.steps import exec_failure
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.plan import ImageHealthcheck
from forgeyard_model.result import Evidence, ProcessExit
from forgeyard_model.services import ServiceSpec
from forgeyard_model.units import format_size
from forgeyard_process_shim.channel import ShimDied
from forgeyard_process_shim.protocol import BackgroundExited, NoExec, StepCommand
from forgeyard_services.contract import ProbeOutcome, ServiceEnd
from forgeyard_services.shim_probe import probe_in

if TYPE_CHECKING:
    from forgeyard_executor.networked import Networked

_MAIN: Final = 1


class ServiceContainer:
    """One service: its member, and its program in it. The supervisor's RunningService."""

    def __init__(self, spec: ServiceSpec, member: Member, network: Networked) -> None:
        self.spec = spec
        self.member = member
        self._network = network
        self._last_id = _MAIN
        self._ended: asyncio.Future[ServiceEnd] | None = None

    @property
    def address(self) -> str:
        """Where the job reaches it."""
        return self._network.address(self.spec)

    @property
    def identity(self) -> str:
        """Digest of its root."""
        return self.member.blueprint.rootfs.identity

    @property
    def exposed_ports(self) -> tuple[str, ...]:
        """As its image has them."""
        return self.member.blueprint.rootfs.exposed_ports

    @property
    def image_health(self) -> ImageHealthcheck | None:
        """Its image's own."""
        return self.member.blueprint.rootfs.healthcheck

    @property
    def ended(self) -> asyncio.Future[ServiceEnd]:
        """Done once its program has ended, or its container.

        :raises ExecutorError: before the launch.
        """
        if self._ended is None:
            raise ExecutorError(ExecutorErrorKind.INTERNAL, "service_order", "the service was not launched")
        return self._ended

    async def launch(self) -> None:
        """Its container, up to the open gate, and everything that its program may ask for by name.

        :raises ForgeyardError: the attempt must then be cleaned up.
        """
        await self._network.may_launch(self.spec)
        self._ended = asyncio.get_running_loop().create_future()
        self.member.channel.on_background_end = self._program_ended
        await self.member.launch()
        self.member.container.death.add_done_callback(self._container_died)
        await self._network.may_run()

    async def start_main(self) -> None:
        """Start its program. That it can't be executed shows in `ended`."""
        resolved = self.member.blueprint.planned.steps[0]
        command = StepCommand(_MAIN, resolved.argv, resolved.env, resolved.workdir, background=True)
        try:
            answer = await self.member.container.start_background(command)
        except ShimDied as error:
            self._lose(str(error))
            return
        if isinstance(answer, NoExec):
            self._end(None, exec_failure(resolved, answer.stage.name.lower(), answer.errno)[1])

    async def probe(self, argv: tuple[str, ...], seconds: float) -> ProbeOutcome:
        """A command beside it, as its user and with its environment."""
        resolved = self.member.blueprint.planned.steps[0]
        self._last_id += 1
        command = StepCommand(self._last_id, argv, resolved.env, resolved.workdir)
        return await probe_in(self.member.channel, command, seconds)

    async def connect(self, port: int, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a port of it."""
        return await self._network.connect(self.spec, port, seconds)

    async def output(self) -> AsyncGenerator[bytes, None]:
        """What it writes, from the first byte on."""
        async for chunk in self.member.spool.reader():
            yield chunk.data

    async def output_tail(self, size: int) -> bytes:
        """The last `size` bytes that it has written so far."""
        await self.member.spool.drain()
        tail = bytearray()
        async for chunk in self.member.spool.reader(follow=False):
            tail += chunk.data
            del tail[:-size]
        return bytes(tail)

    async def kill(self) -> None:
        """End everything in the container.

        :raises ForgeyardError: something survived.
        """
        await self.member.stop_watching()
        await self.member.kill()
        self._end(None, "it was ended with its attempt")

    def evidence(self) -> Evidence:
        """What the kernel counted for it; nothing, when its container never came to be."""
        return self.member.evidence() if self.member.launched else Evidence()

    # ---- its end

    def _program_ended(self, report: BackgroundExited) -> None:
        if report.id == _MAIN:
            self._end(ProcessExit.from_wait_status(report.status), "")

    def _container_died(self, death: asyncio.Future[None]) -> None:
        if not death.cancelled():
            # How its program ended may still be in the pipe.
            asyncio.get_running_loop().call_later(DEATH_GRACE, self._lose, "its container was ended from outside")

    def _lose(self, error: str) -> None:
        self._end(None, error, lost=True)

    def _end(self, exited: ProcessExit | None, error: str, *, lost: bool = False) -> None:
        if self.ended.done():
            return
        evidence = self.evidence()
        if evidence.disk.full and evidence.disk.limit is not None:
            error = f"it wrote more than its {format_size(evidence.disk.limit)}"
        killed = bool(evidence.memory.oom_kills) and (exited is None or not exited.ok)
        # Only these two limits end a container, see `verdict`; a full disk of a limit that is held ends nobody.
        limited = killed or (evidence.disk.full and evidence.disk.watched)
        self.ended.set_result(ServiceEnd(exited, killed, error, lost and not limited))


class ServiceLauncher:
    """The supervisor's Launcher: launches members that are made already."""

    def __init__(self, containers: Iterable[ServiceContainer]) -> None:
        self.containers = {container.spec.name: container for container in containers}

    async def launch(self, spec: ServiceSpec) -> ServiceContainer:
        """The container of `spec`."""
        container = self.containers[spec.name]
        await container.launch()
        return container
