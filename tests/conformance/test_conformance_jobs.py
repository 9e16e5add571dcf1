"""What a job can see is the same on every runtime: the same tests, through the executor, on all of them."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_jobs import Jobs, jobs_on, processes_of
from adapters import on
from jobs import sh
from small_images import image as make_image

from forgeyard_executor import (
    CancellationReason,
    ExecutionResult,
    Executor,
    Job,
    Limits,
    Network,
    Outcome,
    Output,
    Step,
    Timeouts,
)
from forgeyard_model.policy import CapabilityGrant
from forgeyard_runtimes.cells import Behaviour

pytestmark = pytest.mark.kernel

WIRED = ("runc", "crun", "containerd", "podman", "docker")
"""Runtimes that the executor can be opened with."""
STEPS = on(Behaviour.STEPS, names=WIRED)
LIMITS = on(Behaviour.LIMITS, names=WIRED)
FILES = on(Behaviour.FILES, names=WIRED)
PRIVILEGES = on(Behaviour.PRIVILEGES, names=WIRED)
NAMESPACES = on(Behaviour.NAMESPACES, names=WIRED)


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest, shared_state: Path) -> Iterator[Jobs]:
    """Jobs on the runtime of this test's parameter."""
    with jobs_on(request, shared_state) as jobs:
        yield jobs


# --- how steps end -------------------------------------------------------------------------------------------------


@STEPS
def test_exit_codes_and_signals(adapter: Jobs, root: dict[str, str]) -> None:
    """Codes and signals are two facts, in one job step by step (C23, C25, C27)."""
    codes = (0, 1, 125, 126, 127, 128, 137, 143, 159, 255)
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSYS)
    scripts = (*(f"exit {code}" for code in codes), *(f"kill -{number} $$" for number in signals))
    result, _, _ = adapter.run(Job(**root, steps=[sh(script, continue_on_error=True) for script in scripts]))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    ends = [step.exit for step in result.steps]
    assert [end.code for end in ends if end] == [*codes, *(None for _ in signals)]
    assert [end.signal for end in ends if end] == [*(None for _ in codes), *signals]


@STEPS
def test_the_jobs_own_verdict(adapter: Jobs, root: dict[str, str]) -> None:
    """The first unmasked failure decides, with its code; a 137 by exit is no memory kill."""
    result, _, _ = adapter.run(Job(**root, steps=(sh("exit 137"), sh("echo never"))))
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 137)
    assert result.provenance.runtime.partition(" ")[0] == adapter.name


@STEPS
def test_programs_that_cannot_run(adapter: Jobs, root: dict[str, str]) -> None:
    """Not found is 127, not executable 126 (C24)."""
    for argv, code in ((("nosuch",), 127), (("/etc/passwd",), 126)):
        result, _, _ = adapter.run(Job(**root, steps=(Step(*argv),)))
        assert (result.outcome, result.exit_code) == (Outcome.FAILED, code)
        assert argv[0] in result.message


@STEPS
def test_steps_share_a_sandbox(adapter: Jobs, root: dict[str, str]) -> None:
    """Files live on from step to step, environments and processes do not."""
    steps = (
        sh(
            "echo kept > /work/build/f; export LEAK=1; (trap '' TERM; sleep 301) >/dev/null 2>&1 &", env={"SECRET": "s"}
        ),
        sh("cat /work/build/f; echo ${SECRET:-none} ${LEAK:-none}; ls -d /proc/[0-9]* | wc -l"),
    )
    result, out, _ = adapter.run(Job(**root, steps=steps))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert out.split()[:3] == [b"kept", b"none", b"none"]
    assert int(out.split()[3]) < 6
    assert result.steps[0].leftovers >= 1


@STEPS
def test_a_background_step(adapter: Jobs) -> None:
    """A background step lives on beside the next ones and ends with the job."""
    steps = (
        sh("while :; do echo alive > /work/build/beat; sleep 0.05; done", background=True),
        sh("while ! test -e /work/build/beat; do sleep 0.05; done; echo seen"),
    )
    result, out, _ = adapter.run(Job(rootfs="host", steps=steps))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"seen\n")


@STEPS
def test_a_child_does_not_hold_the_job(adapter: Jobs, root: dict[str, str]) -> None:
    """The verdict comes at the main process's exit; its children die (C20, C21)."""
    result, out, _ = adapter.run(Job(**root, steps=(sh("echo done; sleep 600 & setsid sleep 601 &"),)))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"done\n")


