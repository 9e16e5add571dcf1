"""The keeper itself: an executor, and the API on a socket that only its server can reach."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import grpc

from forgeyard_api.client.calls import OPTIONS
from forgeyard_api.keeper.memory import MemoryRows
from forgeyard_api.serve.admission import Admission, Capacity
from forgeyard_api.serve.attempt_types import Caller
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.service import ExecutorService, handlers
from forgeyard_executor import Executor
from forgeyard_host.processes import start_time
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.result import CancellationReason

log: Final = logging.getLogger("forgeyard.keeper")

SOCKET: Final = "keeper.sock"
ABOUT: Final = "keeper.json"
RESULT_TTL: Final = 7 * 86400.0
"""Seconds. The server that asked for an attempt forgets it sooner; this is for one that never came back."""

_ANYBODY: Final = Caller(uid=0, gid=0, pid=0, operator=True)
"""Only the server can reach the socket: its directory is root's alone."""


async def keep(runtime: str, state_dir: str, directory: Path, linger: float) -> None:
    """Keep until there is neither an attempt nor a server for `linger` seconds, or until SIGTERM.

    :param directory: gets the socket and keeper.json, and is removed at the end.
    :raises ForgeyardError: the executor can't be opened.
    """
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(Executor.open(state_dir, runtime=runtime))
        admission = Admission(Capacity(slots=1_000_000, queue=1_000_000))
        table = AttemptTable(MemoryRows(), {runtime: executor}, admission, lambda _: _NOTHING, result_ttl=RESULT_TTL)
        await table.open()
        stack.push_async_callback(table.close)
        await stack.enter_async_context(_served(table, directory))
        stack.callback(_withdraw, directory)
        _announce(directory, runtime)
        await _until_unneeded(table, stop, linger)
        if stop.is_set():
            await table.stop_all(CancellationReason.SHUTDOWN, kill=True)
            await table.until_idle()


_NOTHING: Final = ResourceReservation(0.0, 0)


@asynccontextmanager
async def _served(table: AttemptTable, directory: Path) -> AsyncIterator[None]:
    server = grpc.aio.server(options=OPTIONS)
    service = ExecutorService(table, Checks(roots=None), version("forgeyard-executor"))

    def caller_of(_: Any) -> Caller:
        return _ANYBODY

    server.add_generic_rpc_handlers((handlers("Executor", service, caller_of),))
    server.add_insecure_port(f"unix:{directory / SOCKET}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=1.0)


def _announce(directory: Path, runtime: str) -> None:
    """Say who keeps here; whoever finds the file finds the socket served."""
    about = {
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "runtime": runtime,
        "version": version("forgeyard-executor"),
    }
    new = directory / f"{ABOUT}.new"
    new.write_text(json.dumps(about))
    new.rename(directory / ABOUT)


def _withdraw(directory: Path) -> None:
    for name in (ABOUT, SOCKET):
        (directory / name).unlink(missing_ok=True)


async def _until_unneeded(table: AttemptTable, stop: asyncio.Event, linger: float) -> None:
    """A server that is there listens to events; one that is not may come back for what it left."""
    idle_since: float | None = None
    loop = asyncio.get_running_loop()
    while True:
        idle = not table.events_hub.listened and not table.busy
        if not idle:
            idle_since = None
        elif idle_since is None:
            idle_since = loop.time()
        elif loop.time() - idle_since >= linger:
            return
        try:
            async with asyncio.timeout(min(1.0, linger)):
                await stop.wait()
                return
        except TimeoutError:
            continue
