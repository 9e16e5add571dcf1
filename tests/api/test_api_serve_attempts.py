"""The table of attempts: each is taken in once, ends once, and is found again after a restart."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from served import ALICE, BOB, JOB, ROOT, capacity, prepare, table_over, until, within

from forgeyard_api.serve.attempt_types import AttemptState, Caller, EventKind, OnClientDeath, Wanted
from forgeyard_executor import Job, Limits, Outcome, Step
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    FailureClass,
    InvalidRequest,
    SandboxError,
    SandboxErrorKind,
)
from forgeyard_model.result import CancellationReason

HOLDS = FakeRun(output=b"one\ntwo\n", holds=True)


def named(name: str, **changes: object) -> Wanted:
    """An attempt that starts by itself."""
    return replace(Wanted(name, JOB, start=True), **changes)  # type: ignore[arg-type]  # fields by name


def test_an_attempt_runs_to_its_end(tmp_path: Path) -> None:
    """Prepared, started when asked, ended with the result under the caller's own name."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: FakeRun(exit_code=3))
        async with table_over(tmp_path, executor) as table:
            await prepare(table, ALICE, named("a", start=False))
            view = await table.wait(ALICE, "a", AttemptState.PREPARED)
            assert (view.state, view.result) == (AttemptState.PREPARED, None)
            assert view.sandbox_id
            await table.start(ALICE, "a")
            view = await table.wait(ALICE, "a")
            assert view.result is not None
            assert (view.result.outcome, view.result.exit_code, view.result.attempt_id) == (Outcome.FAILED, 3, "a")
            assert table.counts == (0, 0)

    within(body())


def test_a_repeated_prepare_runs_nothing_twice(tmp_path: Path) -> None:
    """The same name and request is the same attempt, also at once; another request under the name is refused."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: HOLDS)
        async with table_over(tmp_path, executor) as table:
            views = await asyncio.gather(*(prepare(table, ALICE, named("a")) for _ in range(20)))
            assert {view.created_at for view in views} == {views[0].created_at}
            for _ in range(3):
                await table.start(ALICE, "a")
            await table.wait(ALICE, "a", AttemptState.RUNNING)
            assert len(executor.prepared) == len(executor.attempts) == 1
            with pytest.raises(InvalidRequest, match="attempt_id 'a': names another request"):
                await prepare(table, ALICE, named("a", tenant="other"))
            await table.cancel(ALICE, "a")
            await table.wait(ALICE, "a")

    within(body())


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b"])
def test_names_are_checked(tmp_path: Path, name: str) -> None:
    """What is no name is refused by its field, and leaves nothing."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor()) as table:
            with pytest.raises(InvalidRequest, match="attempt_id"):
                await prepare(table, ALICE, named(name))
            assert table.list(ROOT) == ()

    within(body())


@pytest.mark.parametrize("name", ["../x", "a/b:c d", "-x", "日本", "x\n", "x" * 255])
def test_odd_names_are_data(tmp_path: Path, name: str) -> None:
    """Whatever a caller calls its attempt, that is what it is called (field case C71)."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor()) as table:
            await prepare(table, ALICE, named(name))
            view = await table.wait(ALICE, name)
            assert view.result is not None
            assert view.result.attempt_id == name
        assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"attempts.db"}

    within(body())


def test_a_caller_sees_only_its_own(tmp_path: Path) -> None:
    """The same name of two callers is two attempts; an operator sees both and may stop them."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor(lambda _: HOLDS)) as table:
            for caller in (ALICE, BOB):
                await prepare(table, caller, named("same"))
                await table.wait(caller, "same", AttemptState.RUNNING)
            await prepare(table, ALICE, named("only-alice"))
            assert [view.owner_uid for view in table.list(BOB)] == [BOB.uid]
            assert len(table.list(ROOT)) == 3
            for act in (table.wait(BOB, "only-alice"), table.cancel(BOB, "only-alice"), table.start(BOB, "only-alice")):
                with pytest.raises(ExecutorError, match="no attempt"):
                    await act
            with pytest.raises(ExecutorError, match="no attempt"):
                async for _ in table.output(BOB, "only-alice"):
                    pass
            await table.cancel(ROOT, table.find(BOB, "same").sandbox_id)
            assert (await table.wait(BOB, "same")).result is not None
            assert table.find(ALICE, "same").state is AttemptState.RUNNING
            await table.stop_all(CancellationReason.USER)

    within(body())