@STEPS
def test_scripts(adapter: Jobs, root: dict[str, str]) -> None:
    """A script stops at its first failure and stands in nobody's argument list."""
    result, out, _ = adapter.run(Job(**root, steps=(Step.shell("echo one\nfalse\necho two\n"),)))
    assert (result.exit_code, out) == (1, b"one\n")


@STEPS
def test_death_of_pid_1(adapter: Jobs) -> None:
    """A sandbox whose PID 1 is killed from outside is over at once, and no failure of the job's."""

    async def body(executor: Executor) -> None:
        async with executor.run(Job(rootfs="host", steps=(sh("echo up; sleep 600"),))) as execution:
            async for _ in execution.output():
                break
            own = next(found for found in executor.list_sandboxes() if found.sandbox_id == execution.sandbox_id)
            assert own.pid is not None
            os.kill(own.pid, signal.SIGKILL)
            result = await execution.wait()
        assert result.outcome is Outcome.INFRASTRUCTURE_FAILURE
        assert "PID 1" in result.message

    adapter.drive(body)


# --- what goes in and comes out ------------------------------------------------------------------------------------


@STEPS
def test_bytes_per_stream(adapter: Jobs, root: dict[str, str]) -> None:
    """Each stream byte for byte, without a newline added or an engine's log between."""
    result, out, err = adapter.run(Job(**root, steps=(sh(r"printf 'a\000\377\r\n b'; printf 'e\033[0m' >&2"),)))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert (out, err) == (b"a\0\xff\r\n b", b"e\x1b[0m")


@STEPS
def test_a_hundred_megabytes(adapter: Jobs) -> None:
    """100 MB of output arrive whole."""
    size = 100 << 20
    script = f"head -c {size} /dev/zero"

    async def body(executor: Executor) -> None:
        digest, seen = hashlib.sha256(), 0
        async with executor.run(Job(rootfs="host", steps=(sh(script),))) as execution:
            async for chunk in execution.output():
                digest.update(chunk.data)
                seen += len(chunk.data)
            assert (await execution.wait()).outcome is Outcome.SUCCEEDED
        assert (seen, digest.digest()) == (size, hashlib.sha256(bytes(size)).digest())

    adapter.drive(body)


@STEPS
def test_input(adapter: Jobs, root: dict[str, str]) -> None:
    """A step reads what it was given, and else an end of file."""
    steps = (Step("cat", stdin=b"some\0input"), Step("cat"))
    result, out, _ = adapter.run(Job(**root, steps=steps))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"some\0input")


@STEPS
def test_words_and_environment(adapter: Jobs, root: dict[str, str]) -> None:
    """Arguments and variables arrive as they were given, odd and large ones too (C71)."""
    odd = ("", " ", "a b", "'\"", "$HOME", "new\nline", "ä€😀", "*", "-n")
    steps = (
        Step("printf", "%s|", *odd),
        Step("sh", "-c", 'printf "%s" "$ODD"', env={"ODD": "x=y\nz", "BIG": "v" * 100_000}),
    )
    result, out, _ = adapter.run(Job(**root, steps=steps))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert out.decode() == "".join(f"{word}|" for word in odd) + "x=y\nz"


@STEPS
def test_working_directories(adapter: Jobs, root: dict[str, str]) -> None:
    """A step's directory, the job's, and one that is not there."""
    steps = (Step("pwd", workdir="/work/build"), Step("pwd"))
    result, out, _ = adapter.run(Job(**root, steps=steps, workdir="/tmp"))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"/work/build\n/tmp\n")
    result, _, _ = adapter.run(Job(**root, steps=(Step("pwd", workdir="/work/nosuch"),)))
    assert result.outcome is Outcome.FAILED
    assert "/work/nosuch" in result.message


@STEPS
def test_source_and_outputs(adapter: Jobs, root: dict[str, str], tree: Path) -> None:
    """The source is there as a private copy, and promised outputs are collected."""
    steps = (sh("cat /work/source/f; echo changed > /work/source/f; echo r > /work/output/r"),)
    result, out, err = adapter.run(Job(**root, steps=steps, outputs=(Output("r"),)), source=tree)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"original\n"), (result.message, err)
    assert (tree / "f").read_text() == "original\n"


# --- images --------------------------------------------------------------------------------------------------------


