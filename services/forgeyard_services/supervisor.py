"""Starts a job's services in order, waits until all are ready, watches them, and tells what became of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import ForgeyardError
from forgeyard_model.result import ServiceResult, ServiceState
from forgeyard_model.services import Condition, OnExit, ServiceSpec, completed_ones
from forgeyard_model.units import format_duration
from forgeyard_services.contract import Launcher
from forgeyard_services.graph import start_levels
from forgeyard_services.supervised import Supervised

log: Final = logging.getLogger("forgeyard.services")

_SHOWN_LOG: Final = 3


@dataclass(frozen=True, slots=True)
class ServiceFailure:
    """The service that ended a job, or kept it from starting. `message` names it and says all that is known.

    :param lost: its container was ended from outside: a failure of the infrastructure's.
    """

    name: str
    message: str
    timed_out: bool = False
    lost: bool = False


class ServiceSet:
    """The services of one attempt. `start`, then the steps while `failed` is watched, then `stop` and `results`.

    :ivar failed: the first failure that ends the job, before or after `start` returned. An error of ours that no
        service can be blamed for is its exception. To be looked at, never cancelled.
    """

    def __init__(self, services: Iterable[ServiceSpec], launcher: Launcher) -> None:
        """`services` have passed `checked_services`. Within a running event loop."""
        specs = tuple(services)
        self._launcher = launcher
        oneshot = completed_ones(specs)
        self._all = {spec.name: Supervised(spec, completes=spec.name in oneshot) for spec in specs}
        self._levels = start_levels(specs)
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting = set(self._all)
        loop = asyncio.get_running_loop()
        self._all_up: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[ServiceFailure] = loop.create_future()

    async def start(self, *, timeout: float) -> ServiceFailure | None:
        """Start all: containers at once, programs in the order of their dependencies. None once all are ready.

        :param timeout: seconds for all of it.
        :raises ForgeyardError: a container could not be made. Call `stop` after any end but None.
        """
        if not self._all:
            return None
        self._tasks = [asyncio.ensure_future(self._live(item)) for item in self._all.values()]
        await asyncio.wait((self.failed, self._all_up), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not self.failed.done() and not self._all_up.done():
            await self._time_out(timeout)
        if not self.failed.done():
            return None
        await self._end_tasks()
        return self.failed.result()

    async def _live(self, item: Supervised) -> None:
        """One service's whole life, until it ends or the set stops."""
        try:
            await item.launch(self._launcher)
            await asyncio.gather(*(self._until(name, what) for name, what in item.spec.depends_on.items()))
            message = await item.bring_up()
            if message:
                await self._fail(item, message)
                return
            self._waiting.discard(item.spec.name)
            if not self._waiting and not self._all_up.done():
                self._all_up.set_result(None)
            message = await item.watch()
            # Before the steps no service may go; `on_exit` is about the time after.
            if message and (item.spec.on_exit is OnExit.FAIL or not self._all_up.done()):
                await self._fail(item, message)
        except Exception as error:  # whatever it is, it ends the job: nobody awaits this task
            log.exception("supervision of service %s", item.spec.name)
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _until(self, name: str, condition: Condition) -> None:
        other = self._all[name]
        await (other.started if condition is Condition.STARTED else other.ready).wait()

    async def _fail(self, item: Supervised, message: str, *, timed_out: bool = False) -> None:
        # Read before the failure is told: what reacts to it removes the output.
        await item.read_log()
        if self.failed.done():
            return
        parts = [f"service {item.spec.name}: {message}"]
        if item.last_probe and not item.ready.is_set():
            parts.append(f"last probe: {item.last_probe}")
        if item.log_tail:
            parts.append("last output: " + " | ".join(item.log_tail[-_SHOWN_LOG:]))
        self.failed.set_result(ServiceFailure(item.spec.name, "; ".join(parts), timed_out, item.lost))

    async def _time_out(self, timeout: float) -> None:
        """Blame the first that runs and is not ready; those that wait for it are not at fault."""
        late = [self._all[name] for level in self._levels for name in level if name in self._waiting]
        item = next((item for item in late if item.started.is_set()), late[0])
        message = item.give_up(f"was not {item.goal} within {format_duration(timeout)}")
        await self._fail(item, message, timed_out=True)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Kill what runs, the last to start first. Idempotent; right at any time, also while `start` is under way.

        :raises ForgeyardError: the first that something survived; all have been tried.
        """
        await self._end_tasks()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # seen: not every caller looks
        errors: list[ForgeyardError] = []
        for level in reversed(self._levels):
            for ended in await asyncio.gather(*(self._all[name].stop() for name in level), return_exceptions=True):
                if isinstance(ended, ForgeyardError):
                    errors.append(ended)
                elif isinstance(ended, BaseException):
                    raise ended
        if errors:
            raise errors[0]

    async def results(self) -> tuple[ServiceResult, ...]:
        """What became of each, in the order declared. After `stop`, before their control groups are removed."""
        return tuple([await item.result() for item in self._all.values()])

    @property
    def notes(self) -> tuple[str, ...]:
        """Deaths that do not end the job, and services that could not show that they were ready."""
        said = []
        for name, item in self._all.items():
            if item.state is ServiceState.DIED and item.message:
                said.append(f"service {name}: {item.message}")
            elif item.state is ServiceState.UNPROVEN:
                said.append(f"service {name} was started, not proven ready: declare a health check")
        return tuple(said)
