"""The keeper itself: an executor, and the API on a socket that only its server can reach."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import grpc

from forgeyard_api.client.calls import OPTIONS
from forgeyard_api.keeper.memory import MemoryRows
from forgeyard_api.keeper.place import About, Place, config_digest
from forgeyard_api.observe.audit_writer import auditing
from forgeyard_api.serve.admission import Admission, Capacity
from forgeyard_api.serve.attempt_types import Caller
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.service import ExecutorService, handlers
from forgeyard_executor import Executor
from forgeyard_executor.config_load import load_config
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.result import CancellationReason

log: Final = logging.getLogger("forgeyard.keeper")

FORGETFUL: Final = 30 * 86400.0
"""Seconds. The server forgets attempts sooner, and says so."""
_TICK: Final = 1.0

_ANYBODY: Final = Caller(uid=0, gid=0, pid=0, operator=True)
"""Only the server can reach the socket: its directory is root's alone."""
_NOTHING: Final = ResourceReservation(0.0, 0)


@dataclass(frozen=True, slots=True)
class Task:
    """What a keeper is started for.

    :param linger: seconds without a server after which it ends, when it has no attempt.
    :param result_ttl: the same when all it has are ended attempts, whose results and output somebody may want.
    """

    runtime: str
    state_dir: str
    place: Place
    config_file: Path | None
    linger: float
    result_ttl: float

    def config(self) -> ExecutorConfig:
        """What it goes by.

        :raises ForgeyardError: for what can't be read.
        """
        return load_config(system=self.config_file, flags={"state_dir": self.state_dir}).config


async def recover(task: Task) -> None:
    """Destroy what dead keepers left, which is what opening an executor does.

    :raises ForgeyardError: it can't be opened.
    """
    async with Executor.open(task.state_dir, runtime=task.runtime, config=task.config()) as executor:
        for error in executor.recovered.errors:
            log.error("%s", error)


async def keep(task: Task) -> None:
    """Keep until nobody needs it any more, or until SIGTERM, which ends what it keeps.

    :raises ForgeyardError: the executor can't be opened.
    """
    stop = asyncio.Event()
    _listen_to_signals(stop)
    config = task.config()
    async with AsyncExitStack() as stack:
        stack.enter_context(auditing(config.serve.audit, gate_only=True))
        opened = Executor.open(task.state_dir, runtime=task.runtime, config=config, keep_failed=True)
        executor = await stack.enter_async_context(opened)
        admission = Admission(Capacity(slots=1_000_000, queue=1_000_000))
        rows, executors = MemoryRows(), {task.runtime: executor}
        table = AttemptTable(rows, executors, admission, lambda _: _NOTHING, result_ttl=FORGETFUL)
        await table.open()
        stack.push_async_callback(table.close)
        idle = await stack.enter_async_context(_served(table, task.place))
        own, left = version("forgeyard-executor"), executor.recovered.errors
        task.place.announce(About(os.getpid(), task.runtime, own, config_digest(config), left))
        await _until_unneeded(table, stop, task, idle, executor)
        if stop.is_set():
            await table.stop_all(CancellationReason.SHUTDOWN, kill=True)
            await table.until_idle()
    task.place.remove()  # one that did not come to this has died, and the log in it says of what


def _listen_to_signals(stop: asyncio.Event) -> None:
    """Handlers, not SIG_IGN, which every process we start would inherit."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, log.info, "signal %d is the server's business", number)


class _Idle:
    """Since when nobody has called."""

    def __init__(self) -> None:
        self.since = asyncio.get_running_loop().time()

    def over(self) -> None:
        """Somebody does."""
        self.since = asyncio.get_running_loop().time()

    @property
    def seconds(self) -> float:
        """How long."""
        return asyncio.get_running_loop().time() - self.since


@asynccontextmanager
async def _served(table: AttemptTable, place: Place) -> AsyncIterator[_Idle]:
    server = grpc.aio.server(options=OPTIONS)
    service = ExecutorService(table, Checks(roots=None), version("forgeyard-executor"))
    idle = _Idle()

    def caller_of(_: Any) -> Caller:
        idle.over()
        return _ANYBODY

    server.add_generic_rpc_handlers((handlers("Executor", service, caller_of),))
    server.add_insecure_port(place.target)
    await server.start()
    try:
        yield idle
    finally:
        await server.stop(grace=1.0)


async def _until_unneeded(
    table: AttemptTable, stop: asyncio.Event, task: Task, idle: _Idle, executor: Executor
) -> None:
    """A server that is there listens to events; one that is not may come back for what it left."""
    while not stop.is_set():
        task.place.bound_log()
        if (pool := executor.network_pool()) is not None:
            task.place.tell_pool(asdict(pool))
        empty = not table.list(_ANYBODY)
        if empty and table.draining:
            return
        if table.busy or table.events_hub.listened:
            idle.over()
        elif idle.seconds >= (task.linger if empty else max(task.linger, task.result_ttl)):
            return
        try:
            async with asyncio.timeout(min(_TICK, task.linger)):
                await stop.wait()
        except TimeoutError:
            continue