@STEPS
def test_image_config(adapter: Jobs, tmp_path: Path) -> None:
    """Entrypoint, command, variables, user and directory come from the image, and the job's words win (C45)."""
    reference = make_image(
        tmp_path / "image",
        {
            "Entrypoint": ["/bin/sh", "-c", 'echo "$0 $IMAGE $BOTH $(id -u) $(pwd)"'],
            "Cmd": ["cmd"],
            "Env": ["PATH=/bin", "IMAGE=i", "BOTH=image"],
            "User": "1234",
            "WorkingDir": "/tmp",
        },
    )
    steps = (Step(entrypoint=True), Step("word", entrypoint=True), sh("echo $IMAGE $BOTH $(id -u) $(pwd)"))
    result, out, err = adapter.run(Job(image=reference, steps=steps, env={"BOTH": "job"}))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    assert out == b"cmd i job 1234 /tmp\nword i job 1234 /tmp\ni job 1234 /tmp\n"
    assert result.provenance.image is not None


@STEPS
def test_image_stop_signal(adapter: Jobs, tmp_path: Path) -> None:
    """The image's stop signal is what a cancel sends first to its entrypoint (C26)."""
    reference = make_image(tmp_path / "image", {"StopSignal": "SIGUSR1"})
    result, out = _cancelled(
        adapter,
        Job(
            image=reference,
            steps=(Step("sh", "-c", _TRAP.format("USR1"), entrypoint=True),),
            timeouts=Timeouts(grace=20),
        ),
    )
    assert result.outcome is Outcome.CANCELLED
    # The signal is the whole group's: shells may say that their child was terminated.
    assert b"caught\n" in out


@on(Behaviour.STEPS, names=WIRED)
def test_image_root_is_private(adapter: Jobs, busybox_image: str) -> None:
    """What a job writes into its image is gone with it."""
    script = "touch /etc/mark 2>/dev/null; mkdir /etc/dir 2>/dev/null; test -e /etc/mark && echo was there"
    for _ in range(2):
        result, out, _ = adapter.run(Job(image=busybox_image, steps=(sh("test -e /etc/mark || echo new"), sh(script))))
        assert out.startswith(b"new\n"), (result.message, out)


# --- ends from outside ---------------------------------------------------------------------------------------------

_TRAP = "trap 'echo caught; exit 0' {}; echo up; while :; do sleep 0.05; done"


def _cancelled(adapter: Jobs, job: Job, *, kill: bool = False) -> tuple[ExecutionResult, bytes]:
    """The result and output of a job that is cancelled after its first output."""
    found: list[tuple[ExecutionResult, bytes]] = []

    async def body(executor: Executor) -> None:
        async with executor.run(adapter.fitted(job)) as execution:
            out = b""
            async for chunk in execution.output():
                out += chunk.data
                if out == b"up\n":
                    await execution.cancel(CancellationReason.SUPERSEDED, kill=kill)
            found.append((await execution.wait(), out))

    adapter.drive(body)
    return found[0]


@STEPS
def test_cancel_with_grace(adapter: Jobs, root: dict[str, str]) -> None:
    """The soft signal reaches the step, which may still speak (C18)."""
    result, out = _cancelled(adapter, Job(**root, steps=(sh(_TRAP.format("TERM")),), timeouts=Timeouts(grace=20)))
    assert result.outcome is Outcome.CANCELLED
    # The signal is the whole group's: shells may say that their child was terminated.
    assert b"caught\n" in out
    assert result.cancellation is CancellationReason.SUPERSEDED


@STEPS
@pytest.mark.parametrize("kill", [False, True])
def test_cancel_of_a_deaf_tree(adapter: Jobs, kill: bool) -> None:
    """Children that ignore TERM and detached ones are gone before the result is (C19)."""
    script = "trap '' TERM INT; (trap '' TERM; sleep 999) & setsid sh -c \"trap '' TERM; sleep 998\" & echo up; wait"
    job = Job(rootfs="host", steps=(sh(script),), timeouts=Timeouts(grace=600 if kill else 0.3))
    result, _ = _cancelled(adapter, job, kill=kill)
    assert result.outcome is Outcome.CANCELLED
    if result.provenance.uid_base is not None:
        assert processes_of(result.provenance.uid_base) == []


