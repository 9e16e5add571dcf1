"""Real jobs in real sandboxes: exits, steps, output, limits, ends. Both modes where the mode can matter."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forgeyard_executor import (
    ApprovedHostPath,
    CancellationReason,
    Execution,
    ExecutionResult,
    Executor,
    InvalidRequest,
    Job,
    Limits,
    Network,
    Outcome,
    Output,
    Profile,
    SourceMode,
    Step,
    Timeouts,
)

pytestmark = pytest.mark.kernel


async def collect(execution: Execution) -> tuple[bytes, bytes]:
    """All output of an attempt, per stream."""
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    async for chunk in execution.output():
        streams[chunk.stream] += chunk.data
    return bytes(streams["stdout"]), bytes(streams["stderr"])


def run(state: Path, job: Job, **options: object) -> tuple[ExecutionResult, bytes, bytes]:
    """Run a job to its end."""

    async def main() -> tuple[ExecutionResult, bytes, bytes]:
        async with Executor.open(state) as executor, executor.run(job, **options) as execution:  # type: ignore[arg-type]
            out, err = await collect(execution)
            return await execution.wait(), out, err

    return asyncio.run(main())


def sh(script: str, **options: object) -> Step:
    """A step in exec form that gives `script` to sh."""
    return Step("/bin/sh", "-c", script, **options)  # type: ignore[arg-type]


@pytest.fixture(params=["host", "image"])
def root(request: pytest.FixtureRequest) -> dict[str, str]:
    """The two modes, as arguments of Job."""
    if request.param == "host":
        return {"rootfs": "host"}
    return {"image": request.getfixturevalue("busybox_image")}


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


def test_identity_and_filesystem(shared_state: Path) -> None:
    """The job is forgeyard (1000) with the contract's directories and variables; the root is read-only."""
    script = """
    id -u; id -un; echo $HOME $TZ $LANG $CI; pwd
    for d in /work/build /work/output /work/tmp /tmp $HOME; do echo x > $d/f || echo ro $d; done
    touch /etc/f 2>/dev/null && echo writable || echo read-only
    cat /etc/shadow 2>/dev/null && echo shadow
    ls /root /home 2>/dev/null
    hostname
    """
    result, out, _ = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    lines = out.decode().split("\n")
    assert lines[:4] == ["1000", "forgeyard", "/home/forgeyard UTC C.UTF-8 true", "/work/build"]
    assert "read-only" in lines
    assert "shadow" not in lines
    assert not any(line.startswith("ro ") for line in lines)
    assert result.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("mode", [SourceMode.RO, SourceMode.COW])
def test_source(shared_state: Path, root: dict[str, str], tree: Path, mode: SourceMode) -> None:
    """The source is the job's own by owner; ro refuses writes, cow takes them and forgets them."""
    script = "stat -c %u f; cat f; echo changed > f && cat f; pwd"
    job = Job(**root, steps=(sh(script),), source_mode=mode, user="1000" if "image" in root else None)
    _result, out, _ = run(shared_state, job, source=tree)
    assert out.startswith(b"1000\noriginal\n")
    assert (b"changed" in out) == (mode is SourceMode.COW)
    assert (tree / "f").read_text() == "original\n"


def test_source_rw_is_for_development(shared_state: Path, tree: Path) -> None:
    """rw writes through to the tree, owned by the tree's owner, in the development profile alone."""
    steps = (sh("echo changed > f; echo new > g"),)
    with pytest.raises(InvalidRequest, match="standard-ci"):
        run(shared_state, Job(rootfs="host", steps=steps, source_mode=SourceMode.RW), source=tree)
    job = Job(rootfs="host", steps=steps, source_mode=SourceMode.RW, profile=Profile.DEVELOPMENT)
    result, _, _ = run(shared_state, job, source=tree)
    assert result.outcome is Outcome.SUCCEEDED
    assert (tree / "g").stat().st_uid == tree.stat().st_uid
    assert "source written in place" in result.provenance.impure


