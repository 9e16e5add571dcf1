"""What ran and how it ended: exits, steps, conditions, background."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from jobs import collect, run, sh

from forgeyard_executor import (
    ExecutionResult,
    Executor,
    Job,
    Limits,
    Network,
    Outcome,
    Profile,
    Step,
)

pytestmark = pytest.mark.kernel


def test_hello(shared_state: Path, root: dict[str, str]) -> None:
    """One step, its bytes, its exit, and numbers in the result."""
    result, out, err = run(shared_state, Job(**root, steps=(sh("echo out; echo err >&2"),)))
    assert (result.outcome, result.exit_code) == (Outcome.SUCCEEDED, 0), result.message
    assert (out, err) == (b"out\n", b"err\n")
    assert result.provenance.user_namespace
    assert result.provenance.bundle_digest.startswith("sha256:")
    assert result.usage.cpu_time is not None
    assert result.evidence.memory.peak
    assert {"plan", "setup", "start", "gate"} <= set(result.startup)


@pytest.mark.parametrize(
    ("script", "code", "signum"),
    [
        ("exit 0", 0, None),
        ("exit 1", 1, None),
        ("exit 125", 125, None),
        ("exit 126", 126, None),
        ("exit 127", 127, None),
        ("exit 128", 128, None),
        ("exit 137", 137, None),
        ("exit 255", 255, None),
        ("kill -9 $$", 137, signal.SIGKILL),
        ("kill -TERM $$", 143, signal.SIGTERM),
        ("kill -SEGV $$", 139, signal.SIGSEGV),
        ("kill -SYS $$", 159, signal.SIGSYS),
    ],
)
def test_exit_matrix(shared_state: Path, root: dict[str, str], script: str, code: int, signum: int | None) -> None:
    """`exit 137` and a SIGKILL are two facts; neither is a memory kill (C23, C27)."""
    result, _, _ = run(shared_state, Job(**root, steps=(sh(script),)))
    assert result.exit_code == code
    assert result.exit is not None
    assert (result.exit.signal, result.exit.code) == ((signum, None) if signum else (None, code))
    assert result.outcome is (Outcome.SUCCEEDED if code == 0 else Outcome.FAILED)


@pytest.mark.parametrize(
    ("argv", "code"),
    [(("nosuch",), 127), (("/nosuch/x",), 127), (("/etc/passwd",), 126), (("/etc",), 126)],
)
def test_not_executable(shared_state: Path, root: dict[str, str], argv: tuple[str, ...], code: int) -> None:
    """Not found is 127, not executable 126, and the message names the program."""
    result, _, _ = run(shared_state, Job(**root, steps=(Step(*argv),)))
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, code)
    assert argv[0] in result.message


def test_steps_share_a_sandbox(shared_state: Path, root: dict[str, str]) -> None:
    """Files live on from step to step, environments and leftovers do not."""
    steps = (
        sh("echo kept > /work/build/f; export LEAK=1; sleep 300 & (trap '' TERM; sleep 301) &", env={"SECRET": "s"}),
        sh("cat /work/build/f; echo ${SECRET:-none} ${LEAK:-none}; ps 2>/dev/null | grep -c 'sleep 30' || true"),
    )
    result, out, _ = run(shared_state, Job(**root, steps=steps))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    lines = out.split()
    assert lines[:3] == [b"kept", b"none", b"none"]
    assert result.steps[0].leftovers >= 2


def test_step_conditions(shared_state: Path) -> None:
    """Masked failures go on, on_failure and always run after a failure, the first unmasked failure decides."""
    steps = (
        sh("exit 3", continue_on_error=True, name="masked"),
        sh("exit 4", name="fails"),
        sh("echo skipped", name="skipped"),
        sh("echo on_failure", when="on_failure", name="rescue"),
        sh("echo always", when="always", name="always"),
    )
    result, out, _ = run(shared_state, Job(rootfs="host", steps=steps))
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 4)
    assert out == b"on_failure\nalways\n"
    assert [step.skipped for step in result.steps] == [False, False, True, False, False]
    assert result.steps[0].masked


def test_script_step(shared_state: Path, root: dict[str, str]) -> None:
    """A script is a file, stops at the first failure, and stands in no argument list."""
    script = "cat /proc/1/cmdline | tr '\\0' ' '; echo; false\necho not reached\n"
    result, out, _ = run(shared_state, Job(**root, steps=(Step.shell(script),)))
    assert result.exit_code == 1
    assert b"not reached" not in out
    assert b"init" in out


def test_background_child_does_not_hold_the_job(shared_state: Path, root: dict[str, str]) -> None:
    """The verdict comes at the main process's exit, its children die (C20)."""
    result, out, _ = run(shared_state, Job(**root, steps=(sh("echo done; sleep 600 & setsid sleep 601 &"),)))
    assert out == b"done\n"
    assert result.outcome is Outcome.SUCCEEDED


def test_agent_runs_steps_one_by_one(shared_state: Path) -> None:
    """An attempt without steps waits for exec calls in one sandbox, and ends when told (section 223)."""

    async def main() -> ExecutionResult:
        async with Executor.open(shared_state) as executor, executor.run(Job(rootfs="host", steps=())) as execution:
            first = await execution.exec(sh("echo a > /work/build/f"))
            second = await execution.exec(Step.shell("cat /work/build/f; exit 5"))
            assert first.exit is not None
            assert first.exit.ok
            assert second.exit is not None
            assert second.exit.code == 5
            execution.finish()
            out, _ = await collect(execution)
            assert out == b"a\n"
            return await execution.wait()

    result = asyncio.run(main())
    assert result.exit_code == 5


def test_python_api_of_the_readme(shared_state: Path, tree: Path) -> None:
    """The target of the Python API works as it is written."""

    async def main() -> None:
        async with Executor.open(state_dir=str(shared_state)) as executor:
            job = Job(
                rootfs="host",
                steps=[Step("cat", "f"), Step.shell("tar cf /work/output/r.tar f")],
                limits=Limits(memory="512MiB", cpus=1, pids=128, wall_time="10m"),
                network=Network.deny(),
                profile=Profile.STANDARD_CI,
            )
            async with executor.run(job, source=str(tree)) as execution:
                async for chunk in execution.output():
                    assert chunk.stream == "stdout"
                    assert chunk.time
                    assert chunk.data == b"original\n"
                result = await execution.wait()
            assert result.outcome is Outcome.SUCCEEDED, result.message

    asyncio.run(main())


@pytest.mark.parametrize("steps", [(), (sh("sleep 600"),)])
def test_death_of_pid_1_is_never_the_jobs_failure(shared_state: Path, steps: tuple[Step, ...]) -> None:
    """Whoever kills it is outside, since nothing inside can: also between two steps."""

    async def main() -> ExecutionResult:
        job = Job(rootfs="host", steps=steps)
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            pid = executor.list_sandboxes()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            return await execution.wait()

    result = asyncio.run(main())
    assert (result.outcome, result.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, 125)
    assert "PID 1" in result.message


def test_background_step_lives_on_beside_the_next(shared_state: Path) -> None:
    """A background step is there for later steps, and gone with the job."""
    steps = (
        sh("while :; do echo alive > /work/build/beat; sleep 0.05; done", background=True, name="service"),
        sh("while ! test -e /work/build/beat; do sleep 0.05; done; rm /work/build/beat"),
        sh("while ! test -e /work/build/beat; do sleep 0.05; done; echo seen"),
    )
    result, out, _ = run(shared_state, Job(rootfs="host", steps=steps))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"seen\n")
