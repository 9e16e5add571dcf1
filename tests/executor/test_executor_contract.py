"""One contract for whatever runs jobs: the executor itself, one behind a socket, and the one that pretends.

Each test says what its job does twice: as a program, and as a `FakeRun`. All else is the same for all of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from jobs import sh
from served import socket_over

from forgeyard_api.client import RemoteExecutor
from forgeyard_executor import Executor, Job, Outcome, Step
from forgeyard_executor.interface import JobExecutor, RunningAttempt
from forgeyard_executor.testing import FakeExecutor, FakeRun, FakeService, FakeStep
from forgeyard_executor.testing.assertions import assert_nothing_left, assert_sound, output_of
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, ForgeyardError, InvalidRequest
from forgeyard_model.job import Output, Timeouts, When
from forgeyard_model.limits import Limits
from forgeyard_model.result import CancellationReason, EndCause, ExecutionResult, ServiceState
from forgeyard_model.services import Condition, ExecProbe, HealthCheck, ServiceSpec
from forgeyard_runtimes.spool_format import START, SpoolMark

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]

SECONDS = 100.0
WELL = FakeRun()
Body = Callable[[JobExecutor], Awaitable[None]]


class Bench:
    """The executors of these tests: one of this host, one in front of it, and a new pretended one for each test."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._opened: dict[str, JobExecutor] = {}

    def run(self, name: str, fake: FakeRun, body: Body) -> None:
        """Await `body` with the executor called `name`; afterwards nothing of it is left there."""

        async def main() -> None:
            async with asyncio.timeout(SECONDS):
                executor = FakeExecutor(lambda _: fake) if name == "fake" else await self._open(name)
                await body(executor)
                await assert_nothing_left(executor)

        self._runner.run(main())

    def close(self) -> None:
        """Close those that were opened."""
        with self._runner:
            self._runner.run(self._stack.aclose())

    async def _open(self, name: str) -> JobExecutor:
        if name not in self._opened:
            self._opened[name] = await (self._executor() if name == "runc" else self._remote())
        return self._opened[name]

    async def _executor(self) -> JobExecutor:
        return await self._stack.enter_async_context(Executor.open(self.state, config=ExecutorConfig()))

    async def _remote(self) -> JobExecutor:
        host = await self._open("runc")
        target, _ = await self._stack.enter_async_context(socket_over(self.state, host))
        return await self._stack.enter_async_context(RemoteExecutor.connect(target))


@pytest.fixture(scope="module")
def bench(shared_state: Path) -> Iterator[Bench]:
    """The executors, on a state directory of their own."""
    state = Path(tempfile.mkdtemp(prefix="fy-contract-", dir="/var/tmp"))
    state.chmod(0o711)
    if (shared_state / "rootfs").exists():
        shutil.copytree(shared_state / "rootfs", state / "rootfs", symlinks=True)
    made = Bench(state)
    yield made
    made.close()
    shutil.rmtree(state)


@pytest.fixture(params=["runc", "served", "fake"])
def on(request: pytest.FixtureRequest, bench: Bench) -> Callable[[FakeRun, Body], None]:
    """``on(fake, body)``: await `body` with one executor after the other; `fake` says how jobs go at the last."""
    return lambda fake, body: bench.run(request.param, fake, body)


On = Callable[[FakeRun, Body], None]


def job(*steps: Step, **options: object) -> Job:
    """A job on the host rootfs."""
    return Job(rootfs="host", steps=steps, **options)  # type: ignore[arg-type]  # passed on by name


def named(name: str, script: str, **options: object) -> Step:
    """A step with a name."""
    return sh(script, name=name, **options)


async def ended(executor: JobExecutor, wanted: Job, **options: object) -> ExecutionResult:
    """Run a job to its end; its result, which says one thing."""
    async with executor.run(wanted, **options) as attempt:  # type: ignore[arg-type]  # passed on by name
        result = await attempt.wait()
    assert_sound(result)
    return result


def scripted(**steps: FakeStep) -> FakeRun:
    """A run of which steps are told by name."""
    return FakeRun(steps=MappingProxyType(steps))


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