def test_network_is_denied(shared_state: Path, root: dict[str, str]) -> None:
    """Loopback alone."""
    result, out, _ = run(shared_state, Job(**root, steps=(sh("cat /proc/net/dev | tail -n +3 | cut -d: -f1"),)))
    assert out.split() == [b"lo"]
    assert not result.provenance.impure or result.provenance.impure == ("host rootfs",)


def test_host_network_is_impure(shared_state: Path) -> None:
    """Development may share the host's network; the result says so."""
    job = Job(rootfs="host", steps=(sh("cat /proc/net/dev"),), network=Network.host(), profile=Profile.DEVELOPMENT)
    result, out, _ = run(shared_state, job)
    assert out.decode().count(":") == Path("/proc/net/dev").read_text().count(":")
    assert "host network" in result.provenance.impure


def test_outputs(shared_state: Path, root: dict[str, str], tmp_path: Path) -> None:
    """Declared outputs are collected after the end, also of a failed job; a missing required one fails it."""
    steps = (sh("echo data > /work/output/r.xml; mkdir /work/output/d; echo x > /work/output/d/x; exit 3"),)
    outputs = (Output("r.xml"), Output("d"), Output("none", optional=True))
    result, _, _ = run(shared_state, Job(**root, steps=steps, outputs=outputs), output=tmp_path / "o")
    assert result.exit_code == 3
    assert (tmp_path / "o/r.xml").read_text() == "data\n"
    assert (tmp_path / "o/d/x").read_text() == "x\n"
    missing = Job(**root, steps=(sh("true"),), outputs=(Output("r.xml"),))
    result, _, _ = run(shared_state, missing, output=tmp_path / "p")
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 1)
    assert "r.xml" in result.message


def test_output_symlink_to_host_is_not_followed(shared_state: Path, tmp_path: Path) -> None:
    """A job that plants a link gets no file of the host's into its outputs."""
    steps = (sh("ln -s /etc/shadow /work/output/r.xml"),)
    result, _, _ = run(shared_state, Job(rootfs="host", steps=steps), output=tmp_path / "o")
    assert not (tmp_path / "o/r.xml").is_symlink()
    assert not (tmp_path / "o/r.xml").exists()
    assert any("r.xml" in name for output in result.outputs for name in output.skipped)


def test_binary_output_is_exact(shared_state: Path) -> None:
    """Bytes that are no text, NULs and long lines come out as they went in (C35, C36)."""
    script = r"printf '\376\377\000'; head -c 3000000 /dev/zero; printf '\303' >&2; printf '\244' >&2"
    _, out, err = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert out == b"\xfe\xff\0" + bytes(3000000)
    assert err == "ä".encode()


def test_background_child_does_not_hold_the_job(shared_state: Path, root: dict[str, str]) -> None:
    """The verdict comes at the main process's exit, its children die (C20)."""
    began = time.monotonic()
    result, out, _ = run(shared_state, Job(**root, steps=(sh("echo done; sleep 600 & setsid sleep 601 &"),)))
    assert out == b"done\n"
    assert result.outcome is Outcome.SUCCEEDED
    assert time.monotonic() - began < 30


def test_order_and_merge(shared_state: Path) -> None:
    """Within a stream order is exact; merged output is one exact stream (C33)."""
    script = "awk 'BEGIN { for (i = 0; i < 1000; i++) { print i; fflush(); print i > \"/dev/stderr\" } }'"
    _, out, err = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert out == err == b"".join(b"%d\n" % i for i in range(1000))
    _, out, err = run(shared_state, Job(rootfs="host", steps=(sh(script),), merge_output=True))
    assert err == b""
    assert out == b"".join(b"%d\n%d\n" % (i, i) for i in range(1000))


@pytest.mark.parametrize(("stdin", "out"), [(None, b""), (b"", b""), (b"a", b"a"), (bytes(200000), bytes(200000))])
def test_stdin(shared_state: Path, stdin: bytes | None, out: bytes) -> None:
    """No stdin is an immediate end of file; given bytes arrive whole (C37)."""
    result, got, _ = run(shared_state, Job(rootfs="host", steps=(Step("cat", stdin=stdin),)))
    assert got == out
    assert result.outcome is Outcome.SUCCEEDED


