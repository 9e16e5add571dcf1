"""What the init does with steps, in a real container."""

from __future__ import annotations

import asyncio
import errno
import signal
from pathlib import Path

import pytest
import shim_sandbox

from forgeyard_process_shim.channel import ShimDied
from forgeyard_process_shim.protocol import BackgroundExited, Exited, NoExec, Stage, Started

sandbox = shim_sandbox.sandbox

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("script", "status"),
    [
        *((f"exit {code}", code << 8) for code in (0, 1, 125, 126, 127, 128, 137, 255)),
        ("kill -9 $$", 9),
        ("kill -TERM $$", 15),
        ("kill -SYS $$", 31),
        ("kill -KILL $PPID; exit 3", 0x300),
    ],
)
def test_raw_status_is_what_the_kernel_gave(script: str, status: int) -> None:
    """`exit 137`, `kill -9` and a seccomp-like death are three different statuses, and PID 1 can't be killed."""

    async def check() -> None:
        async with sandbox() as box:
            assert (await box.sh(script)).status == status

    asyncio.run(check())


def test_segv_is_a_signal() -> None:
    """A crash is reported as signal 11, with or without a core."""

    async def check() -> None:
        async with sandbox() as box:
            end = await box.python("import ctypes; ctypes.string_at(0)")
            assert end.status & 0x7F == signal.SIGSEGV

    asyncio.run(check())


_NOT_RUN = [
    (("no-such-program",), {}, errno.ENOENT, Stage.EXEC, 127),
    (("/no/such/program",), {}, errno.ENOENT, Stage.EXEC, 127),
    (("",), {}, errno.ENOENT, Stage.EXEC, 127),
    (("/usr/bin/env/x",), {}, errno.ENOTDIR, Stage.EXEC, 127),
    (("/tmp",), {}, errno.EACCES, Stage.EXEC, 126),
    (("/tmp/plain",), {}, errno.EACCES, Stage.EXEC, 126),
    (("/tmp/no-magic",), {}, errno.ENOEXEC, Stage.EXEC, 126),
    (("/tmp/lost-interpreter",), {}, errno.ENOENT, Stage.INTERPRETER, 126),
    (("true",), {"cwd": "/nowhere"}, errno.ENOENT, Stage.CHDIR, 126),
    (("true",), {"stdin": "/.forgeyard/nowhere"}, errno.ENOENT, Stage.STDIN, 126),
    (("true", "x" * 200_000), {}, errno.E2BIG, Stage.EXEC, 126),
    (("plain",), {"env": {"PATH": "/tmp:/nowhere"}}, errno.EACCES, Stage.EXEC, 126),
]


def test_a_step_that_cannot_run_says_why() -> None:
    """Every way not to run has its errno and stage, and 127 is kept for `not found`."""

    async def check() -> None:
        async with sandbox() as box:
            await box.sh(
                "echo x > plain; echo 'echo ran' > no-magic; printf '#!/no/where\\n' > lost-interpreter;"
                "chmod +x no-magic lost-interpreter"
            )
            for argv, more, number, stage, code in _NOT_RUN:
                end = await box.step(*argv, **more)
                assert isinstance(end, NoExec), argv
                assert (end.errno, end.stage, end.shell_code) == (number, stage, code), argv
            assert (await box.sh("exit 0")).status == 0

    asyncio.run(check())


def test_path_of_the_step_finds_its_program() -> None:
    """PATH is the step's own; a file that may not be executed hides no later one; no PATH means the usual one."""

    async def check() -> None:
        async with sandbox() as box:
            await box.sh("mkdir a b; echo x > a/tool; printf '#!/bin/sh\\necho found\\n' > b/tool; chmod +x b/tool")
            end = await box.step("tool", env={"PATH": "/tmp/a:/usr/bin/env:/tmp/b"})
            assert (end.status, box.take_out()) == (0, b"found\n")
            assert (await box.step("true", env={})).status == 0

    asyncio.run(check())


def test_leftovers_are_dead_before_the_end_is_reported() -> None:
    """TERM-ignoring, setsid and double-forked children are killed and counted, also when they hold the output."""

    async def check() -> None:
        async with sandbox() as box:
            end = await box.sh(
                "(trap '' TERM HUP; while :; do sleep 60; done) & setsid sleep 600 & (setsid sleep 600 &) ; echo done"
            )
            assert end.status == 0
            assert end.leftovers >= 3
            await box.python("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))")
            assert box.take_out() == b"done\n2\n"  # PID 1 and the one that counts

    asyncio.run(check())


