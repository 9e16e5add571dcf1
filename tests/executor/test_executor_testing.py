"""What the testkit offers beyond the contract: failures on demand, what it remembers, and assertions that can fail."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from contract_box import ROOTFS
from fake_box import FakeBox
from served import JOB, until, within

from forgeyard_executor import ExecutionResult, Job, Outcome, Step
from forgeyard_executor.testing import (
    FakeExecutor,
    FakeRun,
    FakeRuntime,
    FakeService,
    FakeStep,
    assert_ended_once,
    assert_nothing_left,
    assert_same_contract,
    assert_sound,
    output_of,
)
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, InvalidRequest
from forgeyard_model.job import Timeouts
from forgeyard_model.plan import Bundle, NetworkAttachment
from forgeyard_model.policy import NetworkMode
from forgeyard_model.result import CLEANUP_NOTE, CancellationReason, EndCause, ServiceState
from forgeyard_model.services import HealthCheck, LogProbe, OnExit, ServiceSpec, TcpProbe
from forgeyard_runtimes.contract import ContainerStatus, Stdio

LOST = ExecutorError(ExecutorErrorKind.LOST, "engine_died", "the engine took it along")
DOCS = Path(__file__).parents[2] / "docs/testing.md"


async def ended(run: FakeRun, job: Job = JOB) -> ExecutionResult:
    """What a job that goes as `run` says comes to."""
    async with FakeExecutor.open(lambda _: run) as executor, executor.run(job) as attempt:
        result = await attempt.wait()
    assert_sound(result)
    return result


def test_the_example_of_the_documentation() -> None:
    """It runs as it stands."""
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the executor


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.SANDBOX_VIOLATION])
def test_every_outcome_on_demand(outcome: Outcome) -> None:
    """Judged as a real one, so that all of the result agrees with it."""
    result = within(ended(FakeRun(outcome=outcome)))
    assert result.outcome is outcome
    assert result.failure_class is outcome.failure_class


def test_an_outcome_that_no_evidence_leads_to_yet() -> None:
    """A scheduler can be tested for it all the same."""
    result = within(ended(FakeRun(outcome=Outcome.SANDBOX_VIOLATION)))
    assert (result.outcome, result.failure_class) == (Outcome.SANDBOX_VIOLATION, FailureClass.SECURITY)


def test_an_outcome_that_is_not_reached() -> None:
    """What ends the job first is its end."""

    async def body() -> None:
        run = FakeRun(outcome=Outcome.OUT_OF_MEMORY, holds=True)
        async with FakeExecutor.open(lambda _: run) as executor, executor.run(JOB) as attempt:
            await attempt.cancel()
            result = await attempt.wait()
        assert (result.outcome, result.evidence.memory.oom_kills) == (Outcome.CANCELLED, None)

    within(body())


def test_prepare_fails_or_takes_too_long() -> None:
    """With the error that was asked for, or the one of the limit; nothing is left either way."""

    async def body() -> None:
        refused = InvalidRequest("image", "x", "name another")
        runs = {"refused": FakeRun(refused=refused), "slow": FakeRun(prepare_seconds=3600.0)}
        async with FakeExecutor.open(lambda job: runs[job.name]) as executor:
            with pytest.raises(InvalidRequest) as caught:
                await executor.prepare_job(replace(JOB, name="refused"))
            assert caught.value is refused
            slow = replace(JOB, name="slow", timeouts=Timeouts(prepare=0.01))
            with pytest.raises(ExecutorError, match=r"prepare_timeout of 0\.01s expired") as late:
                await executor.prepare_job(slow)
            assert late.value.kind is ExecutorErrorKind.TIMEOUT
            given_up = asyncio.ensure_future(executor.prepare_job(replace(JOB, name="slow")))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait((given_up,))
            await assert_nothing_left(executor)
            assert executor.prepared == []

    within(body())


def test_start_fails_and_waiting_fails() -> None:
    """A start that fails leaves nothing; an attempt that is lost ends in the error, for everybody who waits."""

    async def body() -> None:
        runs = {"broken": FakeRun(broken=LOST), "lost": FakeRun(lost=LOST)}
        async with FakeExecutor.open(lambda job: runs[job.name]) as executor:
            with pytest.raises(ExecutorError, match="took it along"):
                async with executor.run(replace(JOB, name="broken")):
                    pass
            assert executor.attempts == []
            async with executor.run(replace(JOB, name="lost"), attempt_id="l") as attempt:
                for _ in range(2):
                    with pytest.raises(ExecutorError, match="took it along"):
                        await attempt.wait()
            with pytest.raises(ExecutorError, match="took it along"):
                await assert_ended_once(executor, "l")
            await assert_nothing_left(executor)

    within(body())


@pytest.mark.parametrize(("error", "message"), [(None, "PID 1"), (LOST, "the engine took it along")])
def test_a_sandbox_killed_from_outside(error: ExecutorError | None, message: str) -> None:
    """Not the job's failure, and with what the engine knows of it."""

    async def body() -> None:
        async with FakeExecutor.open(lambda _: FakeRun(holds=True)) as executor, executor.run(JOB) as attempt:
            await until(lambda: bool(attempt.steps_run))
            attempt.lose(error)
            result = await attempt.wait()
        assert_sound(result)
        assert (result.outcome, result.failure_class) == (Outcome.INFRASTRUCTURE_FAILURE, FailureClass.INFRASTRUCTURE)
        assert message in result.message

    within(body())