def test_names_may_be_cut_short(tmp_path: Path) -> None:
    """By a prefix of the name or of the sandbox's id that fits one alone."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor()) as table:
            for name in ("build-1", "build-2"):
                await prepare(table, ALICE, named(name))
                await table.wait(ALICE, name)
            assert table.find(ALICE, "build-2").attempt_id == "build-2"
            full = table.find(ALICE, "build-1")
            assert table.find(ALICE, full.sandbox_id).attempt_id == "build-1"
            for unclear in ("build", "", "nothing"):
                with pytest.raises(ExecutorError) as caught:
                    table.find(ALICE, unclear)
                assert caught.value.reason == "no_such_attempt"

    within(body())


def test_refusals_and_losses_end_an_attempt(tmp_path: Path) -> None:
    """With the executor's own error, whatever it was at; its room is free again."""
    refused = ExecutorError.prepare(SandboxError(SandboxErrorKind.UNSUPPORTED_ISOLATION, "no_x", "no x here"))
    lost = ExecutorError(ExecutorErrorKind.LOST, "keeper_lost", "gone")
    runs = {"r": FakeRun(refused=refused), "b": FakeRun(broken=refused), "l": FakeRun(lost=lost)}

    async def body() -> None:
        executor = FakeExecutor(lambda job: runs[job.name])
        async with table_over(tmp_path, executor, room=capacity(slots=1)) as table:
            for name in runs:
                await prepare(table, ALICE, named(name, job=replace(JOB, name=name)))
            for name, error in (("r", refused), ("b", refused), ("l", lost)):
                view = await table.wait(ALICE, name)
                assert view.result is None
                assert str(view.error) == str(error)
            assert table.counts == (0, 0)

    within(body())


def test_the_queue_and_its_end(tmp_path: Path) -> None:
    """One runs, two wait in order, a fourth is turned away; what ends makes room."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: HOLDS)
        async with table_over(tmp_path, executor, room=capacity(slots=1, queue=2)) as table:
            for name in "abc":
                await prepare(table, ALICE, named(name))
                if name == "a":
                    await table.wait(ALICE, "a", AttemptState.RUNNING)
            assert [view.queue_position for view in table.list(ALICE)] == [0, 1, 2]
            with pytest.raises(ExecutorError) as caught:
                await prepare(table, ALICE, named("d"))
            assert caught.value.reason == "queue_full"
            assert len(table.list(ROOT)) == 3
            await table.cancel(ALICE, "b")
            error = (await table.wait(ALICE, "b")).error
            assert error is not None
            assert error.failure_class is FailureClass.CANCELLED
            executor.attempts[0].release()
            await table.wait(ALICE, "c", AttemptState.RUNNING)
            executor.attempts[1].release()
            assert [run.prepared.context.attempt_id for run in executor.attempts] == ["1000/a", "1000/c"]

    within(body())


def test_what_can_never_run_is_refused_at_once(tmp_path: Path) -> None:
    """More than there is, by its field; a runtime that is not configured."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor(), room=capacity(memory=1 << 30)) as table:
            big = Job(rootfs="host", steps=(Step("true"),), limits=Limits(memory="2GiB"))
            with pytest.raises(InvalidRequest, match=r"resources\.memory '2 GiB'"):
                await prepare(table, ALICE, named("a", job=big))
            with pytest.raises(InvalidRequest, match="runtime 'x': this server has fake"):
                await prepare(table, ALICE, named("b", runtime="x"))
            assert table.list(ROOT) == ()

    within(body())