@STEPS
def test_timeout(adapter: Jobs, root: dict[str, str]) -> None:
    """A deaf job is killed after the grace, and it is a time-out, not a 137."""
    job = Job(
        **root,
        steps=(sh("trap '' TERM; echo up; sleep 600 & wait; sleep 600"),),
        limits=Limits(wall_time="1s"),
        timeouts=Timeouts(grace=0.3),
    )
    result, out, _ = adapter.run(job)
    assert (result.outcome, result.exit_code, out) == (Outcome.TIMED_OUT, 124, b"up\n")


# --- limits --------------------------------------------------------------------------------------------------------


@LIMITS
def test_out_of_memory(adapter: Jobs, root: dict[str, str]) -> None:
    """A memory kill is OutOfMemory with the limit, from the kernel's own counters (C28)."""
    result, _, _ = adapter.run(Job(**root, steps=(sh("tail /dev/zero"),), limits=Limits(memory="32MiB")))
    assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result
    assert result.evidence.memory.limit == 32 << 20


@LIMITS
def test_memory_kill_of_a_child(adapter: Jobs) -> None:
    """A child that was killed in a job that goes on and succeeds is a note."""
    result, _, _ = adapter.run(Job(rootfs="host", steps=(sh("tail /dev/zero; exit 0"),), limits=Limits(memory="32MiB")))
    assert result.outcome is Outcome.SUCCEEDED
    assert result.evidence.memory.oom_kills


@LIMITS
def test_process_limit(adapter: Jobs, root: dict[str, str]) -> None:
    """Refused forks are ResourceExceeded (C30)."""
    script = "i=0; while [ $i -lt 40 ]; do sleep 100 & i=$((i+1)); done; exit 1"
    result, _, _ = adapter.run(Job(**root, steps=(sh(script),), limits=Limits(pids=16)))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, result.message
    assert result.evidence.pids.refused


@LIMITS
def test_cpu_limit(adapter: Jobs) -> None:
    """The kernel gives a job no more than its part: half a second's work of one core takes a quarter of it twice."""
    script = "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'"
    result, _, err = adapter.run(Job(rootfs="host", steps=(sh(script),), limits=Limits(cpus=0.25)))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    duration = result.steps[0].duration
    assert duration is not None
    assert duration > 1.0


@LIMITS
def test_usage(adapter: Jobs) -> None:
    """What a job used is told, as the kernel counted it."""
    result, _, _ = adapter.run(Job(rootfs="host", steps=(sh("head -c 20000000 /dev/urandom > /work/build/f"),)))
    assert result.usage.cpu_time
    assert result.usage.peak_memory


# --- what a job sees -----------------------------------------------------------------------------------------------


@PRIVILEGES
def test_user_and_privileges(adapter: Jobs, root: dict[str, str]) -> None:
    """An ordinary user without a capability, under no_new_privs and a filter."""
    result, out, _ = adapter.run(
        Job(**root, steps=(sh("id -u; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status"),))
    )
    assert result.outcome is Outcome.SUCCEEDED, result.message
    uid, *lines = out.decode().split("\n")[:-1]
    assert int(uid) > 0 or "image" in root
    facts = {line.split(":")[0]: line.split(":")[1].strip() for line in lines}
    assert facts == {f"Cap{name}": "0" * 16 for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} | {
        "NoNewPrivs": "1",
        "Seccomp": "2",
    }


@PRIVILEGES
def test_calls_that_are_refused(adapter: Jobs, root: dict[str, str]) -> None:
    """Mounting and new namespaces are refused, whoever asks."""
    for script in ("mount -t tmpfs x /tmp", "unshare -m true"):
        result, _, err = adapter.run(Job(**root, steps=(sh(script),)))
        assert result.outcome is Outcome.FAILED, (script, err)


@PRIVILEGES
def test_nofile(adapter: Jobs) -> None:
    """The limit on open files is the job's, and core dumps are off."""
    soft, hard, core = adapter.says("ulimit -Sn; ulimit -Hn; ulimit -c", limits=Limits(nofile=1000)).split()
    assert (soft, hard, core) == ("1000", "1000", "0")


@on(Behaviour.USER_NAMESPACE, names=WIRED)
def test_user_namespace(adapter: Jobs, root: dict[str, str]) -> None:
    """Ids are mapped into the attempt's own range, which provenance tells."""
    result, out, _ = adapter.run(Job(**root, steps=(sh("cat /proc/self/uid_map"),)))
    assert result.provenance.user_namespace
    assert out.split()[:3] == [b"0", str(result.provenance.uid_base).encode(), b"65536"]


