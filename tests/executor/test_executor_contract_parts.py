"""The same contract for output, preparation and services: of the executor, of one behind a socket, of a fake."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import pytest
from contract_bench import (
    HOLDS,
    SLEEPS,
    WELL,
    Bench,
    On,
    ended,
    first_output,
    job,
    named,
    opened,
)
from jobs import sh

from forgeyard_executor import Job, Outcome, Step
from forgeyard_executor.interface import JobExecutor
from forgeyard_executor.testing import FakeRun, FakeService
from forgeyard_executor.testing.assertions import assert_sound, output_of
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, InvalidRequest
from forgeyard_model.job import Output
from forgeyard_model.result import EndCause, ServiceState
from forgeyard_model.services import Condition, ExecProbe, HealthCheck, ServiceSpec
from forgeyard_runtimes.spool_format import START, SpoolMark

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


# ---- output


def test_output_from_where_a_reader_was(on: On) -> None:
    """Nothing is said twice, nothing left out; without following it ends at what is there."""

    async def body(executor: JobExecutor) -> None:
        async with executor.run(job(sh("printf onetwo; sleep 1000"))) as attempt:
            await first_output(attempt)
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
