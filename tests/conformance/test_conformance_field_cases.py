"""Faults that users of other runners met, on every adapter: ends from outside, memory kills, entry points."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_jobs import Jobs, jobs_on
from adapters import DAEMON_FIXTURES, Adapter, adapter_of, on, parameter
from contract_box import open_box
from jobs import sh
from small_images import image as make_image
from waiting_jobs import waiting

from forgeyard_executor import Executor, InvalidRequest, Job, Limits, Outcome, Step
from forgeyard_host.processes import parent_of
from forgeyard_model.errors import ExecutorError
from forgeyard_model.result import EndCause
from forgeyard_runtimes.cells import Behaviour
from forgeyard_runtimes.contract import ContainerRuntime, ContainerStatus

pytestmark = pytest.mark.kernel

WIRED = ("runc", "crun", "containerd", "podman", "docker")
"""Runtimes that the executor can be opened with."""


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, shared_state: Path) -> Iterator[Jobs]:
    """Jobs on the runtime of this test's parameter."""
    with jobs_on(request, shared_state) as made:
        yield made


adapter = pytest.fixture(scope="module")(adapter_of)


def jobs_of(*names: str) -> pytest.MarkDecorator:
    """Whole jobs on those of `names` that work on this host."""
    marker = on(Behaviour.STEPS, Behaviour.LIMITS, names=names)
    return pytest.mark.parametrize("jobs", marker.args[1], indirect=True)


# --- ends from outside ---------------------------------------------------------------------------------------------


@jobs_of(*WIRED)
def test_a_killed_pid_1_is_no_failure_of_the_job(jobs: Jobs) -> None:
    """SIGKILL from outside, with no limit met: the result says that nobody knows how the job would have ended."""

    async def body(executor: Executor) -> None:
        async with waiting(executor, jobs.state) as job:
            os.kill(job.pid, signal.SIGKILL)
            result = await job.execution.wait()
        assert (result.outcome, result.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, 125), result.message
        assert result.exit is None

    jobs.drive(body)


@jobs_of(*WIRED)
def test_a_job_can_not_end_its_own_sandbox(jobs: Jobs) -> None:
    """Whatever it does to PID 1, the failure stays its own: signals, and the limit at which the kernel kills."""
    tries = "kill -KILL 1; kill -SEGV 1; kill -XCPU 1"
    result, _, err = jobs.run(Job(rootfs="host", steps=(sh(f"{tries}; prlimit --pid 1 --cpu=0:0; exit 9"),)))
    assert (result.outcome, result.exit_code, result.end_cause) == (Outcome.FAILED, 9, EndCause.EXITED), result.message
    assert b"prlimit: failed" in err


@pytest.mark.parametrize("jobs", list(map(parameter, DAEMON_FIXTURES)), indirect=True)
def test_the_helper_of_a_container_is_killed(jobs: Jobs) -> None:
    """The shim's death takes the job along, as lost (C31b). Podman's monitor holds nothing that a job needs."""

    async def body(executor: Executor) -> None:
        async with waiting(executor, jobs.state) as job:
            os.kill(parent_of(job.pid), signal.SIGKILL)
            if jobs.name == "podman":
                assert await job.end() == b"started\nended well\n"
            result = await job.execution.wait()
        if jobs.name == "podman":
            assert (result.outcome, result.exit_code) == (Outcome.FAILED, 5), result.message
        else:
            assert result.outcome is Outcome.INFRASTRUCTURE_FAILURE, result.message
            assert result.exit is None
        assert not [note for note in result.notes if note.startswith("cleanup: ")]

    jobs.drive(body)


@on(Behaviour.EXEC)
def test_pid_1_dies_beside_another_process(adapter: Adapter) -> None:
    """What was run beside it ends with it and has no exit code of its own; the neighbour lives, all can go (C21)."""

    async def body(runtime: ContainerRuntime) -> None:
        async with open_box(runtime) as victim, open_box(runtime) as neighbour:
            beside = asyncio.ensure_future(runtime.exec(victim.ref, victim.process("/bin/sleep", "600"), deadline=60))
            leaf = victim.own_group.removeprefix(f"{victim.group.path}/")
            while len(victim.group.processes(leaf)) < 2:
                await asyncio.sleep(0.01)
            os.kill(victim.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                await runtime.wait(victim.pidfd)
                ended = (await asyncio.gather(beside, return_exceptions=True))[0]
            # Killed, as some runtimes saw; or a typed error, where nobody saw it.
            assert ended == 128 + signal.SIGKILL or isinstance(ended, ExecutorError), ended
            assert victim.group.empty()
            await runtime.remove(victim.ref)
            # Of a command line's container there is a directory left, which goes with its attempt.
            gone = (ContainerStatus.ABSENT, ContainerStatus.STOPPED) if runtime.literal else (ContainerStatus.ABSENT,)
            assert (await runtime.state(victim.ref)).status in gone
            assert await neighbour.says("echo here") == "here"

    adapter.run(body)


# --- memory kills --------------------------------------------------------------------------------------------------


@jobs_of(*WIRED)
def test_every_memory_kill_is_counted(jobs: Jobs) -> None:
    """Several in a row, each read before its group is gone (C28)."""
    job = Job(rootfs="host", steps=(sh("exec tail /dev/zero"),), limits=Limits(memory=32 << 20))
    for _ in range(4):
        result, _, _ = jobs.run(job)
        assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result.message
        assert result.evidence.memory.oom_kills


@jobs_of("runc", "crun", "containerd", "podman")
def test_pid_1_falls_to_the_jobs_memory_limit(jobs: Jobs, busybox_image: str) -> None:
    """Root of a sandbox can make PID 1 the kernel's first choice: that is the job's doing, and counted (C28)."""
    first = "echo 1000 > /proc/1/oom_score_adj; echo 0 > /proc/self/oom_score_adj; echo 0 > /proc/$$/oom_score_adj"
    script = f"{first}; for i in 1 2 3 4; do tail /dev/zero & done; wait"
    result, _, _ = jobs.run(
        Job(image=busybox_image, user="0", steps=(sh(script), sh("exit 3")), limits=Limits(memory=32 << 20))
    )
    assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result.message
    assert result.end_cause is EndCause.SANDBOX_DIED


# --- entry points --------------------------------------------------------------------------------------------------


@jobs_of(*WIRED)
def test_entry_points(jobs: Jobs, tmp_path: Path) -> None:
    """As documented: arguments replace CMD, another entry point drops it, a script is never given to it (C45)."""
    shell = ["/bin/sh", "-c", 'echo "$0 $@"', "ep"]
    reference = make_image(tmp_path / "both", {"Entrypoint": shell, "Cmd": ["c"], "User": "1000"})
    for entrypoint, argv, said in (
        (None, (), b"ep c\n"),
        (None, ("a", "b"), b"ep a b\n"),
        (("/bin/echo", "x"), (), b"x\n"),
        (("/bin/echo", "x"), ("a",), b"x a\n"),
        ((), ("/bin/echo", "a"), b"a\n"),
        (("",), ("/bin/echo", "a"), b"a\n"),
    ):
        job = Job(image=reference, entrypoint=entrypoint, steps=(Step(*argv, entrypoint=True), Step.shell("echo s")))
        result, out, err = jobs.run(job)
        assert (result.outcome, out) == (Outcome.SUCCEEDED, said + b"s\n"), (entrypoint, argv, result.message, err)
    with pytest.raises(InvalidRequest, match="nothing to run"):
        jobs.run(Job(image=reference, entrypoint=(), steps=(Step(entrypoint=True),)))
