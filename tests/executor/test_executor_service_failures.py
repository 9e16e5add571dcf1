"""Services that fail, are late, or die; jobs that are cancelled or whose executor is killed; nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from jobs import run, sh
from killed import undone

from forgeyard_executor import Executor, ExecutorError, ForgeyardError, InvalidRequest, Job, Limits, Outcome, Timeouts
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.result import EndCause, ExecutionResult, ServiceState
from forgeyard_model.services import Condition, ExecProbe, HealthCheck, LogProbe, OnExit, ServiceSpec, TcpProbe

pytestmark = pytest.mark.kernel

NEVER = HealthCheck(ExecProbe(("/bin/false",)), interval=0.05, retries=3)


def service(image: str, script: str, name: str = "db", **more: Any) -> ServiceSpec:
    """A service that runs `script`."""
    return ServiceSpec(name, image=image, entrypoint=(), command=("/bin/sh", "-c", script), **more)


def job_with(image: str, *services: ServiceSpec, **more: Any) -> Job:
    """A job that says so when it runs."""
    more.setdefault("steps", (sh("echo ran"),))
    return Job(image=image, services=services, **more)


def refused(result: ExecutionResult, *words: str) -> None:
    """`result` is a service's failure before any step ran, and its message has `words`."""
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 125), result.message
    assert result.end_cause is EndCause.SERVICE_FAILED
    assert all(step.skipped for step in result.steps)
    for word in words:
        assert word in result.message