def test_cancelling_at_any_moment(tmp_path: Path) -> None:
    """Before it is prepared, prepared, running: it ends once, as cancelled, and holds nothing."""

    async def body() -> None:
        executor = FakeExecutor(lambda job: FakeRun(prepare_seconds=30.0) if job.name == "slow" else HOLDS)
        async with table_over(tmp_path, executor) as table:
            await prepare(table, ALICE, named("slow", job=replace(JOB, name="slow")))
            await prepare(table, ALICE, named("waits", start=False))
            await prepare(table, ALICE, named("runs"))
            await table.wait(ALICE, "slow", AttemptState.PREPARING)
            await table.wait(ALICE, "waits", AttemptState.PREPARED)
            await table.wait(ALICE, "runs", AttemptState.RUNNING)
            for name in ("slow", "waits", "runs"):
                await table.cancel(ALICE, name, CancellationReason.SUPERSEDED)
            views = [await table.wait(ALICE, name) for name in ("slow", "waits", "runs")]
            assert [view.error is not None for view in views] == [True, True, False]
            assert views[2].result is not None
            assert views[2].result.cancellation is CancellationReason.SUPERSEDED
            assert table.counts == (0, 0)
            assert len(executor.attempts) == 1

    within(body())


def test_output_resumes(tmp_path: Path) -> None:
    """From the mark that a reader has; also of one that has ended; gone once it is cleaned up."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor(lambda _: FakeRun(output=b"one\ntwo\n"))) as table:
            await prepare(table, ALICE, named("a"))
            await table.wait(ALICE, "a")
            from forgeyard_runtimes.spool_format import SpoolMark

            chunks = [chunk.data async for chunk in table.output(ALICE, "a", after=SpoolMark(4, 0))]
            assert chunks == [b"two\n"]
            await table.cleanup(ALICE, "a")
            await table.cleanup(ALICE, "a")
            assert table.list(ROOT) == ()

    within(body())


def test_a_lease_that_is_not_renewed(tmp_path: Path) -> None:
    """Cancels the attempt; one that is renewed goes on; one without a lease can't be renewed."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: HOLDS)
        async with table_over(tmp_path, executor) as table:
            await prepare(table, ALICE, named("short", lease=0.2))
            await prepare(table, ALICE, named("long", lease=0.2))
            await table.renew(ALICE, "long", 3600.0)
            result = (await table.wait(ALICE, "short")).result
            assert result is not None
            assert result.cancellation is CancellationReason.LEASE_EXPIRED
            assert table.find(ALICE, "long").state is not AttemptState.ENDED
            await prepare(table, ALICE, named("none"))
            with pytest.raises(InvalidRequest, match="lease"):
                await table.renew(ALICE, "none")
            await table.stop_all(CancellationReason.USER)

    within(body())


@pytest.mark.parametrize("death", list(OnClientDeath))
def test_a_client_that_dies(tmp_path: Path, death: OnClientDeath) -> None:
    """Ends its attempts where it asked for that, and leaves them alone otherwise."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor(lambda _: HOLDS)) as table:
            with subprocess.Popen(["sleep", "600"]) as client:
                caller = Caller(0, 0, client.pid)
                await prepare(table, caller, named("a", on_client_death=death))
                await prepare(table, caller, named("other", on_client_death=OnClientDeath.CANCEL))
                await table.wait(caller, "a", AttemptState.RUNNING)
                client.kill()
            assert (await table.wait(caller, "other")).state is AttemptState.ENDED
            ended = table.find(caller, "a").state is AttemptState.ENDED
            if death is OnClientDeath.CANCEL:
                await table.wait(caller, "a")
            else:
                assert not ended
            await table.stop_all(CancellationReason.USER)

    within(body())


def test_events_come_as_they_happen(tmp_path: Path) -> None:
    """For those whom they concern."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor()) as table:
            hers, his = table.events(ALICE), table.events(BOB, "b")
            first = asyncio.ensure_future(anext(hers)), asyncio.ensure_future(anext(his))
            await until(lambda: table.events_hub.listened)
            await prepare(table, ALICE, named("a"))
            await prepare(table, BOB, named("b"))
            kinds = [(await first[0]).kind, *[(await anext(hers)).kind for _ in range(4)]]
            assert kinds == [
                EventKind.QUEUED,
                EventKind.PREPARING,
                EventKind.PREPARED,
                EventKind.RUNNING,
                EventKind.ENDED,
            ]
            assert (await first[1]).attempt_id == "b"
            await hers.aclose()
            await his.aclose()

    within(body())