HOLDS = FakeRun(holds=True)
STUBBORN = FakeRun(holds=True, stubborn=True)
SLEEPS = sh("sleep 1000")
DEAF = sh("trap '' TERM; echo deaf; while :; do sleep 1; done")


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
            await _first_output(attempt)
            await attempt.cancel(CancellationReason.FAIL_FAST)
            result = await attempt.wait()
        assert (result.outcome, result.cancellation) == (Outcome.CANCELLED, CancellationReason.FAIL_FAST)

    on(replace(STUBBORN, output=b"deaf\n"), body)


def test_a_kill_cuts_the_grace_short(on: On) -> None:
    """Also after a cancel without: nobody waits out the hour that this one has."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(DEAF, timeouts=Timeouts(grace=3600.0))) as attempt:
            await _first_output(attempt)
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
            await _first_output(attempt)
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


async def _first_output(attempt: RunningAttempt) -> None:
    """Return once it has written something."""
    chunks = attempt.output()
    await anext(chunks)
    await chunks.aclose()


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


# ---- output


def test_output_from_where_a_reader_was(on: On) -> None:
    """Nothing is said twice, nothing left out; without following it ends at what is there."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(sh("printf onetwo; sleep 1000"))) as attempt:
            await _first_output(attempt)
            later = [chunk async for chunk in attempt.output(after=SpoolMark(3, 0), follow=False)]
            assert b"".join(chunk.data for chunk in later) == b"two"
            assert [chunk async for chunk in attempt.output(after=SpoolMark(6, 0), follow=False)] == []
            await attempt.cancel(kill=True)
            await attempt.wait()
            assert (await output_of(attempt))[0] == b"onetwo"

    on(FakeRun(output=b"onetwo", holds=True), body)


def test_much_output(on: On) -> None:
    """In pieces of at most 64 KiB, every byte of it; a reader that comes late has all of it."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(sh("head -c 300000 /dev/zero"))) as attempt:
            await attempt.wait()
            chunks = [chunk async for chunk in attempt.output(after=START)]
            assert max(len(chunk.data) for chunk in chunks) <= 64 << 10
            assert b"".join(chunk.data for chunk in chunks) == bytes(300_000)

    on(FakeRun(output=bytes(300_000)), body)


def test_output_that_was_dropped(on: On) -> None:
    """Can't be read any more, and that is said."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(sh("echo gone"))) as attempt:
            await attempt.wait()
            await attempt.drop_output()
            await attempt.drop_output()
            with pytest.raises(ForgeyardError):
                await output_of(attempt)

    on(FakeRun(output=b"gone\n"), body)


def test_what_a_job_leaves(on: On, tmp_path: Path) -> None:
    """What it promised is collected, and where it was to go; a promise that was not kept is a failure."""
    promised = (Output("report"), Output("extra", optional=True))
    scripts = ("mkdir /work/output/report; printf 12345 > /work/output/report/a", "true")

    async def kept(executor: JobExecutor) -> None:
        where = tmp_path / "out"
        result = await ended(executor, job(sh(scripts[0]), outputs=promised), output=where)
        assert result.outcome is Outcome.SUCCEEDED
        found = [(item.path, item.files, item.bytes, item.missing) for item in result.outputs]
        assert found == [("report", 1, 5, False), ("extra", 0, 0, True)]
        assert (where / "report/a").read_bytes() == b"12345"
        with pytest.raises(InvalidRequest, match="output"):
            await executor.prepare_job(job(sh("true")), output=where)

    async def broken(executor: JobExecutor) -> None:
        result = await ended(executor, job(sh(scripts[1]), outputs=promised))
        assert (result.outcome, result.exit_code) == (Outcome.FAILED, 1)
        assert result.message == "required output missing: report"

    on(FakeRun(files=MappingProxyType({"report/a": b"12345"})), kept)
    on(FakeRun(files=MappingProxyType({})), broken)


# ---- prepared


def test_prepared_started_once(on: On) -> None:
    """It is there, and says so, before it runs; started once, discarded as often as one likes."""

    async def body(executor: JobExecutor) -> None:
        prepared = await executor.prepare_job(job(SLEEPS, name="it"), attempt_id="mine-2")
        assert (prepared.context.attempt_id, prepared.bundle_digest[:7]) == ("mine-2", "sha256:")
        (there,) = await executor.sandboxes()
        assert (there.sandbox_id, there.name, there.state) == (prepared.sandbox_id.value, "it", "preparing")
        attempt = await executor.start(prepared)
        assert attempt.sandbox_id == prepared.sandbox_id.value
        (there,) = await executor.sandboxes()
        assert (there.sandbox_id, there.state) == (attempt.sandbox_id, "running")
        await executor.close_execution(attempt)
        await executor.close_execution(attempt)
        assert await executor.sandboxes() == ()

    on(HOLDS, body)