def test_a_service_that_exits_ends_the_wait_at_once(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """C03: no retry is waited for; the message has the name, the exit and the last of its log."""
    health = HealthCheck(ExecProbe(("/bin/false",)), interval=5, retries=100)
    failing = service(busybox_image, "echo boom >&2; exit 3", health=health)
    result, out, _ = run(state_dir, job_with(busybox_image, failing))  # all retries are more than a test may take
    refused(result, "service db", "exit 3", "boom")
    assert out == b""
    assert result.services[0].state is ServiceState.FAILED
    assert result.services[0].exit is not None
    assert result.services[0].exit.code == 3


def test_an_unhealthy_service_ends_when_its_retries_are_spent(
    state_dir: Path, busybox_image: str, leaks: object
) -> None:
    """C03: the second variant, with the last probe's output."""
    health = HealthCheck(ExecProbe(("/bin/sh", "-c", "echo not-yet; exit 1")), interval=0.05, retries=3)
    result, _, _ = run(state_dir, job_with(busybox_image, service(busybox_image, "sleep 600", health=health)))
    refused(result, "service db", "3 times in a row", "not-yet")
    assert result.services[0].last_probe == "exit 1: not-yet"


def test_a_probe_that_hangs_is_killed_with_its_children(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """C05: each probe ends at its own timeout and counts once; none is left beside the service."""
    probe = ExecProbe(("/bin/sh", "-c", "sleep 60 & sleep 60"))
    health = HealthCheck(probe, interval=0.1, timeout=0.3, retries=2)
    watch = "while :; do c=$(ps | grep -c '[s]leep 60'); [ $c -gt 2 ] && echo overlap; sleep 0.05; done"
    result, _, _ = run(state_dir, job_with(busybox_image, service(busybox_image, watch, health=health)))
    refused(result, "killed after 300ms")
    assert result.services[0].log_tail == ()


def test_a_program_that_is_not_there(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """It says which program, as a shell would."""
    absent = ServiceSpec("db", image=busybox_image, entrypoint=("/no/such",), health=NEVER)
    result, _, _ = run(state_dir, job_with(busybox_image, absent))
    refused(result, "service db", "/no/such: not found")


def test_a_service_out_of_memory(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """Its own limit, its own evidence; the job's memory is untouched."""
    hungry = service(
        busybox_image,
        "x=$(head -c 100m /dev/zero | tr '\\0' x); echo got it",
        limits=Limits(memory="16MiB"),
        health=HealthCheck(LogProbe("got it")),
    )
    result, _, _ = run(state_dir, job_with(busybox_image, hungry))
    refused(result, "service db", "out of memory")
    assert result.services[0].oom
    assert result.services[0].evidence.memory.oom_kills
    assert result.evidence.memory.oom_kills == 0


def test_a_service_that_is_late(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """services_timeout names itself and the service that is late, not the one that waits for it."""
    late = service(busybox_image, "sleep 600", "late", health=HealthCheck(TcpProbe(80), interval=10))
    waiting = service(busybox_image, "sleep 600", "waiting", depends_on={"late": Condition.HEALTHY})
    job = job_with(busybox_image, waiting, late, timeouts=Timeouts(services=0.5))
    result, _, _ = run(state_dir, job)
    refused(result, "service late", "500ms", "services_timeout")


def test_a_oneshot_that_fails(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """Any exit but 0 fails the start."""
    result, _, _ = run(state_dir, job_with(busybox_image, service(busybox_image, "exit 4", oneshot=True)))
    refused(result, "service db", "exit 4")


def test_a_death_during_the_job_is_the_cause(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """The running step is cancelled, and the result names the service and its exit."""
    dying = service(busybox_image, "echo up; nc -l -p 81 -e true; echo bye; exit 7", health=HealthCheck(LogProbe("up")))
    steps = (sh("until echo | nc -w 1 db 81; do :; done; sleep 600"), sh("echo second"))
    result, out, _ = run(state_dir, job_with(busybox_image, dying, steps=steps, timeouts=Timeouts(grace=0.2)))
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 125), result.message
    assert (result.end_cause, result.services[0].state) == (EndCause.SERVICE_FAILED, ServiceState.DIED)
    assert "service db" in result.message
    assert "exit 7" in result.message
    assert b"second" not in out


def test_a_death_that_is_ignored_is_noted(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """on_exit: ignore."""
    dying = service(
        busybox_image,
        "echo up; nc -l -p 81 -e true; exit 7",
        health=HealthCheck(LogProbe("up")),
        on_exit=OnExit.IGNORE,
    )
    steps = (sh("until echo | nc -w 1 db 81; do :; done; while nc -w 1 db 81 </dev/null; do :; done; echo on"),)
    result, out, _ = run(state_dir, job_with(busybox_image, dying, steps=steps))
    assert (result.outcome, out[-3:]) == (Outcome.SUCCEEDED, b"on\n"), result.message
    assert any("service db" in note and "exit 7" in note for note in result.notes)


def test_a_cancel_while_services_start(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """No step runs, and nothing is left."""

    async def main() -> ExecutionResult:
        waiting = service(busybox_image, "echo up; sleep 600", health=HealthCheck(TcpProbe(80)))
        async with Executor.open(state_dir) as executor, executor.run(job_with(busybox_image, waiting)) as execution:
            async for chunk in execution.service_output("db"):
                assert chunk.data == b"up\n"
                await execution.cancel()
            return await execution.wait()

    result = asyncio.run(main())
    assert (result.outcome, result.exit_code) == (Outcome.CANCELLED, 143)
    assert all(step.skipped for step in result.steps)
    assert result.services[0].state is ServiceState.STOPPED


@pytest.mark.parametrize("ready", [True, False])
def test_the_callers_deadline_holds_for_services_too(
    state_dir: Path, busybox_image: str, leaks: object, ready: bool
) -> None:
    """Whether it passes while services start or while a step runs: timed out, and nothing is left."""

    async def main() -> ExecutionResult:
        health = HealthCheck(LogProbe("up") if ready else TcpProbe(80))
        beside = service(busybox_image, "echo up; setsid sleep 600 & sleep 600", health=health)
        job = job_with(busybox_image, beside, steps=(sh("sleep 600"),), timeouts=Timeouts(grace=0.1))
        async with Executor.open(state_dir) as executor:
            # Its step has to have begun by then, also on a slow machine.
            prepared = datetime.now(UTC) + timedelta(seconds=8 if ready else 3)
            async with executor.run(job, deadline=prepared) as execution:
                return await execution.wait()

    result = asyncio.run(main())
    assert (result.outcome, result.exit_code) == (Outcome.TIMED_OUT, 124)
    assert "deadline" in result.message
    assert all(step.skipped for step in result.steps) is not ready


def test_a_service_whose_image_is_missing(state_dir: Path, busybox_image: str, leaks: object, tmp_path: Path) -> None:
    """The job is refused before anything runs, and its own image is let go."""
    absent = ServiceSpec("db", image=f"oci:{tmp_path}/none@sha256:{'a' * 64}")
    with pytest.raises(ForgeyardError):
        run(state_dir, job_with(busybox_image, absent))
    assert os.listdir(state_dir / "sandboxes") == []


@pytest.mark.parametrize(
    ("change", "field"), [({"user": "nobody-knows"}, "services.db.user"), ({"workdir": "a/b"}, "services.db.workdir")]
)
def test_what_a_service_can_not_have_is_refused_by_its_name(
    state_dir: Path, busybox_image: str, leaks: object, change: dict[str, str], field: str
) -> None:
    """A user that its image does not know, a working directory that is none."""
    with pytest.raises(InvalidRequest) as refused:
        run(state_dir, job_with(busybox_image, service(busybox_image, "true", **change)))
    assert refused.value.field == field


def test_a_network_that_dies_is_an_infrastructure_failure(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """A resolver can't be made to die from outside: its failure is reported by hand. It is not the job's."""

    async def main() -> ExecutionResult:
        beside = service(busybox_image, "echo up; sleep 600", health=HealthCheck(LogProbe("up")))
        job = job_with(busybox_image, beside, steps=(sh("echo on; sleep 600"),), timeouts=Timeouts(grace=0.1))
        async with Executor.open(state_dir) as executor, executor.run(job) as execution:
            async for _ in execution.output():
                error = SandboxError(SandboxErrorKind.NETWORK_SETUP_FAILED, "resolver", "the resolver died")
                network = execution._attempt.network
                assert network is not None
                if not network.failed.done():
                    network.failed.set_exception(error)
            return await execution.wait()

    result = asyncio.run(main())
    assert (result.outcome, result.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, 125)
    assert "the resolver died" in result.message


def test_an_executor_that_closes_takes_services_along(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """Prepared or running: nothing outlives the executor."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            beside = service(busybox_image, "sleep 600")
            manager = executor.run(job_with(busybox_image, beside, steps=()))
            execution = await manager.__aenter__()
            assert (await execution.exec(sh("true"))).exit is not None

    asyncio.run(main())
    assert os.listdir(state_dir / "ledger") == []


CHILD = """
import asyncio, os, signal, sys
from forgeyard_executor import Executor, Job, Step
from forgeyard_model.services import HealthCheck, LogProbe, ServiceSpec

state, image, when = sys.argv[1:]
script = ("/bin/sh", "-c", "echo up; setsid sleep 600 & sleep 600")
up = HealthCheck(LogProbe("up"))
services = tuple(ServiceSpec(f"s{n}", image=image, entrypoint=(), command=script, health=up) for n in range(2))
job = Job(image=image, steps=[Step("/bin/sh", "-c", "echo on; sleep 600")], services=services)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if when != "running":
    import importlib
    module, owner, name = when.split(":")
    setattr(getattr(importlib.import_module(module), owner), name, die)

async def main():
    async with Executor.open(state) as executor:
        async with executor.run(job) as execution:
            async for _ in execution.output():
                if when == "running":
                    die()
                await execution.cancel(kill=True)
            await execution.wait()

asyncio.run(main())
"""

POINTS = [
    "running",
    "forgeyard_executor.member:Member:launch",
    "forgeyard_runtimes.container:JobContainer:_verify",
    "forgeyard_executor.service_members:ServiceContainer:start_main",
    "forgeyard_executor.member:Member:_unwind",
    "forgeyard_host.host:Host:unmount",
]


@pytest.mark.parametrize("point", POINTS)
def test_an_executor_killed_with_services_is_cleaned_up_after(
    state_dir: Path, busybox_image: str, leaks: object, point: str
) -> None:
    """kill -9 anywhere: the next executor finds every container by ledger, the job's and its services'."""
    with undone(state_dir):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(state_dir), busybox_image, point],
            check=False,
            capture_output=True,
            timeout=50,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()

        async def recover() -> tuple[tuple[str, ...], int]:
            async with Executor.open(state_dir) as executor:
                return executor.recovered.errors, len(executor.recovered.removed)

        assert asyncio.run(recover()) == ((), 1)
    for name in ("sandboxes", "ledger", "spool", "executors"):
        assert os.listdir(state_dir / name) == []


def test_what_a_bundle_by_itself_can_not_have_is_refused(state_dir: Path, busybox_image: str, tmp_path: Path) -> None:
    """A generated bundle is one container: services are refused by name."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            await executor.generate_bundle(job_with(busybox_image, service(busybox_image, "true")), tmp_path / "b")

    with pytest.raises((ForgeyardError, ExecutorError), match="take services out"):
        asyncio.run(main())