def test_output_cap_keeps_head_and_tail(shared_state: Path) -> None:
    """Above the cap the middle is dropped, counted, and the job goes on. A reader that came late sees the gap."""

    async def main() -> None:
        job = Job(rootfs="host", steps=(sh("echo first; head -c 5000000 /dev/zero; echo last"),), output_cap=1 << 20)
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            result = await execution.wait()
            chunks = [chunk async for chunk in execution.output()]
        out = b"".join(chunk.data for chunk in chunks)
        assert result.outcome is Outcome.SUCCEEDED
        assert result.output.log_truncated
        assert result.output.stdout_bytes == 5000011
        assert len(out) <= 1 << 20
        assert len(out) + result.output.dropped_bytes == 5000011
        assert sum(chunk.dropped_before for chunk in chunks) == result.output.dropped_bytes
        assert out.startswith(b"first\n")
        assert out.endswith(b"last\n")

    asyncio.run(main())


def test_timeout(shared_state: Path, root: dict[str, str]) -> None:
    """TERM-ignoring jobs are killed after the grace, and it is a time-out, not a 137 (C27)."""
    job = Job(
        **root,
        steps=(sh("trap '' TERM; echo up; sleep 600 & wait; sleep 600"), sh("echo second")),
        limits=Limits(wall_time="1s"),
        timeouts=Timeouts(grace=0.5),
    )
    result, out, _ = run(shared_state, job)
    assert (result.outcome, result.exit_code) == (Outcome.TIMED_OUT, 124)
    assert out == b"up\n"
    assert "1s" in result.message


def test_timeout_race_with_exit(shared_state: Path) -> None:
    """A job that handles TERM and exits 0 within the grace has timed out all the same."""
    job = Job(
        rootfs="host",
        steps=(sh("trap 'exit 0' TERM; while :; do sleep 0.1; done"),),
        limits=Limits(wall_time="500ms"),
    )
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.TIMED_OUT
    assert result.exit is not None
    assert result.exit.code == 0


def test_always_step_after_timeout_needs_finally(shared_state: Path) -> None:
    """An `always` step runs after a time-out only within finally_timeout."""
    steps = (sh("sleep 600"), sh("echo cleanup", when="always"))
    for finally_, expected in ((0.0, b""), (5.0, b"cleanup\n")):
        job = Job(
            rootfs="host",
            steps=steps,
            limits=Limits(wall_time="500ms"),
            timeouts=Timeouts(grace=0.2, finally_=finally_),
        )
        result, out, _ = run(shared_state, job)
        assert (result.outcome, out) == (Outcome.TIMED_OUT, expected)


CANCEL_SCRIPT = (
    "trap '' TERM INT; (trap '' TERM; sleep 999) & setsid sh -c 'while :; do sleep 0.01 & done' & echo up; wait"
)


@pytest.mark.parametrize("kill", [False, True])
def test_cancel(shared_state: Path, root: dict[str, str], kill: bool) -> None:
    """Children that ignore TERM, and a detached fork loop, are gone before the result is (C18, C19)."""

    async def main() -> ExecutionResult:
        job = Job(**root, steps=(sh(CANCEL_SCRIPT),), timeouts=Timeouts(grace=0.5 if not kill else 600))
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            async for chunk in execution.output():
                assert chunk.data == b"up\n"
                break
            await execution.cancel(CancellationReason.SUPERSEDED, kill=kill)
            return await execution.wait()

    result = asyncio.run(main())
    assert result.outcome is Outcome.CANCELLED
    assert result.cancellation is CancellationReason.SUPERSEDED
    base = result.provenance.uid_base
    assert base is not None
    assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and owner(pid) in range(base, base + 65536)]


