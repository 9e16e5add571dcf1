"""Services, jobs and executors that are killed in the middle of it: what the result says, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from egress_host import EgressHost, namespaces, service
from jobs import collect, sh
from killed import undone

from forgeyard_executor import Execution, ExecutionResult, Executor, Job, Network, Outcome, Timeouts
from forgeyard_host.netns import in_namespace
from forgeyard_model.result import EndCause, ServiceState
from forgeyard_model.services import Condition, HealthCheck, OnExit, TcpProbe

pytestmark = pytest.mark.kernel


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EgressHost]:
    """A host with an outside; its links and routes are as they were when the test ends."""
    with closing(EgressHost(tmp_path)) as made:
        yield made
        made.wait_clean()
        assert leased(made) == 0


def leased(host: EgressHost) -> int:
    """Blocks of addresses that somebody holds: locked files."""
    held = (host.directory / "run" / "subnets").glob("*")
    return sum(subprocess.run(["flock", "-n", path, "true"], check=False).returncode != 0 for path in held)


def remains(state: Path) -> list[str]:
    """What attempts left in a state directory; an executor's own empty directory for output stays until the next."""
    places = ("sandboxes/*", "ledger/*", "executors/*", "spool/*/*")
    return [str(path) for pattern in places for path in state.glob(pattern)]


def held_by(pid: int) -> set[str]:
    """The network namespaces that a process holds open."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it is at work
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    own = os.readlink(f"/proc/{pid}/ns/net")
    return {text for text in found if text.startswith("net:[")} - {own}


def program_of(pid: int) -> int:
    """The innermost process of a container: what it was made for. The others are ours."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


async def killed(host: EgressHost, state: Path, job: Job, victim: str) -> tuple[ExecutionResult, bytes]:
    """Run `job` until its step says something, kill one process, and wait for the end."""
    async with Executor.open(state) as executor, executor.run(job) as execution:
        reading = asyncio.ensure_future(collect(execution))
        async for _ in execution.output():
            kill(executor, execution, victim)
            break
        result = await execution.wait()
        out, _ = await reading
    assert remains(state) == []
    return result, out


def kill(executor: Executor, execution: Execution, victim: str) -> None:
    """SIGKILL from outside: to a service's program, to its PID 1, or to the job's."""
    (info,) = [one for one in executor.list_sandboxes() if one.sandbox_id == execution.sandbox_id]
    pid = info.pid if victim == "job" else info.services[0].pid
    assert pid is not None
    os.kill(program_of(pid) if victim == "program" else pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["program", "container"])
@pytest.mark.parametrize("network", [Network.deny(), Network.allow()], ids=["deny", "allow"])
def test_a_service_killed_in_the_middle_ends_its_job(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str, network: Network, victim: str
) -> None:
    """on_exit: fail. The result names the service and the signal; other services and the job are ended with it.

    A program that dies is the job's affair; that a whole container is ended from outside is nobody's of the job.
    """
    services = (service(busybox_image), service(busybox_image, "other"))
    job = Job(
        image=busybox_image,
        steps=(sh("echo on; sleep 600"), sh("echo second")),
        services=services,
        network=network,
        timeouts=Timeouts(grace=0.1),
    )
    result, out = host.play(lambda: killed(host, state_dir, job, victim))
    assert result.exit_code == 125
    assert "service web" in result.message
    if victim == "program":
        assert (result.outcome, result.end_cause) == (Outcome.FAILED, EndCause.SERVICE_FAILED)
        assert "SIGKILL" in result.message
    else:
        assert (result.outcome, result.end_cause) == (Outcome.INFRASTRUCTURE_FAILURE, EndCause.INFRASTRUCTURE)
    assert [item.state for item in result.services] == [ServiceState.DIED, ServiceState.READY]
    assert out == b"on\n"


@pytest.mark.parametrize("victim", ["program", "container"])
def test_a_service_killed_in_the_middle_may_be_ignored(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str, victim: str
) -> None:
    """on_exit: ignore. The job goes on without it, connections are refused, and the result notes it."""

    async def main() -> tuple[ExecutionResult, list[bool]]:
        job = Job(image=busybox_image, steps=(), services=(service(busybox_image, on_exit=OnExit.IGNORE),))
        fetch = sh("wget -q -O - http://web/")
        async with Executor.open(state_dir) as executor, executor.run(job) as execution:
            exits = [(await execution.exec(fetch)).exit]
            kill(executor, execution, victim)
            await asyncio.shield(execution._attempt.services[0].ended)
            exits.append((await execution.exec(fetch)).exit)
            execution.finish()
            return await execution.wait(), [bool(end and end.ok) for end in exits]

    result, fetched = host.play(main)
    assert (result.outcome, fetched) == (Outcome.FAILED, [True, False]), result.message
    assert result.end_cause is EndCause.EXITED
    assert result.services[0].state is ServiceState.DIED
    assert any("service web" in note for note in result.notes)


def test_a_job_killed_in_the_middle_takes_its_services_along(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str
) -> None:
    """PID 1 of the job's container dies: an infrastructure failure, and no service outlives it."""
    job = Job(image=busybox_image, steps=(sh("echo on; sleep 600"),), services=(service(busybox_image),))
    result, _ = host.play(lambda: killed(host, state_dir, job, "job"))
    assert result.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert result.end_cause is EndCause.SANDBOX_DIED
    assert result.services[0].state is ServiceState.READY


