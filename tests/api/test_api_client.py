"""An executor behind a socket is not to be told from one in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from served import JOB, socket_over, within

from forgeyard_api.client import RemoteExecutor
from forgeyard_executor import Job, Outcome, Step
from forgeyard_executor.interface import JobExecutor
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    ForgeyardError,
    InvalidRequest,
    SandboxError,
    SandboxErrorKind,
)
from forgeyard_model.result import CancellationReason
from forgeyard_model.services import ServiceSpec
from forgeyard_runtimes.spool_format import SpoolMark

IMAGE = "x@sha256:" + "0" * 64
Opened = Callable[[FakeExecutor], "asynccontextmanager[JobExecutor]"]


@pytest.fixture(params=["here", "behind a socket"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[FakeExecutor], object]:
    """An executor, in this process or behind a socket."""

    @asynccontextmanager
    async def here(executor: FakeExecutor) -> AsyncIterator[JobExecutor]:
        yield executor

    @asynccontextmanager
    async def behind(executor: FakeExecutor) -> AsyncIterator[JobExecutor]:
        async with socket_over(tmp_path, executor) as (target, _), RemoteExecutor.connect(target) as remote:
            yield remote

    return here if request.param == "here" else behind


def on(opened: Callable[[FakeExecutor], object], fake: FakeRun, body: Callable[[JobExecutor], Awaitable[None]]) -> None:
    """Await `body` with the executor, whose jobs all go as `fake` says."""

    async def main() -> None:
        async with opened(FakeExecutor(lambda _: fake)) as executor:  # type: ignore[attr-defined]  # a context manager
            await body(executor)

    within(main())


def test_a_job_from_first_to_last(opened: Callable[[FakeExecutor], object]) -> None:
    """Output of both streams, result, exit, steps."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(JOB, attempt_id="mine", labels={"a": "b"}, tenant="t") as execution:
            streams = {"stdout": b"", "stderr": b""}
            async for chunk in execution.output():
                streams[chunk.stream] += chunk.data
            result = await execution.wait()
            assert await execution.wait() == result
        assert streams == {"stdout": b"x" * 200_000, "stderr": b"err"}
        assert (result.outcome, result.exit_code, result.attempt_id) == (Outcome.FAILED, 4, "mine")
        assert [step.name for step in result.steps] == ["true"]
        assert result.sandbox_id == execution.sandbox_id
        assert await executor.sandboxes() == ()

    on(opened, FakeRun(output=b"x" * 200_000, error_output=b"err", exit_code=4), body)


def test_prepared_started_discarded(opened: Callable[[FakeExecutor], object]) -> None:
    """In single steps; one that was discarded can't be started any more."""

    async def body(executor: JobExecutor) -> None:
        prepared = await executor.prepare_job(JOB)
        assert prepared.sandbox_id.value
        assert prepared.bundle_digest.startswith("sha256:")
        await executor.discard(prepared)
        await executor.discard(prepared)
        with pytest.raises(ExecutorError) as caught:
            await executor.start(prepared)
        assert caught.value.kind is ExecutorErrorKind.LOST
        other = await executor.prepare_job(JOB)
        running = await executor.start(other)
        assert (await running.wait()).outcome is Outcome.SUCCEEDED
        await executor.close_execution(running)
        await executor.close_execution(running)

    on(opened, FakeRun(), body)


