"""A server's parts for tests: a table over pretended executors, and callers of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from forgeyard_api.client.calls import OPTIONS
from forgeyard_api.serve.admission import Admission, Capacity
from forgeyard_api.serve.attempt_types import AttemptView, Caller, Wanted
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.peers import Allowed, Peers
from forgeyard_api.serve.requests import request_from
from forgeyard_api.serve.rows import Rows
from forgeyard_api.serve.service import ExecutorService, handlers
from forgeyard_api.serve.store import AttemptStore
from forgeyard_executor import Job, Step
from forgeyard_executor.interface import JobExecutor
from forgeyard_model.limits import ResourceReservation

T = TypeVar("T")

ROOT = Caller(0, 0, 1, operator=True)
ALICE = Caller(1000, 1000, 1)
BOB = Caller(1001, 1001, 1)
JOB = Job(rootfs="host", steps=(Step("true"),))
SECONDS = 60.0


def within(body: Coroutine[Any, Any, T]) -> T:
    """Run `body`; nothing of it may take for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(SECONDS):
            return await body

    return asyncio.run(bounded())


def reserve(job: Job) -> ResourceReservation:
    """What the job's own limits say, and nothing where it has none."""
    return ResourceReservation(job.limits.cpus or 0.0, job.limits.memory or 0, job.limits.disk, job.limits.pids)


def capacity(**changes: Any) -> Capacity:
    """Room for a hundred."""
    return Capacity(**{"slots": 100, **changes})


@asynccontextmanager
async def table_over(
    state: Path, executor: JobExecutor, *, room: Capacity | None = None, runtime: str = "fake", **options: Any
) -> AsyncIterator[AttemptTable]:
    """A table whose attempts are in `state`."""
    store = await AttemptStore.open(state / "attempts.db")
    try:
        table = AttemptTable(
            Rows(store, reserve), {runtime: executor}, Admission(room or capacity()), reserve, **options
        )
        await table.open()
        try:
            yield table
        finally:
            await table.close()
    finally:
        await store.close()


async def prepare(table: AttemptTable, caller: Caller, wanted: Wanted) -> AttemptView:
    """Prepare, as the service does it."""
    return await table.prepare(caller, wanted, request_from(wanted).SerializeToString(deterministic=True))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing announces."""
    while not condition():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def socket_over(
    state: Path,
    executor: JobExecutor,
    *,
    allowed: Allowed = Allowed(frozenset({0}), frozenset({0})),  # noqa: B008  # it can't be changed
    checks: Checks | None = None,
    **options: Any,
) -> AsyncIterator[tuple[str, AttemptTable]]:
    """A whole server over `executor`: where it listens, and its table."""
    path = state / "run" / "executor.sock"
    async with table_over(state, executor, **options) as table, Peers.open(path, allowed) as peers:
        server = grpc.aio.server(options=OPTIONS)
        service = ExecutorService(table, checks or Checks(None), "1.2.3")
        server.add_generic_rpc_handlers((handlers("Executor", service, peers.caller_of),))
        server.add_insecure_port(peers.target)
        await server.start()
        try:
            yield f"unix:{path}", table
        finally:
            await server.stop(grace=None)