def test_draining(tmp_path: Path) -> None:
    """Nothing more is taken in; what was taken in goes on; a known name is still answered."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: HOLDS)
        async with table_over(tmp_path, executor) as table:
            await prepare(table, ALICE, named("a"))
            table.drain()
            assert (await prepare(table, ALICE, named("a"))).attempt_id == "a"
            with pytest.raises(ExecutorError) as caught:
                await prepare(table, ALICE, named("b"))
            assert caught.value.reason == "draining"
            await table.wait(ALICE, "a", AttemptState.RUNNING)
            executor.attempts[0].release()
            await table.until_idle()
            table.drain(on=False)
            await prepare(table, ALICE, named("b"))
            await table.wait(ALICE, "b", AttemptState.RUNNING)
            await table.stop_all(CancellationReason.USER)

    within(body())


def test_ended_attempts_are_forgotten_in_time(tmp_path: Path) -> None:
    """With their output."""

    async def body() -> None:
        executor = FakeExecutor()
        async with table_over(tmp_path, executor, result_ttl=0.1) as table:
            await prepare(table, ALICE, named("a"))
            await until(lambda: table.list(ROOT) == ())
            assert executor.attempts[0].output_dropped

    within(body())


def test_a_restart_without_keepers(tmp_path: Path) -> None:
    """What ran is lost, once; what waited runs; what had ended is there with its result."""

    async def body() -> None:
        executor = FakeExecutor(lambda job: HOLDS if job.name == "holds" else FakeRun(exit_code=7))
        holds = replace(JOB, name="holds")
        async with table_over(tmp_path, executor, room=capacity(slots=1)) as table:
            await prepare(table, ALICE, named("done"))
            await table.wait(ALICE, "done")
            await prepare(table, ALICE, named("runs", job=holds))
            await table.wait(ALICE, "runs", AttemptState.RUNNING)
            await prepare(table, ALICE, named("waits"))
        after = FakeExecutor(lambda _: FakeRun(exit_code=8))
        async with table_over(tmp_path, after) as table:
            done, runs = table.find(ALICE, "done"), await table.wait(ALICE, "runs")
            assert done.result is not None
            assert done.result.exit_code == 7
            assert isinstance(runs.error, ExecutorError)
            assert (runs.error.kind, runs.error.reason) == (ExecutorErrorKind.LOST, "server_lost")
            waits = await table.wait(ALICE, "waits")
            assert waits.result is not None
            assert waits.result.exit_code == 8
            assert [run.prepared.context.attempt_id for run in after.attempts] == ["1000/waits"]
        async with table_over(tmp_path, FakeExecutor()) as table:
            again = table.find(ALICE, "runs")
            assert (str(again.error), again.finished_at) == (str(runs.error), runs.finished_at)

    within(body())


def test_a_cancel_survives_a_restart(tmp_path: Path) -> None:
    """What waited and was cancelled never runs."""

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor(lambda _: HOLDS), room=capacity(slots=1)) as table:
            await prepare(table, ALICE, named("runs"))
            await table.wait(ALICE, "runs", AttemptState.RUNNING)
            await prepare(table, ALICE, named("waits"))
            await table.cancel(ALICE, "waits")
        after = FakeExecutor()
        async with table_over(tmp_path, after) as table:
            view = await table.wait(ALICE, "waits")
            assert view.error is not None
            assert view.error.failure_class is FailureClass.CANCELLED
            assert after.attempts == []

    within(body())


def test_steps_one_by_one(tmp_path: Path) -> None:
    """An attempt without steps takes them until it is told that there are no more."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: FakeRun(exit_code=0))
        async with table_over(tmp_path, executor) as table:
            await prepare(table, ALICE, named("a", job=Job(rootfs="host", steps=())))
            result = await table.exec(ALICE, "a", Step("make", "all"))
            assert result.name == "make"
            await table.finish(ALICE, "a")
            view = await table.wait(ALICE, "a")
            assert view.result is not None
            assert [step.argv for step in executor.attempts[0].steps_run] == [("make", "all")]
            with pytest.raises(ExecutorError) as caught:
                await table.exec(ALICE, "a", Step("make"))
            assert caught.value.reason == "attempt_ended"

    within(body())