def test_background_steps_and_their_daemons_live_on() -> None:
    """A background step and what it daemonised survive the next steps' sweeps; foreground leftovers do not."""

    async def check() -> None:
        async with sandbox() as box:
            script = "(setsid sh -c 'echo $$ > daemon; exec sleep 600' &) ; echo $$ > main; exec sleep 600"
            started = await box.channel.start_background(box.command("/bin/sh", "-c", script))
            assert isinstance(started, Started)
            await box.sh("until test -s daemon && test -s main; do :; done")
            end = await box.sh("setsid sleep 700 & (setsid sleep 700 &) ; sleep 700 & echo $! > gone")
            assert end.leftovers >= 3
            end = await box.sh("kill -0 $(cat daemon) && kill -0 $(cat main) && ! kill -0 $(cat gone)")
            assert end.status == 0, bytes(box.err)

    asyncio.run(check())


def test_background_end_and_failure_to_start_are_reported() -> None:
    """A background step reports its raw status, or why it never ran; signals reach it by id."""

    async def check() -> None:
        async with sandbox() as box:
            ended: asyncio.Queue[BackgroundExited] = asyncio.Queue()
            box.channel.on_background_end = ended.put_nowait
            missing = await box.channel.start_background(box.command("no-such-program"))
            assert isinstance(missing, NoExec)
            assert missing.errno == errno.ENOENT
            command = box.command("sleep", "600")
            await box.channel.start_background(command)
            box.channel.signal(signal.SIGTERM, command.id)
            end = await ended.get()
            assert (end.id, end.status) == (command.id, signal.SIGTERM)

    asyncio.run(check())


def test_killed_supervisor_leaves_nothing_behind() -> None:
    """A job that kills the keeper of its background step loses that step, and the end is reported as a kill."""

    async def check() -> None:
        async with sandbox() as box:
            command = box.command("sleep", "600")
            await box.channel.start_background(command)
            assert (await box.sh("kill -9 -1; exit 0")).status in (0, 9)
            end = await box.sh("ps ax | grep -c '[s]leep 600'")
            assert (end.status, box.take_out()) == (0x100, b"0\n")
            assert box.channel.background_ends[command.id].status == 9

    asyncio.run(check())


def test_100_mb_of_output_is_whole_when_the_end_comes() -> None:
    """Every byte a step wrote is in the pipes before its end is reported."""

    async def check() -> None:
        async with sandbox() as box:
            assert (await box.sh("head -c 100000000 /dev/zero; echo end >&2")).status == 0
            assert len(box.out) == 100_000_000
            assert bytes(box.err) == b"end\n"

    asyncio.run(check())


