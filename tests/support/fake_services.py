"""Services that keep to a timetable, for tests of what waits for them. Times are seconds after their start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from forgeyard_model.plan import ImageHealthcheck
from forgeyard_model.result import Evidence, MemoryEvidence, ProcessExit
from forgeyard_model.services import ServiceSpec
from forgeyard_services.contract import ProbeOutcome, RunningService, ServiceEnd

OK = ProcessExit(0, code=0)
FOREVER = 1e9


def exits(code: int) -> ServiceEnd:
    """An end by exit."""
    return ServiceEnd(ProcessExit.from_wait_status(code << 8))


@dataclass
class Script:
    """What a fake service does.

    ends: when its program ends by itself, and how. opens: when each port accepts. healthy_at: when a probe first
    exits 0. probe_takes: seconds of each probe. says: output by time. answer: what it says to HTTP.
    """

    ends: tuple[float, ServiceEnd] | None = None
    opens: dict[int, float] = field(default_factory=dict)
    healthy_at: float = FOREVER
    probe_takes: float = 0.01
    probe_output: bytes = b"not yet\n"
    says: list[tuple[float, bytes]] = field(default_factory=list)
    answer: Callable[[float], bytes] = lambda _: b"HTTP/1.1 200 OK\r\n\r\n"
    exposed: tuple[str, ...] = ()
    image_health: ImageHealthcheck | None = None
    launch_takes: float = 0.0
    launch_error: Exception | None = None


class FakeWriter:
    """As much of a stream's writer as a probe needs."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.sent += data

    async def drain(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    async def wait_closed(self) -> None:
        """Nothing to wait for."""


class FakeService:
    """Follows its script on the loop's clock."""

    address = "10.213.0.3"
    identity = "sha256:fake"

    def __init__(self, spec: ServiceSpec, script: Script, journal: list[tuple[float, str]]) -> None:
        self.spec, self.script, self.journal = spec, script, journal
        self.exposed_ports = script.exposed
        self.image_health = script.image_health
        self.ended: asyncio.Future[ServiceEnd] = asyncio.get_running_loop().create_future()
        self.probes: list[tuple[float, float]] = []
        self.probing = 0
        self.writers: list[FakeWriter] = []
        self.began = 0.0

    def note(self, what: str) -> None:
        """Write into the journal that all fakes share."""
        self.journal.append((asyncio.get_running_loop().time() - 1000.0, f"{what} {self.spec.name}"))

    def age(self) -> float:
        """Seconds since its start."""
        return asyncio.get_running_loop().time() - self.began

    def end(self, end: ServiceEnd) -> None:
        """Its program ends."""
        if not self.ended.done():
            self.ended.set_result(end)

    async def start_main(self) -> None:
        """Start the timetable."""
        self.note("start")
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        if self.script.ends is not None:
            when, how = self.script.ends
            loop.call_later(when, self.end, how) if when else self.end(how)

    async def probe(self, argv: tuple[str, ...], seconds: float) -> ProbeOutcome:
        """A probe that takes its time, and is killed when that is up."""
        begun = self.age()
        self.probing += 1
        assert self.probing == 1, "two probes at a time"
        try:
            await asyncio.sleep(min(seconds, self.script.probe_takes))
        finally:
            self.probing -= 1
            self.probes.append((begun, self.age()))
        if self.script.probe_takes > seconds:
            return ProbeOutcome(ProcessExit(9, signal=9), b"", timed_out=True)
        if begun >= self.script.healthy_at:
            return ProbeOutcome(OK, b"ready\n")
        return ProbeOutcome(ProcessExit(0x200, code=2), self.script.probe_output)

    async def connect(self, port: int, seconds: float) -> tuple[asyncio.StreamReader, FakeWriter]:
        """Refused until the port opens."""
        self.probes.append((self.age(), self.age()))
        if self.age() < self.script.opens.get(port, FOREVER) or self.ended.done():
            raise ConnectionRefusedError(111, "Connection refused")
        reader = asyncio.StreamReader()
        reader.feed_data(self.script.answer(self.age()))
        reader.feed_eof()
        self.writers.append(FakeWriter())
        return reader, self.writers[-1]

    async def output(self) -> AsyncGenerator[bytes, None]:
        """What it says, when it says it."""
        for when, data in self.script.says:
            await asyncio.sleep(max(0.0, when - self.age()))
            yield data
        await asyncio.shield(self.ended)

    async def output_tail(self, size: int) -> bytes:
        """What it has said so far."""
        return b"".join(data for when, data in self.script.says if when <= self.age())[-size:]

    async def kill(self) -> None:
        """The end by us."""
        self.note("kill")
        self.end(ServiceEnd(ProcessExit(9, signal=9)))

    def evidence(self) -> Evidence:
        """A number to recognise."""
        return Evidence(MemoryEvidence(peak=42))


class FakeLauncher:
    """Launches by name what its scripts say."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.running: dict[str, FakeService] = {}
        self.journal: list[tuple[float, str]] = []

    async def launch(self, spec: ServiceSpec) -> RunningService:
        """A fake for `spec`."""
        script = self.scripts.get(spec.name, Script())
        await asyncio.sleep(script.launch_takes)
        if script.launch_error is not None:
            raise script.launch_error
        service = self.running[spec.name] = FakeService(spec, script, self.journal)
        service.note("launch")
        return service  # type: ignore[return-value]  its writer is no StreamWriter, which the standard library can't fake

    def did(self, *what: str) -> list[str]:
        """Entries of the journal that begin with one of `what`, in order."""
        return [text for _, text in self.journal if text.split()[0] in what]
