"""What a job with the init's own uid tries against it, in a real container."""

from __future__ import annotations

import asyncio

import pytest
import shim_sandbox

from forgeyard_process_shim.channel import ShimDied

sandbox = shim_sandbox.sandbox

pytestmark = pytest.mark.kernel

# Prints one line for each way in that worked: the test wants none.
FORGE = """
import ctypes, glob, os
libc = ctypes.CDLL(None, use_errno=True)
keepers = [p for p in map(int, filter(str.isdigit, os.listdir('/proc')))
           if open(f'/proc/{p}/comm').read() == 'forgeyard-init\\n']
print('keepers', len(keepers))
for pid in keepers:
    for number in range(32):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_NONBLOCK, os.O_RDWR):
            try:
                os.open(f'/proc/{pid}/fd/{number}', flags)
                print('opened descriptor', pid, number)
            except OSError:
                pass
    for name in ('mem', 'environ', 'maps', 'auxv', 'syscall', 'stack'):
        try:
            if open(f'/proc/{pid}/{name}', 'rb').read(1):
                print('read', pid, name)
        except OSError:
            pass
    for name in ('cwd', 'root', 'exe', 'fd/3', 'map_files', 'ns/pid'):
        try:
            os.readlink(f'/proc/{pid}/{name}')
            print('followed', pid, name)
        except OSError:
            pass
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        if libc.ptrace(request, pid, 0, 0) == 0:
            print('traced', pid)
    handle = libc.syscall(434, pid, 0)  # pidfd_open
    for number in range(16):
        if libc.syscall(438, handle, number, 0) >= 0:  # pidfd_getfd
            print('took descriptor', pid, number)
for name in ('control', 'report', 'stdout', 'stderr'):
    if os.path.lexists(f'/.forgeyard/{name}'):
        print('fifo still there', name)
try:
    os.listdir('/.forgeyard')
    print('listed the directory')
except OSError:
    pass
for path in ('/.forgeyard/init', '/.forgeyard/new'):
    try:
        open(path, 'wb')
        print('wrote', path)
    except OSError:
        pass
print(open('/proc/1/cmdline').read().replace(chr(0), ' ').strip())
"""


def test_channel_can_neither_be_opened_nor_forged() -> None:
    """No descriptor, memory, trace, FIFO or file of PID 1 and of a supervisor is within a job's reach."""

    async def check() -> None:
        async with sandbox() as box:
            await box.channel.start_background(box.command("sleep", "600"))
            end = await box.python(FORGE)
            assert (end.status, bytes(box.err)) == (0, b"")
            assert box.take_out() == b"keepers 2\n/.forgeyard/init fifo\n"

    asyncio.run(check())


@pytest.mark.parametrize("signum", ["KILL", "STOP", "TERM", "SEGV", "TSTP", "XCPU", "PIPE", "CHLD", "64"])
def test_signals_from_the_job_do_not_touch_the_init(signum: str) -> None:
    """PID 1 survives every signal of the job, and still reports the step's own status."""

    async def check() -> None:
        async with sandbox() as box:
            assert (await box.sh(f"kill -{signum} 1; exit 7")).status == 0x700
            assert (await box.sh("exit 0")).status == 0

    asyncio.run(check())


PRLIMIT = """
import resource, sys
for name in sys.argv[1:]:
    resource.prlimit(1, getattr(resource, 'RLIMIT_' + name), (0, 0))
"""


def test_lowered_limits_do_not_cost_a_verdict() -> None:
    """A job that takes PID 1's files, memory, processes and stack away still gets its own status reported."""

    async def check() -> None:
        names = ("FSIZE", "AS", "DATA", "STACK", "NPROC", "NOFILE", "MEMLOCK", "CORE", "SIGPENDING", "MSGQUEUE")
        async with sandbox() as box:
            source = PRLIMIT + "import os; os.fork() or __import__('time').sleep(600)\nos._exit(9)"
            end = await box.step("/usr/bin/python3", "-c", source, *names)
            assert end.status == 0x900, bytes(box.err)
            assert end.leftovers == 1
            # The next step fails by the job's own doing, and it is told so: not a dead init, not a success.
            after = await box.step("/bin/true")
            assert getattr(after, "status", 1) != 0

    asyncio.run(check())


def test_cpu_limit_on_the_init_ends_the_job_as_lost() -> None:
    """The one limit that kills: the kernel's own SIGKILL at RLIMIT_CPU. The container ends, and the end is typed."""

    async def check() -> None:
        async with sandbox() as box:
            # Signals that PID 1 ignores still cost it the time to read them, and these queue up.
            source = PRLIMIT.replace("(0, 0)", "(1, 1)") + "import os\nwhile True: os.kill(1, 40)"
            with pytest.raises(ShimDied):
                await box.step("/usr/bin/python3", "-c", source, "CPU")
            await box.wait_runc()

    asyncio.run(check())


def test_fork_bomb_left_behind_is_gone() -> None:
    """Leftovers that fork for ever are dead at the step's end, with and without a background step."""

    async def check() -> None:
        bomb = "for i in 1 2 3; do setsid sh -c 'while :; do (sleep 0.01 &) ; done' & done; exit 3"
        async with sandbox() as box:
            assert (await box.sh(bomb)).status == 0x300
            await box.channel.start_background(box.command("sleep", "600"))
            assert (await box.sh(bomb)).status == 0x300
            end = await box.sh("ps -eo args= | grep -c '[s]etsid\\|[s]leep 0.01\\|[w]hile'")
            assert (end.status, box.take_out()) == (0x100, b"0\n")

    asyncio.run(check())


def test_stolen_output_descriptors_do_not_reach_the_next_step() -> None:
    """A job that turns its pipes into packet mode, non-blocking or tiny ones does not break the next step's output."""

    async def check() -> None:
        async with sandbox() as box:
            await box.python(
                "import fcntl, os\n"
                "for fd in (1, 2):\n"
                "    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT | os.O_ASYNC)\n"
                "    fcntl.fcntl(fd, fcntl.F_SETOWN, 1); fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)"
            )
            assert (await box.sh("head -c 1000000 /dev/zero")).status == 0
            assert len(box.take_out()) == 1_000_000

    asyncio.run(check())