def test_merged_output_is_one_exact_stream() -> None:
    """With merge_output the order of the two streams is that of the writes."""

    async def check() -> None:
        async with sandbox() as box:
            await box.sh("for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_output=True)
            assert (box.take_out(), bytes(box.err)) == (b"o1\ne1\no2\ne2\no3\ne3\n", b"")

    asyncio.run(check())


@pytest.mark.parametrize("data", [None, b"", b"a", b"\xfe\xff\x00", b"x" * 300_000])
def test_stdin_ends(data: bytes | None) -> None:
    """No stdin is an immediate end of file, given bytes arrive exactly and then end."""

    async def check() -> None:
        async with sandbox() as box:
            path = "" if data is None else box.channel.write_stdin(1, data)
            end = await box.step("cat", stdin=path)
            assert (end.status, box.take_out()) == (0, data or b"")

    asyncio.run(check())


def test_environment_and_arguments_are_exact() -> None:
    """A step has its own environment and nothing else: 100 KB of it, bytes that are no UTF-8, and empty arguments."""

    async def check() -> None:
        async with sandbox() as box:
            odd = b"\xff\xfe\n\t'\"".decode("utf-8", "surrogateescape")
            env = {"PATH": "/usr/bin", "ODD": odd, "EMPTY": "", "BIG": "b" * 100_000}
            await box.step("/usr/bin/env", "-0", env=env)
            wanted = {f"{key}={value}".encode("utf-8", "surrogateescape") for key, value in env.items()}
            assert set(box.take_out().split(b"\0")) - {b""} == wanted
            await box.step("printf", "[%s]", odd, "", "c")
            assert box.take_out() == b"[\xff\xfe\n\t'\"][][c]"
            await box.step("/usr/bin/env", env={"ONLY": "1"})
            assert box.take_out() == b"ONLY=1\n"

    asyncio.run(check())


def test_step_starts_clean() -> None:
    """No signal is blocked or ignored, no descriptor leaks, the step leads its session, non-blocking does not stick."""

    async def check() -> None:
        async with sandbox() as box:
            await box.python("import os; os.set_blocking(1, False)")
            source = (
                "import os; lines = open('/proc/self/status').read().splitlines();"
                "print([l.split()[1].strip('0') for l in lines if l[:7] in ('SigBlk:', 'SigPnd:')],"
                "sorted(map(int, os.listdir('/proc/self/fd')))[:-1], os.getsid(0) == os.getpid(), os.get_blocking(1))"
            )
            await box.python(source)
            assert box.take_out() == b"['', ''] [0, 1, 2] True True\n"

    asyncio.run(check())


def test_signal_reaches_the_whole_group_and_kill_ends_the_stubborn() -> None:
    """A soft signal goes to the step's process group; kill_step ends what ignores it."""

    async def check() -> None:
        async with sandbox() as box:
            running = asyncio.Event()
            command = box.command("/bin/sh", "-c", "sleep 600; echo after")
            step = asyncio.create_task(box.channel.run_step(command, started=lambda _: running.set()))
            await running.wait()
            box.channel.signal(signal.SIGTERM)
            assert (await step).status == signal.SIGTERM
            running.clear()
            script = "trap '' TERM; touch ready; while :; do sleep 600; done"
            command = box.command("/bin/sh", "-c", script)
            step = asyncio.create_task(box.channel.run_step(command, started=lambda _: running.set()))
            await running.wait()
            box.channel.kill_step()
            end = await step
            assert isinstance(end, Exited)
            assert end.status == signal.SIGKILL

    asyncio.run(check())


def test_signal_from_outside_goes_to_the_step() -> None:
    """TERM to PID 1 from the host's side reaches the foreground step; from inside it does nothing."""

    async def check() -> None:
        async with sandbox() as box:
            assert (await box.sh("kill -TERM 1; kill -INT 1; exit 4")).status == 0x400
            running = asyncio.Event()
            step = asyncio.create_task(
                box.channel.run_step(box.command("sleep", "600"), started=lambda _: running.set())
            )
            await running.wait()
            box.signal_init(signal.SIGTERM)
            assert (await step).status == signal.SIGTERM

    asyncio.run(check())


def test_no_zombies_and_orphans_are_reaped() -> None:
    """Orphans that end while a step runs are reaped by PID 1."""

    async def check() -> None:
        async with sandbox() as box:
            await box.sh("for i in 1 2 3 4 5; do (true & true &) ; done; until ! ps ax | grep -q defunc[t]; do :; done")
            await box.sh("ps -eo stat | grep -c Z")
            assert box.take_out() == b"0\n"

    asyncio.run(check())


def test_finish_and_the_executors_death_end_everything() -> None:
    """FINISH exits 0 with background steps alive; end of file on control kills all and does not."""

    async def check() -> None:
        async with sandbox() as box:
            await box.channel.start_background(box.command("sleep", "600"))
            box.channel.finish()
            assert await box.wait_runc() == 0
        async with sandbox() as box:
            await box.channel.start_background(box.command("sleep", "600"))
            running = asyncio.Event()
            step = asyncio.create_task(
                box.channel.run_step(box.command("sleep", "600"), started=lambda _: running.set())
            )
            await running.wait()
            box.channel.close()
            assert await box.wait_runc() != 0
            with pytest.raises(ShimDied):
                await step

    asyncio.run(check())


def test_workload_is_the_kernels_choice_before_the_init() -> None:
    """Steps carry a higher OOM score than PID 1; an OOM kill is signal 9 of the step and the init goes on."""

    async def check() -> None:
        async with sandbox(memory=64 << 20) as box:
            await box.sh("cat /proc/self/oom_score_adj /proc/1/oom_score_adj")
            mine, init = map(int, box.take_out().split())
            assert mine >= 500 > init
            assert (await box.step("tail", "/dev/zero")).status == 9
            assert (await box.sh("exit 5")).status == 0x500

    asyncio.run(check())


def test_many_steps_leave_no_descriptor_here() -> None:
    """Two hundred steps and a closed channel leave this process with the descriptors it had."""

    async def check() -> None:
        async with sandbox() as box:
            for _ in range(200):
                assert (await box.step("/bin/true")).status == 0

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(check())
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