def owner(pid: str) -> int:
    """Uid of a living process, -1 otherwise: the dead PID 1 of a container is the host's init's to reap."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return -1 if fields["State"].split()[0] in "ZX" else int(fields["Uid"].split()[1])


def test_out_of_memory(shared_state: Path, root: dict[str, str]) -> None:
    """A memory kill is OutOfMemory with peak and limit (C27, C28)."""
    job = Job(**root, steps=(sh("tail /dev/zero"),), limits=Limits(memory="32MiB"))
    result, _, _ = run(shared_state, job)
    assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result
    assert result.evidence.memory.limit == 32 << 20
    assert result.evidence.memory.peak is not None
    assert result.evidence.memory.peak > 16 << 20
    assert result.evidence.memory.oom_kills


def test_oom_killed_child_of_a_job_that_goes_on(shared_state: Path) -> None:
    """A child killed by the memory limit in a job that exits 0 is a note."""
    job = Job(rootfs="host", steps=(sh("tail /dev/zero; exit 0"),), limits=Limits(memory="32MiB"))
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED
    assert any("memory limit killed" in note for note in result.notes)


def test_pid_limit(shared_state: Path, root: dict[str, str]) -> None:
    """A fork fan-out meets the pids limit, and the result says how often (C30)."""
    script = "i=0; while [ $i -lt 100 ]; do sleep 60 & i=$((i+1)); done; exit 2"
    result, _, _ = run(shared_state, Job(**root, steps=(sh(script),), limits=Limits(pids=16)))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED
    assert result.exit_code != 0
    assert result.evidence.pids.refused


def test_disk_limit(shared_state: Path, root: dict[str, str]) -> None:
    """The writable layer ends at the disk limit, and the failure is explained by it."""
    script = "head -c 100000000 /dev/zero > /work/build/big"
    result, _, err = run(shared_state, Job(**root, steps=(sh(script),), limits=Limits(disk="32MiB")))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, (result.message, err)
    assert b"No space left" in err or b"I/O error" in err


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
                steps=[Step("cat", "f"), Step.shell("tar cf /work/output/r.tar f")],  # type: ignore[arg-type]
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


def test_leaving_the_block_cancels(shared_state: Path) -> None:
    """An abandoned execution is cancelled and cleaned, its output dropped."""

    async def main() -> tuple[Execution, Path]:
        async with Executor.open(shared_state) as executor:
            job = Job(rootfs="host", steps=(sh("sleep 600"),), timeouts=Timeouts(grace=0.2))
            async with executor.run(job) as execution:
                pass
            assert (await execution.wait()).outcome is Outcome.CANCELLED
            assert not (shared_state / "sandboxes" / execution.sandbox_id).exists()
            return execution, shared_state

    asyncio.run(main())
    assert os.listdir(shared_state / "sandboxes") == []
    assert not [p for d in os.scandir(shared_state / "spool") for p in os.scandir(d.path)]


def test_high_assurance_is_refused(shared_state: Path) -> None:
    """Without a VM backend the profile can't be served, and nothing is started."""
    job = Job(rootfs="host", steps=(sh("true"),), profile=Profile.HIGH_ASSURANCE)
    with pytest.raises(Exception, match="virtual_machine"):
        run(shared_state, job)
    assert os.listdir(shared_state / "sandboxes") == []


def test_callers_deadline_caps_the_timeout(shared_state: Path) -> None:
    """An absolute deadline ends the job before its own timeout does, and the message says which it was."""

    async def main() -> ExecutionResult:
        job = Job(rootfs="host", steps=(sh("sleep 600"),), timeouts=Timeouts(grace=0.1))
        deadline = datetime.now(UTC) + timedelta(seconds=1)
        async with Executor.open(shared_state) as executor, executor.run(job, deadline=deadline) as execution:
            return await execution.wait()

    result = asyncio.run(main())
    assert result.outcome is Outcome.TIMED_OUT
    assert "deadline" in result.message


@pytest.mark.parametrize("steps", [(), (sh("sleep 600"),)])
def test_death_of_pid_1_is_the_jobs_failure(shared_state: Path, steps: tuple[Step, ...]) -> None:
    """A sandbox whose PID 1 dies is Failed, never an infrastructure failure, also between two steps."""

    async def main() -> ExecutionResult:
        async with Executor.open(shared_state) as executor:
            async with executor.run(Job(rootfs="host", steps=steps)) as execution:
                pid = int((shared_state / "sandboxes" / execution.sandbox_id / "pid").read_text())
                os.kill(pid, signal.SIGKILL)
                return await execution.wait()

    result = asyncio.run(main())
    assert result.outcome is Outcome.FAILED
    assert "PID 1" in result.message


