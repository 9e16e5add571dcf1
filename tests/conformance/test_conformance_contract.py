"""Every adapter keeps the contract: the life of a container, and what is inside, are the same on all of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import Adapter, adapter_of, on, parameter
from contract_box import PLAN, RAM_PLAN, UMASK_PLAN, Box, box, open_box

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.plan import ContainerPlan
from forgeyard_process_shim.channel import ShimDied
from forgeyard_process_shim.protocol import Exited, NoExec
from forgeyard_runtimes.cells import Behaviour, exception
from forgeyard_runtimes.comparison import compare, undeclared
from forgeyard_runtimes.contract import ContainerRef, ContainerRuntime, ContainerStatus

pytestmark = pytest.mark.kernel

STEPS, FILES, LIMITS = Behaviour.STEPS, Behaviour.FILES, Behaviour.LIMITS
PRIVILEGES, NAMESPACES = Behaviour.PRIVILEGES, Behaviour.NAMESPACES


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """The adapter of this test's parameter."""
    yield from adapter_of(request)


# --- the life of a container ---------------------------------------------------------------------------------------


@on(STEPS)
def test_life_of_a_container(adapter: Adapter) -> None:
    """Absent, made, running, dead, forgotten: each state is told as such, and forgetting twice is no error."""

    async def main(runtime: ContainerRuntime) -> None:
        async with box(runtime) as made:
            assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT
            await made.create()
            assert (await runtime.state(made.ref)).status in (
                ContainerStatus.ABSENT,  # a command line has nothing of it before it starts
                ContainerStatus.CREATING,
                ContainerStatus.CREATED,
            )
            await made.start()
            state = await runtime.state(made.ref)
            assert (state.status, state.pid) == (ContainerStatus.RUNNING, made.pid)
            assert [found.container_id for found in await runtime.list((made.directory,))] == [made.ref.container_id]
            assert await runtime.list((made.directory.parent / "nosuch",)) == ()
            await made.kill()
            await _known_dead(made)
            await runtime.remove(made.ref)
            await runtime.remove(made.ref)
            if adapter.name != "runc":  # whose state is a directory, which goes with the attempt's
                assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT

    adapter.run(main)


async def _known_dead(made: Box) -> None:
    async with asyncio.timeout(10):
        while (await made.runtime.state(made.ref)).status not in (ContainerStatus.STOPPED, ContainerStatus.ABSENT):
            # An engine hears of a death from its monitor, some time after we do.
            await asyncio.sleep(0.02)


@on(STEPS)
def test_gate_holds(adapter: Adapter) -> None:
    """After start PID 1 is the shim and nothing else runs; its pid is the host's."""

    async def main(runtime: ContainerRuntime) -> None:
        async with box(runtime) as made:
            await made.create()
            await made.start()
            command = Path(f"/proc/{made.pid}/cmdline").read_bytes().split(b"\0")
            assert command[0] == b"/.forgeyard/init"
            assert [int(pid) for pid in _members(made)] == [made.pid]
            made.open_gate()
            assert await made.says("echo released") == "released"

    adapter.run(main)


def _members(made: Box) -> list[str]:
    return Path(f"/sys/fs/cgroup/pids{made.own_group}/cgroup.procs").read_text().split()


@on(STEPS)
def test_kill_takes_everything_along(adapter: Adapter) -> None:
    """A killed container leaves no process, and the group it was in can be removed: it is empty."""

    async def body(made: Box) -> None:
        await made.channel.start_background(made.command("/bin/sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000"))
        group = made.own_group
        assert len(_members(made)) >= 2
        await made.kill()
        assert made.group.empty("job")
        with pytest.raises(ShimDied):
            await made.sh("true")
        await made.runtime.remove(made.ref)
        # A command line leaves the empty group to the owner of the one above.
        assert not Path(f"/sys/fs/cgroup/pids{group}").exists() or adapter.name in ("runc", "crun")

    adapter.apart(body)


