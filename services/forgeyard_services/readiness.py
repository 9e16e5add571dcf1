"""How a service shows that it is ready, and the wait for it.

In order: what the job declares; its image's HEALTHCHECK; the TCP ports that its image exposes, ready when any accepts;
none: started is enough, labelled unproven (CONTRACT.md, Services).
"""

from __future__ import annotations

import asyncio
import shlex
from contextlib import aclosing
from typing import Final

from forgeyard_model.services import ExecProbe, HealthCheck, HttpProbe, LogProbe, ServiceSpec, TcpProbe
from forgeyard_services.contract import RunningService
from forgeyard_services.line_matcher import SearchError, line_matcher
from forgeyard_services.log_lines import LineSplitter
from forgeyard_services.probes import Prober, Reading, exec_prober, http_prober, port_prober, ports_prober

QUICK_START: Final = 0.02
QUICK_MOST: Final = 1.0
"""Seconds between probes at first and later, while failures do not count yet. Never more than the interval."""
_PORT_CHECK: Final = HealthCheck(None, interval=0.25, timeout=5.0)
MOST_PORTS: Final = 16
"""Of those an image exposes, how many are tried."""


class Readiness:
    """Of one service whose container is there.

    :ivar words: what it has to show.
    :ivar proven: False when started is all that is asked.
    :ivar last: what the last probe said.
    """

    def __init__(self, spec: ServiceSpec, service: RunningService) -> None:
        self._service = service
        self.last: Reading | None = None
        self.proven = True
        self._prober: Prober | None = None
        self._log: LogProbe | None = None
        self._counted = True
        self._check = _declared(spec, service)
        self.words = self._choose()

    def _choose(self) -> str:
        service, probe = self._service, self._check and self._check.probe
        match probe:
            case ExecProbe(argv):
                self._prober = exec_prober(service, argv)
                return f"health: {shlex.join(argv)}"
            case TcpProbe(port):
                self._prober = port_prober(service, port)
                return f"health: port {port} accepts connections"
            case HttpProbe():
                self._prober = http_prober(service, probe)
                return f"health: GET :{probe.port}{probe.path}"
            case LogProbe():
                self._log = probe
                return f"health: a line of its output {'matches' if probe.regex else 'holds'} {probe.text!r}"
        if self._check is None and (ports := tcp_ports(service.exposed_ports)):
            self._check, self._counted = _PORT_CHECK, False
            self._prober = ports_prober(service, ports)
            return f"one of its ports accepts connections: {', '.join(map(str, ports))}"
        self.proven = False
        return "started, unproven: no health check, no exposed port"

    async def wait(self) -> str:
        """Wait until it is ready: an empty text. Or until it can't get ready any more: why.

        Takes as long as it takes; cancelled, it leaves no probe running. Its end ends the wait at once.
        """
        ended = self._service.ended
        look = asyncio.ensure_future(self._look())
        try:
            await asyncio.wait((look, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not look.done():
                look.cancel()
                await asyncio.wait((look,))
        if ended.done():
            if not look.cancelled():
                look.exception()  # its end explains that the probe failed, too
            return f"it ended before it was ready: {ended.result()}"
        return look.result()

    async def _look(self) -> str:
        if self._log is not None:
            return await self._find_line(self._log)
        if self._prober is not None and self._check is not None:
            return await self._probe(self._prober, self._check)
        return ""

    async def _probe(self, prober: Prober, check: HealthCheck) -> str:
        """As docker counts: failures in a row, those of the start period left out.

        docker waits one interval before its first probe. We probe at once and quickly until then, and count no
        failure before: a service is found ready sooner, and broken no sooner.
        """
        loop = asyncio.get_running_loop()
        began, failures, quick = loop.time(), 0, QUICK_START
        while True:
            started = loop.time()
            self.last = reading = await prober(check.timeout)
            if reading.ok:
                return ""
            now = loop.time()
            if started - began < check.start_period or now - began < check.interval:
                # A slow probe is not made to run without a pause.
                await asyncio.sleep(min(check.interval, max(quick, now - started)))
                quick = min(quick * 2, QUICK_MOST)
                continue
            failures += 1
            if self._counted and failures >= check.retries:
                return f"its health check failed {failures} times in a row"
            await asyncio.sleep(check.interval)

    async def _find_line(self, log: LogProbe) -> str:
        matcher, splitter = line_matcher(log), LineSplitter()
        try:
            async with aclosing(self._service.output()) as output:
                async for data in output:
                    for line in splitter.feed(data):
                        self.last = Reading(await matcher.matches(line), f"last line: {line[:200]}")
                        if self.last.ok:
                            return ""
        except SearchError as error:
            return str(error)
        finally:
            await matcher.close()
        await asyncio.shield(self._service.ended)  # no more output can come
        return "its output ended without the line"


def _declared(spec: ServiceSpec, service: RunningService) -> HealthCheck | None:
    if spec.health is not None:
        return spec.health
    image = service.image_health
    if image is None:
        return None
    return HealthCheck(ExecProbe(image.test), image.interval, image.timeout, image.retries, image.start_period)


def tcp_ports(exposed: tuple[str, ...]) -> tuple[int, ...]:
    """Ports in ``5432/tcp``, ``5432`` and ``7000-7005/tcp``: the first MOST_PORTS of them. UDP can't be probed."""
    found: dict[int, None] = {}
    for text in exposed:
        numbers, _, protocol = text.partition("/")
        first, _, last = numbers.partition("-")
        if protocol.lower() not in ("", "tcp") or not first.isdecimal() or not (last or first).isdecimal():
            continue
        for port in range(int(first), min(int(last or first), 65535) + 1):
            if len(found) == MOST_PORTS:
                return tuple(found)
            if port > 0:
                found[port] = None
    return tuple(found)