def test_cancel_and_time_out_while_services_start_leave_nothing(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str
) -> None:
    """With a way out and several services of which one is ready, one starts, and one waits."""
    never = HealthCheck(TcpProbe(81), interval=0.05, retries=10_000)

    def job(seconds: float) -> Job:
        services = (
            service(busybox_image),
            service(busybox_image, "late", "echo up; sleep 600", health=never),
            service(busybox_image, "waits", depends_on={"late": Condition.HEALTHY}),
        )
        return Job(
            image=busybox_image,
            steps=(sh("echo ran"),),
            services=services,
            network=Network.allow(),
            timeouts=Timeouts(services=seconds, grace=0.1),
        )

    async def main() -> tuple[ExecutionResult, ExecutionResult]:
        async with Executor.open(state_dir) as executor:
            async with executor.run(job(60)) as execution:
                async for _ in execution.service_output("late"):
                    await execution.cancel()
                cancelled = await execution.wait()
            async with executor.run(job(0.5)) as execution:
                return cancelled, await execution.wait()

    cancelled, late = host.play(main)
    assert (cancelled.outcome, cancelled.exit_code) == (Outcome.CANCELLED, 143)
    assert (late.outcome, late.exit_code, late.end_cause) == (Outcome.FAILED, 125, EndCause.SERVICE_FAILED)
    assert "services_timeout" in late.message
    assert "service late" in late.message
    for result in (cancelled, late):
        assert all(step.skipped for step in result.steps)


CHILD = """
import asyncio, os, signal, sys
from egress_host import service
from forgeyard_executor import Executor, Job, Network, Step
from forgeyard_model.services import Condition, HealthCheck, OnExit, TcpProbe
from forgeyard_networks.settings import NetworkSettings

state, image, run, when = sys.argv[1:]
NetworkSettings.of = classmethod(lambda cls, config, state: cls(config, run_dir=run, cni_cache=f"{state}/cni/results"))
never = HealthCheck(TcpProbe(81), interval=0.05, retries=10_000)
script = "echo up; setsid sleep 600 & sleep 600"
services = [service(image, f"s{n}", script) for n in range(2)]
if when == "starting":
    services.append(service(image, "late", script, health=never))
job = Job(image=image, steps=[Step("/bin/sh", "-c", "setsid sleep 600 & echo on; sleep 600")],
          services=tuple(services), network=Network.allow())

async def main():
    async with Executor.open(state) as executor, executor.run(job) as execution:
        reader = execution.output() if when == "running" else execution.service_output("late")
        async for _ in reader:
            print(os.getpid(), flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["starting", "running"])
def test_an_executor_killed_in_the_middle_leaves_nothing_to_the_next(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str, when: str
) -> None:
    """kill -9: its networks go by themselves, and the next executor ends all processes and removes all else."""
    rules = host.rules()
    words = [sys.executable, "-c", CHILD, str(state_dir), busybox_image, str(host.directory / "run"), when]
    support = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with undone(state_dir, host=host):
        child = in_namespace(
            host.namespace.fd, lambda: subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=support)
        )
        assert child.stdout is not None
        with child.stdout:
            try:
                said = child.stdout.readline()
                spaces, executors = held_by(child.pid), os.listdir(state_dir / "executors")
            finally:
                child.kill()
                ended = child.wait(20)
            assert (said.strip(), ended) == (str(child.pid), -signal.SIGKILL)
        assert len(spaces) >= 4  # of the router, the job and two services

        async def recover() -> tuple[tuple[str, ...], int]:
            async with Executor.open(state_dir) as executor:
                assert executor.list_sandboxes() == ()
                return executor.recovered.errors, len(executor.recovered.removed)

        assert host.play(recover) == ((), 1)
    assert remains(state_dir) == []
    host.wait_clean()
    assert leased(host) == 0
    assert not namespaces() & spaces
    assert [path for name in executors for path in Path("/sys/fs/cgroup").glob(f"*/forgeyard/{name}")] == []

    async def another() -> ExecutionResult:
        job = Job(
            image=busybox_image,
            steps=(sh("wget -q -O - http://web/"),),
            services=(service(busybox_image),),
            network=Network.allow(),
        )
        async with Executor.open(state_dir) as executor, executor.run(job) as execution:
            return await execution.wait()

    assert host.play(another).outcome is Outcome.SUCCEEDED
    assert host.rules() == rules


def jobs_in(image: str, count: int) -> list[Job]:
    """Jobs that each fetch a word of their own from a service of the same name."""
    script = "mkdir -p /www; echo {} > /www/index.html; exec httpd -f -p 80 -h /www"
    ready = HealthCheck(TcpProbe(80), interval=0.05, retries=1000)
    return [
        Job(
            image=image,
            steps=(sh("wget -q -O - http://web/"),),
            services=(service(image, script=script.format(f"job{number}"), health=ready),),
        )
        for number in range(count)
    ]


async def word_of(executor: Executor, job: Job) -> str:
    """What a job's service said to it."""
    async with executor.run(job) as execution:
        out, err = await collect(execution)
        result = await execution.wait()
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    return out.decode().strip()


def test_twelve_jobs_at_once_each_have_their_own(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str
) -> None:
    """Each finds its own service; nothing is left of any."""

    async def main() -> list[str]:
        async with Executor.open(state_dir) as executor:
            return await asyncio.gather(*(word_of(executor, job) for job in jobs_in(busybox_image, 12)))

    assert host.play(main) == [f"job{number}" for number in range(12)]
    assert remains(state_dir) == []


def test_sixty_jobs_in_a_row_leave_nothing(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str
) -> None:
    """No descriptor for each of them, no lease, and nothing of any at the end."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            for number, job in enumerate(jobs_in(busybox_image, 60)):
                assert await word_of(executor, job) == f"job{number}"
                if number == 3:
                    early = len(os.listdir("/proc/self/fd"))
            # What an executor makes once, in the background, may come in between; one for each job may not.
            assert len(os.listdir("/proc/self/fd")) < early + 10
            assert leased(host) <= 1

    host.play(main)
    assert remains(state_dir) == []
