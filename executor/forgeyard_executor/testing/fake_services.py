"""Pretended services. What starts, watches and judges them is what does it for real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial

from forgeyard_executor.testing.fake_output import FakeOutput
from forgeyard_executor.testing.fake_run import FakeRun, FakeService
from forgeyard_model.plan import ImageHealthcheck
from forgeyard_model.result import Evidence, ProcessExit
from forgeyard_model.services import LogProbe, ServiceSpec
from forgeyard_services.contract import ProbeOutcome, RunningService, ServiceEnd

_OK = ProcessExit(0, code=0)
_KILLED = ProcessExit.from_wait_status(9)


class _Writer:
    """As much of a stream's writer as a probe needs: the standard library can't fake one."""

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    async def drain(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing is open."""

    async def wait_closed(self) -> None:
        """Nothing to wait for."""


class RunningFakeService:
    """Keeps the contract of `RunningService`, by the timetable of its `FakeService`."""

    address = "192.0.2.2"
    identity = "sha256:" + "0" * 64
    exposed_ports: tuple[str, ...] = ()
    image_health: ImageHealthcheck | None = None

    def __init__(self, spec: ServiceSpec, script: FakeService, output: FakeOutput) -> None:
        self.ended: asyncio.Future[ServiceEnd] = asyncio.get_running_loop().create_future()
        self._spec, self._script, self._output = spec, script, output
        self._began = 0.0

    async def start_main(self) -> None:
        """Its time begins."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        if self._script.ends_after is not None:
            end = partial(self.end, self._script.exit_code, lost=self._script.lost)
            loop.call_later(self._script.ends_after, end)

    async def probe(self, argv: tuple[str, ...], seconds: float) -> ProbeOutcome:
        """Succeeds once it is ready."""
        if self._ready:
            return ProbeOutcome(_OK, b"ready\n")
        return ProbeOutcome(ProcessExit.from_wait_status(1 << 8), b"not ready\n")

    async def connect(self, port: int, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Accepts once it is ready, and answers any question with 200."""
        if not self._ready:
            raise ConnectionRefusedError(111, "Connection refused")
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        reader.feed_eof()
        return reader, _Writer()  # type: ignore[return-value]  # see there

    async def output(self) -> AsyncGenerator[bytes, None]:
        """What it writes."""
        async for chunk in self._output.reader():
            yield chunk.data

    async def output_tail(self, size: int) -> bytes:
        """The end of it."""
        return self._output.data[-size:]

    async def kill(self) -> None:
        """End it. Repeating it is no error."""
        self._end(ServiceEnd(_KILLED))
        self._output.close()

    def evidence(self) -> Evidence:
        """Nothing was counted."""
        return Evidence()

    @property
    def _ready(self) -> bool:
        after = self._script.ready_after
        return after is not None and not self.ended.done() and asyncio.get_running_loop().time() >= self._began + after

    def end(self, exit_code: int, *, lost: bool) -> None:
        """Its program ends, or its container is ended from outside."""
        if lost:
            self._end(ServiceEnd(None, error="its container was ended from outside", lost=True))
        else:
            self._end(ServiceEnd(ProcessExit.from_wait_status(exit_code << 8)))

    def _end(self, end: ServiceEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)


@dataclass(frozen=True, slots=True)
class FakeMember:
    """What a container of an attempt has: its output."""

    spool: FakeOutput


@dataclass(frozen=True, slots=True)
class FakeServiceContainer:
    """A service of an attempt."""

    spec: ServiceSpec
    member: FakeMember


class FakeLauncher:
    """Makes the containers of one attempt's services, which have written what they write already.

    :ivar running: those that were made, by name.
    """

    def __init__(self, specs: tuple[ServiceSpec, ...], run: FakeRun) -> None:
        self.running: dict[str, RunningFakeService] = {}
        self._run = run
        self._outputs: Mapping[str, FakeOutput] = {spec.name: FakeOutput() for spec in specs}
        self.containers = tuple(FakeServiceContainer(spec, FakeMember(self._outputs[spec.name])) for spec in specs)
        for spec in specs:
            self._outputs[spec.name].write("stdout", _written(spec, run.service(spec.name)))

    async def launch(self, spec: ServiceSpec) -> RunningService:
        """One for `spec`."""
        service = RunningFakeService(spec, self._run.service(spec.name), self._outputs[spec.name])
        self.running[spec.name] = service
        return service


def _written(spec: ServiceSpec, script: FakeService) -> bytes:
    if script.output is not None:
        return script.output
    probe = None if spec.health is None else spec.health.probe
    return probe.text.encode() + b"\n" if isinstance(probe, LogProbe) and not probe.regex else b""
