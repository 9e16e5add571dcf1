"""One service under supervision: its container, how far it came, and what is known of its end."""

from __future__ import annotations

import asyncio
from typing import Final

from forgeyard_model.result import Evidence, ServiceResult, ServiceState
from forgeyard_model.services import ServiceSpec
from forgeyard_services.contract import Launcher, RunningService, ServiceEnd
from forgeyard_services.log_lines import TAIL_BYTES, last_lines
from forgeyard_services.probes import Reading
from forgeyard_services.readiness import Readiness

_UP: Final = (ServiceState.READY, ServiceState.UNPROVEN)


class Supervised:
    """Steps of one service's life, called by the set in order.

    :ivar started, ready: what other services wait for. A service that has to complete is ready when it has.
    :ivar message: what went wrong, empty when nothing did.
    """

    def __init__(self, spec: ServiceSpec, *, completes: bool) -> None:
        self.spec = spec
        self.started = asyncio.Event()
        self.ready = asyncio.Event()
        self.state = ServiceState.NOT_STARTED
        self.message = ""
        self.log_tail: tuple[str, ...] = ()
        self._completes = completes
        self._service: RunningService | None = None
        self._readiness: Readiness | None = None
        self._words = "exit 0" if completes else ""
        self._ready_after: float | None = None
        self._end: ServiceEnd | None = None
        self._stopped = False

    @property
    def goal(self) -> str:
        """What it has to get to before the steps."""
        return "done" if self._completes else "ready"

    @property
    def last_probe(self) -> str:
        """What the last probe said."""
        return "" if self._last is None else self._last.said

    @property
    def _last(self) -> Reading | None:
        return None if self._readiness is None else self._readiness.last

    @property
    def lost(self) -> bool:
        """Whether its container was ended from outside."""
        service = self._service
        return service is not None and service.ended.done() and service.ended.result().lost

    async def launch(self, launcher: Launcher) -> None:
        """Make its container.

        :raises ForgeyardError: it could not be made.
        """
        self._service = await launcher.launch(self.spec)

    def _running(self) -> RunningService:
        if self._service is None:
            raise RuntimeError(f"service {self.spec.name} was not launched")
        return self._service

    async def bring_up(self) -> str:
        """Start its program and wait until it is ready, or done. Empty, or why it never will be."""
        service, loop = self._running(), asyncio.get_running_loop()
        began = loop.time()
        self.state = ServiceState.STOPPED  # until it turns out otherwise
        await service.start_main()
        self.started.set()
        message = await (self._completed(service) if self._completes else self._got_ready(service))
        if message:
            self.state, self.message = ServiceState.FAILED, message
        else:
            self._ready_after = loop.time() - began
            self.ready.set()
        return message

    async def _completed(self, service: RunningService) -> str:
        end = await asyncio.shield(service.ended)
        if end.exit is None or not end.exit.ok:
            return f"it had to exit 0: {end}"
        self.state = ServiceState.COMPLETED
        return ""

    async def _got_ready(self, service: RunningService) -> str:
        self._readiness = Readiness(self.spec, service)
        self._words = self._readiness.words
        message = await self._readiness.wait()
        if not message:
            self.state = ServiceState.READY if self._readiness.proven else ServiceState.UNPROVEN
        return message

    async def watch(self) -> str:
        """Wait for its end after it was ready, and tell it. Empty at once for one that has completed."""
        if self._completes:
            return ""
        self._note_death(await asyncio.shield(self._running().ended))
        return self.message

    def _note_death(self, end: ServiceEnd) -> None:
        self.state, self.message = ServiceState.DIED, f"it died after it was ready: {end}"

    def give_up(self, message: str) -> str:
        """The time for its start is over."""
        if self.started.is_set():
            self.state = ServiceState.FAILED
        self.message = message
        return message

    async def read_log(self) -> None:
        """Keep the end of its output."""
        if self._service is None:
            return
        data = await self._service.output_tail(TAIL_BYTES)
        if len(data) == TAIL_BYTES:
            data = data.partition(b"\n")[2] or data  # what is cut through is no line
        self.log_tail = last_lines(data)

    async def stop(self) -> None:
        """Kill it, if it was launched. Its own end, where that came first, stays its end.

        :raises ForgeyardError: something survived.
        """
        service = self._service
        if service is None:
            return
        if not self._stopped and service.ended.done():
            self._end = service.ended.result()
            if self.state in _UP:
                self._note_death(self._end)
        self._stopped = True
        await service.kill()

    async def result(self) -> ServiceResult:
        """All that is known of it, after `stop`."""
        service = self._service
        last = self._last
        if not self.log_tail:
            await self.read_log()
        end = self._end
        return ServiceResult(
            name=self.spec.name,
            state=self.state,
            image=self.spec.image,
            identity="" if service is None else service.identity,
            readiness=self._words,
            ports_open=() if last is None else last.ports_open,
            ports_shut=() if last is None else last.ports_shut,
            ready_after=self._ready_after,
            exit=None if end is None else end.exit,
            oom=end is not None and end.oom,
            log_tail=self.log_tail,
            last_probe=self.last_probe,
            message=self.message,
            address="" if service is None else service.address,
            evidence=Evidence() if service is None else service.evidence(),
        )