@on(STEPS)
def test_kill_of_a_dead_container(adapter: Adapter) -> None:
    """Killing what is dead is what was wanted."""

    async def body(made: Box) -> None:
        await made.kill()
        await made.runtime.kill(made.ref, made.pidfd)

    adapter.apart(body)


@on(STEPS)
def test_failed_start_leaves_nothing(adapter: Adapter) -> None:
    """A bundle that can't be started is a typed error, at create or start, and nothing is left at the runtime."""

    async def main(runtime: ContainerRuntime) -> None:
        async with box(runtime) as made:
            with pytest.raises(ForgeyardError):
                await _started_badly(made)
            assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT
            assert await runtime.list((made.directory,)) == ()

    adapter.run(main)


async def _started_badly(made: Box) -> None:
    await made.create(lambda spec: spec["process"].update(args=["/nosuch/program"]))
    await made.runtime.start(made.ref)


@on(STEPS)
def test_two_containers_at_once(adapter: Adapter) -> None:
    """Two containers know nothing of each other, and the end of one is not the end of the other."""

    async def main(runtime: ContainerRuntime) -> None:
        async with open_box(runtime) as one, open_box(runtime) as other:
            await one.says("echo mine > /tmp/f")
            assert await other.says("ls /tmp") == "there"
            await one.kill()
            assert (await runtime.state(other.ref)).status is ContainerStatus.RUNNING
            assert await other.says("echo lives") == "lives"

    adapter.run(main)


@on(STEPS)
def test_unknown_container(adapter: Adapter) -> None:
    """A container that was never there is absent, and forgetting it is no error."""

    async def main(runtime: ContainerRuntime) -> None:
        ref = ContainerRef("fy-nosuch", Path("/var/tmp/nosuch"))
        assert (await runtime.state(ref)).status is ContainerStatus.ABSENT
        await runtime.remove(ref)

    adapter.run(main)


# --- steps ---------------------------------------------------------------------------------------------------------

ENDS = (
    *[(f"exit {code}", code << 8) for code in (0, 1, 2, 125, 126, 127, 128, 137, 143, 159, 255)],
    *[(f"kill -{number} $$", number) for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGSYS)],
    *[(f"kill -{number} $$", number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1)],
)


@on(STEPS)
def test_exit_codes_and_signals_are_told_apart(adapter: Adapter) -> None:
    """exit 137 is not a SIGKILL, and exit 159 no SIGSYS: the raw status comes through (C23, C25)."""

    async def body(made: Box) -> None:
        for script, wanted in ENDS:
            status, _ = await made.sh(script)
            assert status & ~0x80 == wanted, script

    adapter.inside(body)


@on(STEPS)
def test_programs_that_cannot_run(adapter: Adapter) -> None:
    """A program that is not there, or is none, is reported as such and the sandbox lives on."""

    async def body(made: Box) -> None:
        for path in ("/nosuch", "/tmp/there"):
            end, _, _ = await made.run(path)
            assert isinstance(end, NoExec), path
        end, _, _ = await made.run("/bin/true", cwd="/nosuch")
        assert isinstance(end, NoExec)
        assert await made.says("echo on") == "on"

    adapter.inside(body)


@on(STEPS)
def test_arguments_and_environment_arrive_byte_for_byte(adapter: Adapter) -> None:
    """Words with blanks, quotes, newlines and bytes that are no UTF-8; the step's environment and no other (C71)."""

    async def body(made: Box) -> None:
        odd = ("", " ", "a b", "'\"", "$HOME", "`id`", "-n", "new\nline", "\udcff\udcfe", "ä€😀", "*")
        end, out, _ = await made.run("/bin/printf", "%s|", *odd)
        assert isinstance(end, Exited)
        assert out == b"".join(word.encode("utf-8", "surrogateescape") + b"|" for word in odd)
        _, out, _ = await made.run("/bin/env", env={"A": "1 2", "ODD": "x=y\nz"})
        assert out == b"A=1 2\nODD=x=y\nz\n"

    adapter.inside(body)


