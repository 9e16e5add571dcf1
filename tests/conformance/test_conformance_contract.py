"""Every adapter keeps the contract: the life of a container, and what is inside, are the same on all of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import Adapter, adapter_of, on
from contract_box import UMASK_PLAN, Box, box, open_box

from forgeyard_host.cgroups import AttemptCgroup
from forgeyard_model.errors import ForgeyardError
from forgeyard_process_shim.channel import ShimDied
from forgeyard_process_shim.protocol import Exited, NoExec
from forgeyard_runtimes.cells import Behaviour
from forgeyard_runtimes.contract import ContainerRef, ContainerRuntime, ContainerStatus
from forgeyard_runtimes.find import COMMAND_LINES, CONTRACT_ONLY

pytestmark = pytest.mark.kernel

STEPS, FILES, LIMITS = Behaviour.STEPS, Behaviour.FILES, Behaviour.LIMITS
PRIVILEGES, NAMESPACES = Behaviour.PRIVILEGES, Behaviour.NAMESPACES


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """The adapter of this test's parameter."""
    yield from adapter_of(request)


# --- the life of a container ---------------------------------------------------------------------------------------


@on(STEPS, pretended=True)
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
    async with asyncio.timeout(60):
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
            if adapter.name not in CONTRACT_ONLY:  # whose processes on the host are those of a kernel of its own
                command = Path(f"/proc/{made.pid}/cmdline").read_bytes().split(b"\0")
                assert command[0] == b"/.forgeyard/init"
                assert [int(pid) for pid in _members(made)] == [made.pid]
            made.open_gate()
            assert await made.says("echo released") == "released"

    adapter.run(main)


def _members(made: Box) -> list[str]:
    return (_directory(made.group, made.own_group) / "cgroup.procs").read_text().split()


def _directory(group: AttemptCgroup, path: str) -> Path:
    """Where the kernel shows the control group `path`, in the hierarchy that counts processes."""
    host = group.host
    return Path(host.controllers["pids"] + host.base + path)


@on(STEPS)
def test_kill_takes_everything_along(adapter: Adapter) -> None:
    """A killed container leaves no process, and the group it was in can be removed: it is empty."""

    async def body(made: Box) -> None:
        await made.channel.start_background(made.command("/bin/sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000"))
        group = _directory(made.group, made.own_group)
        assert len(_members(made)) >= 2
        await made.kill()
        await _emptied(made, at_once=adapter.name not in CONTRACT_ONLY)
        with pytest.raises(ShimDied):
            await made.sh("true")
        await made.runtime.remove(made.ref)
        # A command line leaves the empty group to the owner of the one above.
        assert not group.exists() or adapter.name in COMMAND_LINES

    adapter.apart(body)


async def _emptied(made: Box, *, at_once: bool) -> None:
    """Nothing is left in the group: a pid namespace goes with its first process, a kernel's helpers soon after it."""
    async with asyncio.timeout(60):
        while not at_once and not made.group.empty("job"):
            await asyncio.sleep(0.02)  # each of several processes has to see it, and nothing announces the last
    assert made.group.empty("job")


@on(STEPS, pretended=True)
def test_kill_of_a_dead_container(adapter: Adapter) -> None:
    """Killing what is dead is what was wanted."""

    async def body(made: Box) -> None:
        await made.kill()
        await made.runtime.kill(made.ref, made.pidfd)

    adapter.apart(body)


@on(STEPS, pretended=True)
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


@on(STEPS, pretended=True)
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


@on(Behaviour.IMMUNE_INIT)
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
