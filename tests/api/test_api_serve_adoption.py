"""A server that comes after a dead one, over keepers that live in this process and pretend to run jobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from served import ALICE, JOB, ROOT, capacity, prepare, reserve, table_over, until, within

from forgeyard_api.client.calls import OPTIONS
from forgeyard_api.keeper.kept import KeptExecutor
from forgeyard_api.keeper.link import KeeperLink
from forgeyard_api.keeper.memory import MemoryRows
from forgeyard_api.keeper.place import About, Place
from forgeyard_api.keeper.process import KeeperProcess
from forgeyard_api.serve.admission import Admission
from forgeyard_api.serve.attempt_types import AttemptState, Wanted
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.service import ExecutorService, handlers
from forgeyard_api.serve.store import AttemptStore
from forgeyard_executor import Job, Outcome, Step, Timeouts
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_host.locks import lock_alone
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import CancellationReason

PATIENT = Job(rootfs="host", steps=(Step("true"),), timeouts=Timeouts(grace=3600.0))
"""A job that has an hour to end when it is asked to."""


@asynccontextmanager
async def keeper(run_dir: Path, fake: FakeRun) -> AsyncIterator[tuple[KeeperLink, AttemptTable]]:
    """A keeper whose jobs all go as `fake` says: a server's end of it, and what it has."""
    place = Place.new(run_dir, "/state")
    lock = lock_alone(place.directory / "lock")
    assert lock is not None
    table = AttemptTable(MemoryRows(), {"fake": FakeExecutor(lambda _: fake)}, Admission(capacity()), reserve)
    await table.open()
    server = grpc.aio.server(options=OPTIONS)
    service = ExecutorService(table, Checks(None), "1.2.3")
    server.add_generic_rpc_handlers((handlers("Executor", service, lambda _: ROOT),))
    server.add_insecure_port(place.target)
    await server.start()
    link = KeeperLink(KeeperProcess(place, About(1, "fake", "1.2.3", "")))
    try:
        yield link, table
    finally:
        await server.stop(grace=None)
        await table.close()
        os.close(lock)
        link.is_gone()
        await link.calls.close()


@asynccontextmanager
async def kept(run_dir: Path, fake: FakeRun) -> AsyncIterator[tuple[KeptExecutor, AttemptTable]]:
    """An executor over one such keeper."""
    async with keeper(run_dir, fake) as (link, table):
        executor = KeptExecutor("fake")
        await executor.add(link, current=True)
        yield executor, table


async def changed(directory: Path, **columns: Any) -> None:
    """Between two servers: what the dead one had written down at another moment."""
    store = await AttemptStore.open(directory / "attempts.db")
    await store.update(ALICE.uid, "a", **columns)
    await store.close()


def test_one_that_is_being_prepared(tmp_path: Path) -> None:
    """Goes on being prepared, whoever asked for it, and runs once."""

    async def body() -> None:
        async with kept(tmp_path, FakeRun(prepare_seconds=1.0, output=b"said")) as (executor, theirs):
            async with table_over(tmp_path, executor) as table:
                await prepare(table, ALICE, Wanted("a", JOB, runtime="fake", start=True))
                await until(lambda: [view.state for view in theirs.list(ROOT)] == [AttemptState.PREPARING])
            async with table_over(tmp_path, executor) as table:
                view = await table.wait(ALICE, "a")
                assert view.result is not None
                assert view.result.outcome is Outcome.SUCCEEDED
                assert [each.attempt_id for each in theirs.list(ROOT)] == ["1000/a"]
                assert b"".join([chunk.data async for chunk in table.output(ALICE, "a")]) == b"said"
                await table.cleanup(ALICE, "a")
                assert theirs.list(ROOT) == ()

    within(body())