@on(Behaviour.ROOT_IN_USERNS, names=WIRED)
def test_root_in_its_user_namespace(adapter: Jobs, busybox_image: str) -> None:
    """A granted root may change owners, and gets no further."""
    job = Job(
        image=busybox_image,
        user="root",
        capabilities=CapabilityGrant.ROOT_IN_USERNS,
        steps=(sh("id -u; touch /tmp/f && chown 7:7 /tmp/f && stat -c %u /tmp/f; mount -t tmpfs x /tmp || echo no"),),
    )
    result, out, err = adapter.run(job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"0\n7\nno\n"), (result.message, err)


@FILES
def test_file_system(adapter: Jobs) -> None:
    """The host's programs are read-only, and only the job's own places can be written."""
    script = (
        "for d in / /usr /etc /bin /sys /proc/sys/kernel; do touch $d/x 2>/dev/null && echo WROTE $d; done; echo end"
    )
    assert adapter.says(script) == "end"
    places = "/work/build /work/output /work/tmp /tmp $HOME /var/tmp /dev/shm"
    assert adapter.says(f"for d in {places}; do echo x > $d/x || echo CANNOT $d; done; echo end") == "end"


@FILES
def test_proc_is_masked(adapter: Jobs, root: dict[str, str]) -> None:
    """What engines hide reads as empty, and /proc/sys can't be written."""
    script = (
        "cat /proc/kcore /proc/keys /proc/timer_list 2>/dev/null | wc -c; echo 1 > /proc/sys/vm/drop_caches || echo no"
    )
    result, out, _ = adapter.run(Job(**root, steps=(sh(script),)))
    assert out == b"0\nno\n", result.message


@FILES
def test_devices_and_shared_memory(adapter: Jobs, root: dict[str, str]) -> None:
    """The harmless devices and no other; shared memory of its planned size."""
    script = "ls /dev; echo; df -k /dev/shm | tail -n 1 | tr -s ' ' | cut -d' ' -f2"
    result, out, _ = adapter.run(Job(**root, steps=(sh(script),), limits=Limits(shm="3MiB")))
    names, size = out.decode().split("\n\n")
    known = {"null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "mqueue", "ptmx", "console"}
    assert (
        {"null", "zero", "urandom", "shm"} <= set(names.split()) <= known | {"fd", "stdin", "stdout", "stderr", "core"}
    )
    assert size.strip() == "3072", result.message


@FILES
def test_control_groups_cannot_be_written(adapter: Jobs, root: dict[str, str]) -> None:
    """A job can't move itself or lift its limits."""
    script = (
        "for f in /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs; do echo $$ > $f && echo MOVED; done; true"
    )
    _, out, _ = adapter.run(Job(**root, steps=(sh(script),)))
    assert b"MOVED" not in out


@FILES
def test_mounts_of_the_host_do_not_come_in(adapter: Jobs) -> None:
    """No mount of the job's propagates: all of its mounts are private."""
    assert adapter.says("grep -c shared: /proc/self/mountinfo || true") == "0"


@NAMESPACES
def test_names_and_processes(adapter: Jobs, root: dict[str, str]) -> None:
    """A host name of its own, the shim as PID 1, and no process of anybody else's."""
    result, out, _ = adapter.run(Job(**root, steps=(sh("hostname; cat /proc/1/comm; ls -d /proc/[0-9]* | wc -l"),)))
    name, first, count = out.decode().split()
    assert name.startswith("fy-"), result.message
    assert first == "forgeyard-init"
    assert int(count) < 6


@NAMESPACES
def test_no_network(adapter: Jobs, root: dict[str, str]) -> None:
    """Denied network: the loopback alone, which works, and no route."""
    script = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; tail -n +2 /proc/net/route | wc -l"
    result, out, _ = adapter.run(Job(**root, steps=(sh(script),), network=Network.deny()))
    assert out.split() == [b"lo", b"0"], result.message


# --- afterwards ----------------------------------------------------------------------------------------------------


@STEPS
def test_nothing_is_left(adapter: Jobs, shared_state: Path) -> None:
    """After jobs that ended in every way nothing of theirs is in the state directory or at the runtime."""
    for script in ("true", "exit 3", "kill -9 $$"):
        adapter.run(Job(rootfs="host", steps=(sh(script),)))
    assert list((shared_state / "sandboxes").iterdir()) == []
    assert list((shared_state / "ledger").iterdir()) == []