@on(STEPS)
def test_a_large_environment(adapter: Adapter) -> None:
    """A variable of 100 KB arrives whole."""

    async def body(made: Box) -> None:
        value = "v" * 100_000
        assert await made.says('printf "%s" "$BIG" | wc -c', env={**made.plan.env, "BIG": value}) == "100000"

    adapter.inside(body)


@on(STEPS)
def test_streams_are_apart(adapter: Adapter) -> None:
    """Each stream has its own bytes, binary ones too, and no engine's log is between."""

    async def body(made: Box) -> None:
        end, out, err = await made.run("/bin/sh", "-c", r"printf 'o\000\377\r\n'; printf 'e\033[0m' >&2")
        assert isinstance(end, Exited)
        assert (out, err) == (b"o\0\xff\r\n", b"e\x1b[0m")

    adapter.inside(body)


@on(STEPS)
def test_input_is_empty_or_what_was_given(adapter: Adapter) -> None:
    """Without input a step reads an end of file; with input it reads that."""

    async def body(made: Box) -> None:
        assert await made.says("cat | wc -c") == "0"
        path = made.channel.write_stdin(77, b"some\0input")
        assert await made.says("cat | wc -c", stdin=path) == "10"

    adapter.inside(body)


@on(STEPS)
def test_working_directory(adapter: Adapter) -> None:
    """A step starts where it was told, with the usual umask."""

    async def body(made: Box) -> None:
        assert await made.says("pwd", cwd="/tmp") == "/tmp"
        assert await made.says("umask; touch /tmp/new; stat -c %a /tmp/new") == "0022\n644"

    adapter.inside(body)


@on(Behaviour.UMASK)
def test_umask(adapter: Adapter) -> None:
    """The plan's umask is the steps'."""

    async def main(runtime: ContainerRuntime) -> None:
        async with open_box(runtime, UMASK_PLAN) as made:
            assert await made.says("umask; touch /tmp/new; stat -c %a /tmp/new") == "0027\n640"

    adapter.run(main)


@on(STEPS)
def test_background_children_die_with_their_step(adapter: Adapter) -> None:
    """What a step leaves behind is gone before the next one starts, even where it ignores SIGTERM."""

    async def body(made: Box) -> None:
        await made.says("(trap '' TERM HUP; sleep 1001) >/dev/null 2>&1 & echo")
        # Written so that the shell that looks does not find itself.
        assert await made.says("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 10[0]1' || true") == "0"

    adapter.inside(body)


@on(STEPS)
def test_signal_reaches_the_step(adapter: Adapter) -> None:
    """A signal for the step is handled by the step's own trap (C18, C26)."""

    async def body(made: Box) -> None:
        started: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        script = "trap 'echo caught; exit 3' USR1; touch /tmp/ready; while :; do sleep 0.05; done"
        running = asyncio.ensure_future(
            made.channel.run_step(made.command("/bin/sh", "-c", script), started=started.set_result)
        )
        await started
        while not (made.directory / "scratch/ready").exists():
            await asyncio.sleep(0.01)  # the trap is set once the file is there, and nothing announces a file
        made.channel.signal(signal.SIGUSR1)
        end = await running
        assert isinstance(end, Exited)
        assert end.status == 3 << 8

    adapter.inside(body)


@on(STEPS)
def test_pid_1_is_immune(adapter: Adapter) -> None:
    """The job can't kill, stop or look into the shim."""

    async def body(made: Box) -> None:
        script = "kill -9 1; kill -STOP 1; cat /proc/1/environ; ls /proc/1/fd; echo done"
        assert "done" in (await made.sh(script))[1]
        status, _ = await made.sh("cat /proc/1/environ")
        assert status != 0
        status, _ = await made.sh("ls /proc/1/fd")
        assert status != 0
        assert await made.says("echo still here") == "still here"

    adapter.inside(body)


# --- exec and read-back --------------------------------------------------------------------------------------------