def test_an_attempt_id_that_names_one_attempt() -> None:
    """As at a server: a call that is repeated is the same attempt, another job under its name is refused."""

    async def body() -> None:
        async with FakeExecutor.open(lambda _: FakeRun(holds=True), names_once=True) as executor:
            first = await executor.prepare_job(JOB, attempt_id="a")
            assert await executor.prepare_job(JOB, attempt_id="a") is first
            attempt = await executor.start(first)
            assert await executor.start(first) is attempt
            with pytest.raises(InvalidRequest, match="attempt_id 'a'"):
                await executor.prepare_job(replace(JOB, name="other"), attempt_id="a")
            attempt.release()
            assert (await attempt.wait()).outcome is Outcome.SUCCEEDED
            assert (await assert_ended_once(executor, "a")).attempt_id == "a"

    within(body())


def test_an_attempt_id_is_data_otherwise() -> None:
    """As in a process of one's own; the assertion sees that there were two."""

    async def body() -> None:
        async with FakeExecutor.open() as executor:
            for _ in range(2):
                async with executor.run(JOB, attempt_id="a") as attempt:
                    await attempt.wait()
            with pytest.raises(AssertionError, match="a was prepared 2 times and started 2 times, instead of once"):
                await assert_ended_once(executor, "a")

    within(body())


def test_closed() -> None:
    """What runs ends for the reason of a shutdown, and nothing is taken any more."""

    async def body() -> None:
        async with FakeExecutor.open(lambda _: FakeRun(holds=True, stubborn=True)) as executor:
            attempt = await executor.start(await executor.prepare_job(JOB))
            waiting = await executor.prepare_job(JOB)
        result = await attempt.wait()
        assert (result.outcome, result.cancellation) == (Outcome.CANCELLED, CancellationReason.SHUTDOWN)
        assert attempt.output_dropped
        for late in (executor.prepare_job(JOB), executor.start(waiting)):
            with pytest.raises(ExecutorError):
                await late
        await executor.close()

    within(body())


def test_a_step_that_holds_among_others() -> None:
    """Steps are told by name; a release lets all of them go."""

    async def body() -> None:
        steps = MappingProxyType({"b": FakeStep(holds=True, output=b"b"), "c": FakeStep(exit_code=4)})
        job = replace(JOB, steps=(Step("x", name="a"), Step("x", name="b"), Step("x", name="c")))
        async with FakeExecutor.open(lambda _: FakeRun(steps=steps)) as executor, executor.run(job) as attempt:
            await until(lambda: [step.name for step in attempt.steps_run] == ["a", "b"])
            attempt.release()
            result = await attempt.wait()
            assert await output_of(attempt) == (b"b", b"")
        assert [step.exit and step.exit.code for step in result.steps] == [0, 0, 4]

    within(body())


DB = ServiceSpec("db", argv=("x",), health=HealthCheck(TcpProbe(5432), interval=0.01, retries=1_000_000))
LOUD = ServiceSpec("log", argv=("x",), health=HealthCheck(LogProbe("listening")))


def with_services(*specs: ServiceSpec, services: float = 120.0) -> Job:
    """A job that has them beside it."""
    return replace(JOB, services=specs, timeouts=Timeouts(services=services))


