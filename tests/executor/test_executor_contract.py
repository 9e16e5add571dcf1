"""One contract for whatever runs jobs: the executor itself, one behind a socket, and the one that pretends.

Each test says what its job does twice: as a program, and as a `FakeRun`. All else is the same for all of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from contract_bench import (
    DEAF,
    HOLDS,
    SLEEPS,
    STUBBORN,
    WELL,
    Bench,
    On,
    ended,
    first_output,
    job,
    named,
    opened,
    scripted,
)
from jobs import sh

from forgeyard_executor import Outcome, Step
from forgeyard_executor.interface import JobExecutor
from forgeyard_executor.testing import FakeRun, FakeStep
from forgeyard_executor.testing.assertions import assert_sound, output_of
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, InvalidRequest
from forgeyard_model.job import Timeouts, When
from forgeyard_model.limits import Limits
from forgeyard_model.result import CancellationReason, EndCause

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def bench(shared_state: Path) -> Iterator[Bench]:
    """The executors, on a state directory of their own."""
    with opened(shared_state) as made:
        yield made


@pytest.fixture(params=["runc", "served", "fake"])
def on(request: pytest.FixtureRequest, bench: Bench) -> On:
    """``on(fake, body)``: await `body` with one executor after the other; `fake` says how jobs go at the last."""
    return lambda fake, body: bench.run(request.param, fake, body)


# ---- verdicts


def test_a_job_that_goes_well(on: On) -> None:
    """Its output by stream, its result as often as wanted, its caller's names, and an end."""

    async def body(executor: JobExecutor) -> None:
        wanted = job(sh("printf 'one\\ntwo\\n'; printf bad >&2"), name="build")
        async with executor.run(wanted, attempt_id="mine-1", labels={"a": "b"}) as attempt:
            first, second = await asyncio.gather(attempt.wait(), attempt.wait())
            assert await output_of(attempt) == (b"one\ntwo\n", b"bad")
        assert_sound(first)
        assert first == second
        assert (first.name, first.attempt_id, first.sandbox_id) == ("build", "mine-1", attempt.sandbox_id)
        assert (first.outcome, first.failure_class) == (Outcome.SUCCEEDED, FailureClass.NONE)
        assert (first.end_cause, first.exit_code, first.message) == (EndCause.EXITED, 0, "succeeded")
        assert (first.output.stdout_bytes, first.output.stderr_bytes) == (8, 3)
        assert first.provenance.bundle_digest.startswith("sha256:")

    on(FakeRun(output=b"one\ntwo\n", error_output=b"bad"), body)


ENDS = [
    ("exit 3", FakeStep(exit_code=3), 3, 3, None),
    ("exit 137", FakeStep(exit_code=137), 137, 137, None),
    ("kill -9 $$", FakeStep(signal=9), 137, None, 9),
    ("kill -TERM $$", FakeStep(signal=15), 143, None, 15),
]


@pytest.mark.parametrize(("script", "fake", "shown", "code", "number"), ENDS, ids=[end[0] for end in ENDS])
def test_how_a_step_ended(
    on: On, script: str, fake: FakeStep, shown: int, code: int | None, number: int | None
) -> None:
    """A code and a signal stay two different facts, and either is the job's failure."""

    async def body(executor: JobExecutor) -> None:
        result = await ended(executor, job(named("it", script)))
        assert (result.outcome, result.failure_class) == (Outcome.FAILED, FailureClass.WORKLOAD)
        assert result.exit is not None
        assert (result.exit_code, result.exit.code, result.exit.signal) == (shown, code, number)
        assert result.message == f"step it: {result.exit}"

    on(scripted(it=fake), body)


def test_the_order_of_steps(on: On) -> None:
    """After a failure only those that are for it run; one that may fail fails for itself alone."""
    steps = (
        named("may", "exit 2", continue_on_error=True),
        named("fails", "exit 5"),
        named("next", "true"),
        named("mends", "true", when=When.ON_FAILURE),
        named("last", "true", when=When.ALWAYS),
    )

    async def body(executor: JobExecutor) -> None:
        result = await ended(executor, job(*steps))
        assert (result.outcome, result.exit_code, result.message) == (Outcome.FAILED, 5, "step fails: exit 5")
        assert [(step.name, step.skipped, step.masked) for step in result.steps] == [
            ("may", False, True),
            ("fails", False, False),
            ("next", True, False),
            ("mends", False, False),
            ("last", False, False),
        ]

    on(scripted(may=FakeStep(exit_code=2), fails=FakeStep(exit_code=5)), body)


def test_a_program_that_is_not_there(on: On) -> None:
    """127, and the job's own failure."""

    async def body(executor: JobExecutor) -> None:
        result = await ended(executor, job(Step("/nosuch", name="it")))
        assert (result.outcome, result.exit_code, result.exit) == (Outcome.FAILED, 127, None)
        assert result.message == "step it: /nosuch: not found"

    on(scripted(it=FakeStep(error="/nosuch: not found")), body)


def test_out_of_memory(on: On) -> None:
    """The kernel's count makes it so, and not the number that the step ended with."""

    async def body(executor: JobExecutor) -> None:
        wanted = job(named("it", "exec tail /dev/zero"), limits=Limits(memory="32MiB"))
        result = await ended(executor, wanted)
        assert (result.outcome, result.failure_class) == (Outcome.OUT_OF_MEMORY, FailureClass.RESOURCE)
        assert (result.exit_code, result.end_cause) == (137, EndCause.EXITED)
        assert result.evidence.memory.oom_kills
        assert result.evidence.memory.limit == 32 << 20
        assert result.exit is not None
        assert result.exit.signal == 9

    on(FakeRun(outcome=Outcome.OUT_OF_MEMORY), body)


# ---- ends that somebody else makes