def test_one_that_no_keeper_came_to_know(tmp_path: Path) -> None:
    """Is queued again: it had not been prepared, so nothing of it ran. One that had been is lost."""

    async def body() -> None:
        async with kept(tmp_path, FakeRun()) as (executor, theirs):
            async with table_over(tmp_path, executor, room=capacity(slots=1)) as table:
                await prepare(table, ALICE, Wanted("first", JOB))
                await table.wait(ALICE, "first", AttemptState.PREPARED)
                await prepare(table, ALICE, Wanted("a", JOB, start=True))
            await changed(tmp_path, state="preparing", handed=True)
            async with table_over(tmp_path, executor) as table:
                assert (await table.wait(ALICE, "a")).result is not None
                await theirs.cleanup(ROOT, "1000/first")
            async with table_over(tmp_path, executor) as table:
                error = (await table.wait(ALICE, "first")).error
                assert isinstance(error, ExecutorError)
                assert (error.kind, error.reason) == (ExecutorErrorKind.LOST, "server_lost")

    within(body())


@pytest.mark.parametrize("state", ["prepared", "running"])
def test_a_kill_that_was_asked_for(tmp_path: Path, state: str) -> None:
    """Is carried out after a restart, without the grace that it was to be without."""

    async def body() -> None:
        async with kept(tmp_path, FakeRun(holds=True, stubborn=True)) as (executor, _):
            async with table_over(tmp_path, executor) as table:
                await prepare(table, ALICE, Wanted("a", PATIENT, start=state == "running"))
                await table.wait(ALICE, "a", AttemptState(state))
            await changed(tmp_path, cancel_asked="user", cancel_kill=True)
            async with table_over(tmp_path, executor) as table:
                view = await table.wait(ALICE, "a")
                if state == "running":
                    assert view.result is not None
                    assert view.result.outcome is Outcome.CANCELLED
                else:
                    assert isinstance(view.error, ExecutorError)
                    assert view.error.kind is ExecutorErrorKind.CANCELLED

    within(body())


def test_a_finish_that_was_asked_for(tmp_path: Path) -> None:
    """Ends an attempt that waits for steps, though its server died over it."""
    stepless = Job(rootfs="host", steps=())

    async def body() -> None:
        async with kept(tmp_path, FakeRun()) as (executor, _):
            async with table_over(tmp_path, executor) as table:
                await prepare(table, ALICE, Wanted("a", stepless, start=True))
                await table.wait(ALICE, "a", AttemptState.RUNNING)
            await changed(tmp_path, finish_asked=True)
            async with table_over(tmp_path, executor) as table:
                assert (await table.wait(ALICE, "a")).result is not None

    within(body())


def test_attempts_of_a_keeper_that_dies(tmp_path: Path) -> None:
    """Are lost once its leftovers are gone, to whoever waits, cancels or reads; new ones wait for the next keeper."""

    async def body() -> None:
        executor = KeptExecutor("fake")
        async with table_over(tmp_path, executor) as table:
            async with keeper(tmp_path, FakeRun(holds=True, output=b"said")) as (link, _):
                await executor.add(link, current=True)
                await prepare(table, ALICE, Wanted("a", JOB, start=True))
                await table.wait(ALICE, "a", AttemptState.RUNNING)
            executor.drop(link, "it died")
            ending = asyncio.ensure_future(table.wait(ALICE, "a"))
            cancelling = asyncio.ensure_future(table.cancel(ALICE, "a", CancellationReason.USER))
            await prepare(table, ALICE, Wanted("b", JOB, start=True))
            assert table.find(ALICE, "a").state is AttemptState.RUNNING
            async with keeper(tmp_path, FakeRun()) as (successor, _):
                await executor.add(successor, current=True)
                assert (await table.wait(ALICE, "b")).result is not None
                assert not ending.done()
                link.was_lost("swept")
                error = (await ending).error
                await cancelling
                assert isinstance(error, ExecutorError)
                assert (error.kind, error.reason, error.details) == (ExecutorErrorKind.LOST, "keeper_lost", "swept")
                await table.cleanup(ALICE, "a")
                await table.cleanup(ALICE, "b")

    within(body())