@on(Behaviour.EXEC)
def test_exec_has_the_rights_of_pid_1(adapter: Adapter) -> None:
    """exec's exit code is the process's, and its rights are those of the job exactly."""

    async def body(made: Box) -> None:
        async def run(script: str) -> int:
            return await made.runtime.exec(made.ref, made.process("/bin/sh", "-c", script), deadline=30)

        assert await run("exit 7") == 7
        assert await run("kill -9 $$") == 137
        checks = (
            "grep -q 'NoNewPrivs:.1' /proc/self/status",
            "grep -q 'Seccomp:.2' /proc/self/status",
            "grep -q 'CapBnd:.0000000000000000' /proc/self/status",
            'test "$(id -u):$(id -g)" = 1000:1000',
            'test "$(ulimit -Hn)" = 2048',
        )
        for script in checks:
            assert await run(script) == 0, script
        # The process is in the job's group, where it counts and from which it goes with the job.
        assert await run("grep -q ':pids:' /proc/self/cgroup") == 0

    adapter.inside(body)


@on(Behaviour.EXEC)
def test_exec_that_cannot_run(adapter: Adapter) -> None:
    """A program that is not there is a failure of exec, not an exit code; one that hangs is ended in time."""

    async def body(made: Box) -> None:
        with pytest.raises(ExecutorError) as caught:
            await made.runtime.exec(made.ref, made.process("/nosuch"), deadline=30)
        assert caught.value.kind is ExecutorErrorKind.SPAWN_FAILED
        with pytest.raises(ExecutorError) as caught:
            await made.runtime.exec(made.ref, made.process("/bin/sleep", "1000"), deadline=1)
        assert caught.value.kind is ExecutorErrorKind.TIMEOUT

    adapter.inside(body)


@on(Behaviour.READ_BACK)
def test_what_is_applied_is_what_was_intended(adapter: Adapter) -> None:
    """The effective spec is no weaker than the bundle but where the adapter says so by name."""

    async def body(made: Box) -> None:
        found = compare(made.intended, made.runtime.effective_spec(made.ref))
        assert undeclared(found.weaker, declared_by(adapter.name)) == ()

    adapter.inside(body)


def declared_by(name: str) -> frozenset[str]:
    """What an adapter declares to be weaker, and why is said there."""
    if name == "podman":
        from forgeyard_runtimes.podman.translate import DECLARED

        return DECLARED
    if name == "docker":
        from forgeyard_runtimes.docker.differences import DECLARED_WEAKER

        return DECLARED_WEAKER
    return frozenset()


@on(Behaviour.READ_BACK)
def test_names_and_claims(adapter: Adapter) -> None:
    """An adapter says who it is with its version, and claims no more than the table says."""

    async def main(runtime: ContainerRuntime) -> None:
        name, _, version = runtime.name.partition(" ")
        assert name == adapter.name
        assert version[0].isdigit()
        claims = runtime.capabilities()
        assert runtime.name.startswith(claims.runtime)
        assert claims.user_namespace is not bool(exception(name, Behaviour.USER_NAMESPACE))

    adapter.run(main)


@pytest.mark.daemon("dockerd")
@pytest.mark.parametrize("adapter", [parameter("docker")], indirect=True)
@pytest.mark.parametrize(("plan", "field"), [(RAM_PLAN, "mounts./ram"), (UMASK_PLAN, "process.user.umask")])
def test_what_does_not_apply_is_refused(adapter: Adapter, plan: ContainerPlan, field: str) -> None:
    """A cell that the table leaves out is refused at create, by the field's name, and leaves nothing."""

    async def main(runtime: ContainerRuntime) -> None:
        async with box(runtime, plan) as made:
            with pytest.raises(ForgeyardError, match=field):
                await made.create()
            assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT

    adapter.run(main)


def test_plan_of_these_tests_has_every_limit() -> None:
    """The plan that all adapters run leaves nothing unlimited."""
    assert None not in (PLAN.limits.cpus, PLAN.limits.memory, PLAN.limits.pids, PLAN.limits.shm)