def test_services_that_go_well() -> None:
    """Each by the check that it declares, with nothing said of it; one without a check is not proven."""
    plain = ServiceSpec("plain", argv=("x",))
    result = within(ended(FakeRun(), with_services(DB, LOUD, plain)))
    assert [service.state for service in result.services] == [
        *(ServiceState.READY, ServiceState.READY, ServiceState.UNPROVEN)
    ]
    assert result.services[1].log_tail == ("listening",)


def test_a_service_that_is_never_ready() -> None:
    """The job's own failure, once the time for its services is over."""
    run = FakeRun(services=MappingProxyType({"db": FakeService(ready_after=None)}))
    result = within(ended(run, with_services(DB, services=0.5)))
    assert (result.outcome, result.services[0].state) == (Outcome.FAILED, ServiceState.FAILED)
    assert "service db: was not ready within" in result.message


def test_a_service_that_ends_by_its_timetable() -> None:
    """Before it is ready, or beside the steps."""
    run = FakeRun(holds=True, services=MappingProxyType({"db": FakeService(ends_after=0.05, exit_code=3)}))
    result = within(ended(run, with_services(DB)))
    assert (result.outcome, result.end_cause) == (Outcome.FAILED, EndCause.SERVICE_FAILED)
    assert "exit 3" in result.message


@pytest.mark.parametrize(
    ("lost", "on_exit", "outcome", "says"),
    [
        (False, OnExit.FAIL, Outcome.FAILED, "it died after it was ready: exit 3"),
        (True, OnExit.FAIL, Outcome.INFRASTRUCTURE_FAILURE, "from outside"),
        (False, OnExit.IGNORE, Outcome.SUCCEEDED, "it died after it was ready: exit 3"),
    ],
    ids=["dies", "lost", "ignored"],
)
def test_a_service_that_ends_now(*, lost: bool, on_exit: OnExit, outcome: Outcome, says: str) -> None:
    """Beside the steps: with its name and the cause, in the verdict or in a note."""

    async def body() -> None:
        job = with_services(replace(DB, on_exit=on_exit))
        async with FakeExecutor.open(lambda _: FakeRun(holds=True)) as executor, executor.run(job) as attempt:
            await until(lambda: bool(attempt.steps_run))
            attempt.end_service("db", 3, lost=lost)
            if on_exit is OnExit.IGNORE:
                attempt.release()
            result = await attempt.wait()
        assert_sound(result)
        assert (result.outcome, result.services[0].state) == (outcome, ServiceState.DIED)
        assert any("service db: " in told and says in told for told in (result.message, *result.notes))

    within(body())


# ---- assertions


def test_results_that_contradict_themselves() -> None:
    """Each contradiction is told."""
    good = within(ended(FakeRun()))
    bad = (
        replace(good, failure_class=FailureClass.TIMEOUT),
        replace(good, exit_code=1),
        replace(good, end_cause=EndCause.CANCELLED),
        replace(good, end_cause=EndCause.TIMED_OUT),
        replace(good, cancellation=CancellationReason.USER),
        replace(good, started_at=good.finished_at + timedelta(seconds=1)),
        replace(
            good, started_at=good.started_at.replace(tzinfo=None), finished_at=good.finished_at.replace(tzinfo=None)
        ),
        replace(good, steps=(replace(good.steps[0], skipped=True),)),
        replace(good, steps=(replace(good.steps[0], error="it broke"),)),
        replace(good, notes=(f"{CLEANUP_NOTE}a mount is left",)),
    )
    for result in bad:
        with pytest.raises(AssertionError, match="contradicts itself"):
            assert_sound(result)


def test_results_that_tell_the_same() -> None:
    """Ids and times apart; what differs is named with both values."""
    one, other = within(ended(FakeRun(exit_code=3))), within(ended(FakeRun(exit_code=3)))
    assert one != other
    assert_same_contract(one, other)
    with pytest.raises(AssertionError, match=r"exit_code: 3 and 4; exit: .*; steps\[0\]"):
        assert_same_contract(one, within(ended(FakeRun(exit_code=4))))
    with pytest.raises(AssertionError, match=r"steps\[1\]: None and"):
        assert_same_contract(one, replace(one, steps=one.steps * 2))


def test_something_left_behind() -> None:
    """It is named, once the time for its end is over."""

    async def body() -> None:
        async with FakeExecutor.open() as executor:
            await executor.prepare_job(JOB, attempt_id="mine")
            with pytest.raises(AssertionError, match=r"left behind: mine \(preparing\)"):
                await assert_nothing_left(executor, within=0.05)
            running = await executor.start(await executor.prepare_job(JOB, attempt_id="never-waited"))
            with pytest.raises(AssertionError, match="never-waited has not ended"):
                await assert_ended_once(executor, "never-waited")
            await running.wait()

    within(body())