ERRORS: list[ForgeyardError] = [
    InvalidRequest("resources.memory", "1", "ask for more"),
    ExecutorError.prepare(SandboxError(SandboxErrorKind.UNSUPPORTED_ISOLATION, "no_x", "no x", resolution="cure")),
    ExecutorError(ExecutorErrorKind.SPAWN_FAILED, "shim_silent", "brief", details="details"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__ + getattr(error, "reason", ""))
@pytest.mark.parametrize("when", ["refused", "broken"])
def test_errors_are_the_same(opened: Callable[[FakeExecutor], object], error: ForgeyardError, when: str) -> None:
    """By type, kind, reason and words; nothing is left of the attempt."""

    async def body(executor: JobExecutor) -> None:
        with pytest.raises(type(error)) as caught:
            async with executor.run(JOB):
                pass
        assert str(caught.value) == str(error)
        for name in ("kind", "reason", "failure_class"):
            assert getattr(caught.value, name, None) == getattr(error, name, None)
        assert await executor.sandboxes() == ()

    on(opened, FakeRun(**{when: error}), body)  # type: ignore[arg-type]  # one of two fields


def test_cancelled(opened: Callable[[FakeExecutor], object]) -> None:
    """With the reason; leaving the block does it too."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(JOB) as execution:
            (seen,) = await executor.sandboxes()
            assert seen.sandbox_id == execution.sandbox_id
            await execution.cancel(CancellationReason.SUPERSEDED)
            result = await execution.wait()
        assert (result.outcome, result.cancellation) == (Outcome.CANCELLED, CancellationReason.SUPERSEDED)
        async with executor.run(JOB):
            pass
        assert await executor.sandboxes() == ()

    on(opened, FakeRun(holds=True), body)


def test_output_from_where_a_reader_was(opened: Callable[[FakeExecutor], object]) -> None:
    """Of the job and of a service; a service that is not there is refused."""
    job = replace(JOB, services=(ServiceSpec(name="db", image=IMAGE),))

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job) as execution:
            later = execution.output(after=SpoolMark(3, 0), follow=False)
            assert b"".join([chunk.data async for chunk in later]) == b"two"
            said = execution.service_output("db", follow=False)
            assert b"".join([chunk.data async for chunk in said]) == b"ready"
            with pytest.raises(InvalidRequest, match="service 'no'"):
                async for _ in execution.service_output("no"):
                    pass

    on(opened, FakeRun(output=b"onetwo", service_output={"db": b"ready"}, holds=True), body)


def test_steps_one_by_one(opened: Callable[[FakeExecutor], object]) -> None:
    """Each with its result, until there are no more."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(Job(rootfs="host", steps=())) as execution:
            results = [await execution.exec(Step(name)) for name in ("one", "two")]
            execution.finish()
            whole = await execution.wait()
        assert [result.name for result in results] == [step.name for step in whole.steps] == ["one", "two"]

    on(opened, FakeRun(), body)


def test_capabilities_and_their_changes(opened: Callable[[FakeExecutor], object]) -> None:
    """What is there is told at once, and again when it has changed."""

    async def main() -> None:
        fake = FakeExecutor()
        async with opened(fake) as executor:  # type: ignore[attr-defined]  # a context manager
            known = await executor.capabilities()
            async with aclosing(executor.watch_capabilities()) as changes:
                assert (await anext(changes)).seccomp is False
                await fake.become_capable_of(replace(known, seccomp=True, probed_at=None))
                assert (await anext(changes)).seccomp is True

    within(main())


def test_containers_can_be_looked_at(opened: Callable[[FakeExecutor], object]) -> None:
    """The job's first, then its services'."""
    job = replace(JOB, services=(ServiceSpec(name="db", image=IMAGE),))

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job) as execution:
            containers = await executor.inspect_attempt(execution.sandbox_id)
        assert [(item.name, item.state) for item in containers] == [("job", "running"), ("db", "running")]
        assert containers[0].bundle.config == b"{}"
        with pytest.raises(ExecutorError) as caught:
            await executor.inspect_attempt("01aaaaaaaaaaaaaaaaaaaaaaaa")
        assert caught.value.reason == "no_such_attempt"

    on(opened, FakeRun(holds=True), body)


def test_a_server_that_is_not_there() -> None:
    """One line that names it, with the cure; at once when nobody wants to wait."""

    async def body() -> None:
        async with RemoteExecutor.connect("unix:/nowhere/x.sock", reconnect=0.0) as remote:
            with pytest.raises(ExecutorError, match=r"unix:/nowhere/x\.sock.*forgeyard serve") as caught:
                await remote.capabilities()
            assert "\n" not in str(caught.value)

    within(body())


def test_a_connection_that_is_closed_under_a_call(tmp_path: Path) -> None:
    """Whoever waits is told so: nobody cancelled the waiter."""

    async def body() -> None:
        fake = FakeExecutor(lambda _: FakeRun(holds=True))
        async with socket_over(tmp_path, fake) as (target, _):
            async with RemoteExecutor.connect(target, reconnect=0.0) as remote:
                running = await remote.start(await remote.prepare_job(JOB))
                waiting = asyncio.ensure_future(running.wait())
                reading = asyncio.ensure_future(anext(running.output()))
                await asyncio.sleep(0.1)  # both are at the server by then; an earlier close is an error as well
            for task in (waiting, reading):
                with pytest.raises(ExecutorError) as caught:
                    await task
                assert caught.value.reason == "server_unavailable"

    within(body())


def test_a_server_that_comes_back(tmp_path: Path) -> None:
    """A client that waits for it goes on where it was: each call is safe to repeat."""

    async def body() -> None:
        fake = FakeExecutor(lambda _: FakeRun(output=b"0123456789", seconds=0.0))
        async with socket_over(tmp_path, fake) as (target, _):
            pass
        async with RemoteExecutor.connect(target, reconnect=50.0) as remote:
            asking = asyncio.ensure_future(remote.prepare_job(JOB, attempt_id="a"))
            await asyncio.sleep(0)
            async with socket_over(tmp_path, fake):
                prepared = await asking
                assert prepared.context.attempt_id == "a"

    within(body())