def test_oom_is_seen_every_time(shared_state: Path) -> None:
    """The counters are read before the cgroup goes: 24 of 24 memory kills are OutOfMemory (C28)."""

    async def one(executor: Executor, gate: asyncio.Semaphore) -> Outcome:
        job = Job(rootfs="host", steps=(sh("tail /dev/zero"),), limits=Limits(memory="16MiB"))
        async with gate, executor.run(job) as execution:
            return (await execution.wait()).outcome

    async def main() -> list[Outcome]:
        gate = asyncio.Semaphore(4)
        async with Executor.open(shared_state) as executor:
            return await asyncio.gather(*(one(executor, gate) for _ in range(24)))

    assert asyncio.run(main()) == [Outcome.OUT_OF_MEMORY] * 24


def test_background_step_lives_on_beside_the_next(shared_state: Path) -> None:
    """A background step is there for later steps, and gone with the job."""
    steps = (
        sh("while :; do echo alive > /work/build/beat; sleep 0.05; done", background=True, name="service"),
        sh("while ! test -e /work/build/beat; do sleep 0.05; done; rm /work/build/beat"),
        sh("while ! test -e /work/build/beat; do sleep 0.05; done; echo seen"),
    )
    result, out, _ = run(shared_state, Job(rootfs="host", steps=steps))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"seen\n")


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (Step("echo", "a\0b"), "argv"),
        (Step("echo", "x" * 200_000), "argv"),
        (Step("true", env={"BIG": "x" * 200_000}), "BIG"),
        (Step("true", env={"A=B": "x"}), "A=B"),
        (Step("true", workdir="../../etc"), "workdir"),
    ],
)
def test_what_execve_would_refuse_is_refused_by_name(shared_state: Path, step: Step, field: str) -> None:
    """Bad arguments, variables and directories are named before anything starts, and leave nothing."""
    with pytest.raises(InvalidRequest, match=field):
        run(shared_state, Job(rootfs="host", steps=(step,)))
    assert os.listdir(shared_state / "sandboxes") == []


@pytest.mark.parametrize("source", ["/nosuch", "/etc/passwd", "/"])
def test_source_must_be_a_directory_apart_from_our_state(shared_state: Path, source: str) -> None:
    """An absent source, a file, or a tree that holds the executor's state is refused."""
    with pytest.raises(InvalidRequest, match="source"):
        run(shared_state, Job(rootfs="host", steps=(sh("true"),)), source=source)


def test_toolchains_and_approved_paths(shared_state: Path, tree: Path) -> None:
    """A toolchain is read-only, in front of PATH; an approved path is there; nothing else of the host is."""
    (tree / "bin").mkdir()
    (tree / "bin/greet").write_text("#!/bin/sh\necho hello from $0\n")
    (tree / "bin/greet").chmod(0o755)
    tree.chmod(0o755)
    job = Job(
        rootfs="host",
        steps=(sh("greet; touch /toolchains/t/x 2>/dev/null || echo ro; cat /data/f"),),
        toolchains=(ApprovedHostPath(str(tree), "/toolchains/t"),),
        host_paths=(ApprovedHostPath(str(tree), "/data"),),
    )
    result, out, err = run(shared_state, job)
    assert out == b"hello from /toolchains/t/bin/greet\nro\noriginal\n", err
    assert any(str(tree) in reason for reason in result.provenance.impure)


def test_usr_local_is_an_approval_of_its_own(shared_state: Path) -> None:
    """/usr/local is empty for a job until a policy names it."""
    if not os.listdir("/usr/local/bin"):
        pytest.skip("the host's /usr/local/bin is empty, so there is nothing to hide")
    step = sh("ls /usr/local/bin | wc -l")
    _, out, _ = run(shared_state, Job(rootfs="host", steps=(step,)))
    assert out.strip() == b"0"
    approved = (ApprovedHostPath("/usr/local", "/usr/local"),)
    _, out, _ = run(shared_state, Job(rootfs="host", steps=(step,), host_paths=approved))
    assert int(out) == len(os.listdir("/usr/local/bin"))