def test_timeout(on: On) -> None:
    """The job's own limit, named."""

    async def body(executor: JobExecutor) -> None:
        result = await ended(executor, job(SLEEPS, sh("true"), limits=Limits(wall_time="1s")))
        assert (result.outcome, result.failure_class) == (Outcome.TIMED_OUT, FailureClass.TIMEOUT)
        assert (result.exit_code, result.message) == (124, "timed out: timeout of 1s expired")
        assert [step.skipped for step in result.steps] == [False, True]

    on(scripted(sh=FakeStep(holds=True)), body)


def test_deadline(on: On) -> None:
    """The caller's, which caps the job's own."""

    async def body(executor: JobExecutor) -> None:
        result = await ended(executor, job(SLEEPS), deadline=datetime.now(UTC) + timedelta(seconds=0.5))
        assert (result.outcome, result.exit_code) == (Outcome.TIMED_OUT, 124)
        assert result.message.startswith("timed out: the caller's deadline of ")

    on(HOLDS, body)


@pytest.mark.parametrize("kill", [False, True], ids=["asked", "killed"])
def test_cancelled(on: On, *, kill: bool) -> None:
    """With the first reason that was given, at once."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(SLEEPS, sh("true"))) as attempt:
            await attempt.cancel(CancellationReason.SUPERSEDED, kill=kill)
            await attempt.cancel(CancellationReason.SHUTDOWN, kill=kill)
            result = await attempt.wait()
            await attempt.cancel(CancellationReason.USER)
            assert await attempt.wait() == result
        assert_sound(result)
        assert (result.outcome, result.failure_class) == (Outcome.CANCELLED, FailureClass.CANCELLED)
        assert (result.exit_code, result.message) == (143, "cancelled: superseded")
        assert result.cancellation is CancellationReason.SUPERSEDED

    on(scripted(sh=FakeStep(holds=True)), body)


def test_one_that_does_not_listen(on: On) -> None:
    """Is killed when its grace is over."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(DEAF, timeouts=Timeouts(grace=0.3))) as attempt:
            await first_output(attempt)
            await attempt.cancel(CancellationReason.FAIL_FAST)
            result = await attempt.wait()
        assert (result.outcome, result.cancellation) == (Outcome.CANCELLED, CancellationReason.FAIL_FAST)

    on(replace(STUBBORN, output=b"deaf\n"), body)


def test_a_kill_cuts_the_grace_short(on: On) -> None:
    """Also after a cancel without: nobody waits out the hour that this one has."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(DEAF, timeouts=Timeouts(grace=3600.0))) as attempt:
            await first_output(attempt)
            await attempt.cancel(CancellationReason.RUN_CANCELLED)
            await attempt.cancel(CancellationReason.USER, kill=True)
            result = await attempt.wait()
        assert (result.outcome, result.cancellation) == (Outcome.CANCELLED, CancellationReason.RUN_CANCELLED)

    on(replace(STUBBORN, output=b"deaf\n"), body)


def test_last_steps_run_after_a_cancel(on: On) -> None:
    """Those that always run, where the job gave them time."""
    steps = (named("long", "echo on; sleep 1000"), named("next", "true"), named("last", "exit 4", when=When.ALWAYS))

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(*steps, timeouts=Timeouts(finally_=60.0))) as attempt:
            await first_output(attempt)
            await attempt.cancel()
            result = await attempt.wait()
        assert result.outcome is Outcome.CANCELLED
        assert [step.skipped for step in result.steps][1:] == [True, False]
        assert result.steps[2].exit is not None
        assert result.steps[2].exit.code == 4

    on(scripted(long=FakeStep(output=b"on\n", holds=True), last=FakeStep(exit_code=4)), body)


def test_leaving_the_block_ends_it(on: On) -> None:
    """What still runs is cancelled, and nothing is left."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(SLEEPS)):
            assert len(await executor.sandboxes()) == 1

    on(HOLDS, body)


def test_a_waiter_may_give_up(on: On) -> None:
    """The attempt goes on, and others still wait for it."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(SLEEPS)) as attempt:
            waiting = asyncio.ensure_future(attempt.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()
            assert len(await executor.sandboxes()) == 1
            await attempt.cancel()
            assert (await attempt.wait()).outcome is Outcome.CANCELLED

    on(HOLDS, body)


# ---- steps sent one by one


def test_steps_one_by_one(on: On) -> None:
    """Each with its result; a failure ends nothing; after the end there are no more."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job()) as attempt:
            results = [await attempt.exec(named(name, script)) for name, script in (("a", "exit 3"), ("b", "true"))]
            attempt.finish()
            whole = await attempt.wait()
            with pytest.raises(ExecutorError) as caught:
                await attempt.exec(sh("true"))
            assert caught.value.kind is ExecutorErrorKind.LOST
        assert [result.exit and result.exit.code for result in results] == [3, 0]
        assert [step.name for step in whole.steps] == ["a", "b"]
        assert (whole.outcome, whole.exit_code) == (Outcome.FAILED, 3)

    on(scripted(a=FakeStep(exit_code=3)), body)


def test_a_step_that_no_kernel_would_take(on: On) -> None:
    """Is refused, and the attempt goes on."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job()) as attempt:
            with pytest.raises(InvalidRequest):
                await attempt.exec(Step("/bin/true", "with\0nul"))
            assert (await attempt.exec(sh("true"))).exit is not None
            attempt.finish()
            assert (await attempt.wait()).outcome is Outcome.SUCCEEDED

    on(WELL, body)


def test_there_are_no_leftovers_of_these_tests(bench: Bench) -> None:
    """What they have made in the state directory is gone with them."""
    for name in ("sandboxes", "ledger"):
        there = bench.state / name
        assert not there.exists() or os.listdir(there) == []