def test_discarded(on: On) -> None:
    """It can't be started any more."""

    async def body(executor: JobExecutor) -> None:
        prepared = await executor.prepare_job(job(SLEEPS))
        await executor.discard(prepared)
        await executor.discard(prepared)
        with pytest.raises(ExecutorError) as caught:
            await executor.start(prepared)
        assert caught.value.kind is ExecutorErrorKind.LOST

    on(HOLDS, body)


def test_containers_can_be_looked_at(on: On) -> None:
    """While there are any; of an attempt that is not there it is said."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(SLEEPS, name="it")) as attempt:
            (live,) = await executor.inspect_attempt(attempt.sandbox_id)
            assert (live.name, live.state, live.sandbox_id) == ("it", "running", attempt.sandbox_id)
            assert live.usage is not None
        with pytest.raises(ExecutorError) as caught:
            await executor.inspect_attempt(attempt.sandbox_id)
        assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.LOST, "no_such_attempt")

    on(HOLDS, body)


REFUSED = [
    ("workdir", job(sh("true"), workdir="../up"), {}),
    ("image", Job(image="busybox", steps=(sh("true"),)), {}),
    ("user", job(sh("true"), user="nobody-here"), {}),
    ("steps", job(Step("/bin/true", "with\0nul")), {}),
    ("source", job(sh("true")), {"source": "/nosuch/source"}),
    ("deadline", job(sh("true")), {"deadline": datetime(2030, 1, 1)}),
    ("outputs", job(sh("true"), outputs=(Output("../up"),)), {}),
    (
        "depends_on",
        job(sh("true"), services=(ServiceSpec("db", argv=("x",), depends_on={"no": Condition.STARTED}),)),
        {},
    ),
]


@pytest.mark.parametrize(("field", "wanted", "options"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_by_field(on: On, field: str, wanted: Job, options: dict[str, object]) -> None:
    """Before anything is made, with the field's name and the cure in one line."""

    async def body(executor: JobExecutor) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await executor.prepare_job(wanted, **options)  # type: ignore[arg-type]  # passed on by name
        assert field in caught.value.field
        assert "\n" not in str(caught.value)

    on(WELL, body)


# ---- services

READY = HealthCheck(ExecProbe(("/bin/sh", "-c", "test -e /tmp/up")), interval=0.1)
UP = ServiceSpec("db", argv=("/bin/sh", "-c", "echo up; touch /tmp/up; exec sleep 1000"), health=READY)


def test_services(on: On) -> None:
    """Ready before the steps, with an output of their own, and gone with the job."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(sh("true"), services=(UP,))) as attempt:
            result = await attempt.wait()
            assert await output_of(attempt, "db") == (b"up\n", b"")
            with pytest.raises(InvalidRequest, match=r"service 'no'.*it has db"):
                await output_of(attempt, "no")
        assert_sound(result)
        assert result.outcome is Outcome.SUCCEEDED
        assert [(service.name, service.state, service.log_tail) for service in result.services] == [
            ("db", ServiceState.READY, ("up",))
        ]

    on(FakeRun(services=MappingProxyType({"db": FakeService(output=b"up\n")})), body)


def test_a_service_that_does_not_get_ready(on: On) -> None:
    """Fails the job before a step runs, and says how it ended."""
    dies = replace(UP, argv=("/bin/sh", "-c", "exit 7"))

    async def body(executor: JobExecutor) -> None:
        result = await ended(executor, job(named("it", "true"), services=(dies,)))
        assert (result.outcome, result.end_cause) == (Outcome.FAILED, EndCause.SERVICE_FAILED)
        assert result.exit_code == 125
        assert result.message.startswith("service db: ")
        assert "exit 7" in result.message
        assert [step.skipped for step in result.steps] == [True]
        assert result.services[0].state is ServiceState.FAILED

    on(FakeRun(services=MappingProxyType({"db": FakeService(ready_after=None, ends_after=0.0, exit_code=7)})), body)


def test_there_are_no_leftovers_of_these_tests(bench: Bench) -> None:
    """What they have made in the state directory is gone with them."""
    for name in ("sandboxes", "ledger"):
        there = bench.state / name
        assert not there.exists() or os.listdir(there) == []