# ---- the runtime


@pytest.mark.parametrize("verb", ["create", "start", "kill", "remove", "state", "exec"])
def test_a_verb_that_fails(verb: str) -> None:
    """As often as it was told; a failed create or start leaves nothing, any other changes nothing."""

    async def body() -> None:
        runtime = FakeRuntime()
        made = FakeBox(runtime)
        runtime.fail(verb, LOST)
        calls: dict[str, Callable[[], object]] = {
            "create": made.create,
            "start": made.start,
            "state": lambda: runtime.state(made.ref),
            "exec": lambda: runtime.exec(made.ref, b'{"args": ["x"]}', deadline=10),
            "kill": made.kill,
            "remove": lambda: runtime.remove(made.ref),
        }
        for name, call in calls.items():
            if name == verb:
                with pytest.raises(ExecutorError, match="took it along"):
                    await call()  # type: ignore[misc]  # each is a coroutine
                if name in ("create", "start"):
                    assert runtime.left == ()
                    await made.create()
                    if name == "create":
                        continue
            await call()  # type: ignore[misc]  # as above
        assert runtime.left == ()
        assert runtime.script.calls.count((verb, made.ref.container_id)) >= 2

    within(body())


def test_a_container_that_dies(tmp_path: Path) -> None:
    """Whoever waits for it hears, and asks why; it is there, dead, until it is removed."""

    async def body() -> None:
        runtime = FakeRuntime()
        made = FakeBox(runtime)
        await made.create()
        await made.start()
        waiting = asyncio.ensure_future(runtime.wait(made.pidfd))
        await asyncio.sleep(0)
        with pytest.raises(ExecutorError, match="still runs"):
            await runtime.remove(made.ref)
        runtime.die(made.ref, LOST)
        await waiting
        assert await runtime.loss(made.ref) is LOST
        assert (await runtime.state(made.ref)).status is ContainerStatus.STOPPED
        with pytest.raises(ExecutorError, match="does not run"):
            await runtime.exec(made.ref, b'{"args": ["x"]}', deadline=10)
        await made.close()
        assert runtime.left == ()

    within(body())


def test_exec_by_its_arguments_and_its_deadline() -> None:
    """What a process exits with is the test's to say; one that takes too long is ended."""

    async def body() -> None:
        runtime = FakeRuntime(exits=lambda argv: len(argv))
        made = FakeBox(runtime)
        await made.create()
        await made.start()
        assert await runtime.exec(made.ref, b'{"args": ["a", "b"]}', deadline=10) == 2
        runtime.delay("exec", 3600.0)
        with pytest.raises(ExecutorError) as caught:
            await runtime.exec(made.ref, b'{"args": ["a"]}', deadline=0.01)
        assert caught.value.kind is ExecutorErrorKind.TIMEOUT
        await made.close()

    within(body())


def test_what_is_swept() -> None:
    """Containers of sandboxes that are dead, and those alone; a name can be taken once."""

    async def body() -> None:
        runtime = FakeRuntime()
        one, other = FakeBox(runtime), FakeBox(runtime)
        for made in (one, other):
            await made.create()
            await made.start()
        with pytest.raises(ExecutorError, match="already"):
            await one.create()
        report = await runtime.sweep(lambda sandbox: sandbox == one.sandbox.value)
        assert report.removed == (f"container {other.ref.container_id}",)
        assert report.kept == (f"container {one.ref.container_id}",)
        await runtime.wait(other.pidfd)
        assert runtime.left == (one.ref.container_id,)
        await one.close()

    within(body())


def test_a_bundle_that_it_can_not_honour() -> None:
    """Is refused at create, by the field's name."""

    async def body() -> None:
        runtime = FakeRuntime(refuses=("process.user.umask",))
        made = FakeBox(runtime)
        network = NetworkAttachment(NetworkMode.DENY)
        with pytest.raises(ExecutorError, match=r"process\.user\.umask"):
            await runtime.create(made.ref, Bundle(b"{}", "", ""), ROOTFS, network, Stdio())
        with pytest.raises(ExecutorError, match="no container"):
            runtime.effective_spec(made.ref)
        with pytest.raises(ExecutorError, match="no pid"):
            await runtime.wait(4242)

    within(body())
