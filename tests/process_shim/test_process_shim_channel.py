"""The executor's end of the channel, against a shim that misbehaves as a real one can't be made to."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_process_shim.channel import ShimChannel, ShimDied
from forgeyard_process_shim.protocol import VERSION, Exited, ProtocolError, StepCommand

STEP = StepCommand(1, ("true",))


def report(kind: int, *words: int) -> bytes:
    """A report as init.c writes it."""
    return struct.pack(f"<IB{len(words)}Q", 1 + 8 * len(words), kind, *words)


HELLO = report(0x81, VERSION, 1, 0, 0)
STARTED = report(0x82, 1, 5)
EXITED = report(0x84, 1, 0, 0, 0, 0, 0, 0, 0)


class FakeShim:
    """The other ends of a channel, held by the test."""

    def __init__(self, directory: Path) -> None:
        self.control = os.open(directory / "control", os.O_RDONLY | os.O_NONBLOCK)
        self.rest = [os.open(directory / name, os.O_WRONLY | os.O_NONBLOCK) for name in ("stdout", "stderr")]
        self.report = os.open(directory / "report", os.O_WRONLY | os.O_NONBLOCK)

    def say(self, data: bytes) -> None:
        """Write to the report FIFO."""
        os.write(self.report, data)

    def die(self) -> None:
        """Close every end, as the kernel does for a dead process."""
        for fd in (self.control, self.report, *self.rest):
            if fd >= 0:
                os.close(fd)
        self.control, self.report, self.rest = -1, -1, []


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[ShimChannel]:
    """A channel in a fresh directory."""
    binary = tmp_path / "shim"
    binary.write_bytes(b"binary")
    binary.chmod(0o555)
    made = ShimChannel.create(tmp_path_ctl(tmp_path), shim=binary, uid=os.getuid(), gid=os.getgid())
    yield made
    made.close()


def tmp_path_ctl(tmp_path: Path) -> Path:
    """The control directory below `tmp_path`."""
    path = tmp_path / "ctl"
    path.mkdir(exist_ok=True)
    return path


def test_directory_holds_what_the_sandbox_needs(channel: ShimChannel, tmp_path: Path) -> None:
    """Four FIFOs that open in one direction for the job's uid, and the init as a link; names go, ends stay."""
    ctl = tmp_path_ctl(tmp_path)
    modes = {
        path.name: (stat.S_ISFIFO(path.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) for path in ctl.iterdir()
    }
    assert modes == {
        "control": (True, 0o400),
        "report": (True, 0o200),
        "stdout": (True, 0o600),
        "stderr": (True, 0o600),
        "init": (False, 0o555),
    }
    assert (ctl / "init").samefile(tmp_path / "shim")
    channel.unlink()
    channel.unlink()
    assert [path.name for path in ctl.iterdir()] == ["init"]


def test_init_that_others_could_not_run_is_copied(tmp_path: Path) -> None:
    """A shim installed with another mode is copied and made executable, and left as it was."""
    binary = tmp_path / "shim"
    binary.write_bytes(b"binary")
    binary.chmod(0o700)
    made = ShimChannel.create(tmp_path_ctl(tmp_path), shim=binary, uid=os.getuid(), gid=os.getgid())
    made.close()
    copy = tmp_path / "ctl" / "init"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o555
    assert not copy.samefile(binary)


def test_failed_create_is_typed_and_leaks_nothing(tmp_path: Path) -> None:
    """A directory that is not there, or used before, is an I/O error of ours."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ExecutorError) as caught:
        ShimChannel.create(tmp_path / "none", shim=tmp_path / "shim", uid=0, gid=0)
    assert caught.value.reason == "shim_channel"
    assert len(os.listdir("/proc/self/fd")) <= before


def test_silent_and_wrong_shims_are_told_apart(channel: ShimChannel, tmp_path: Path) -> None:
    """No HELLO in time is a time-out; another version names the command that rebuilds."""

    async def check() -> None:
        with pytest.raises(ExecutorError) as caught:
            await channel.hello(timeout=0.01)
        assert caught.value.reason == "shim_silent"
        shim = FakeShim(tmp_path_ctl(tmp_path))
        shim.say(report(0x81, 99, 1, 0, 0))
        with pytest.raises(ExecutorError) as caught:
            await channel.hello(timeout=5)
        assert caught.value.reason == "shim_version"
        shim.die()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", ShimDied),
        (STARTED + EXITED[:9], ShimDied),
        (b"\xff" * 9, ProtocolError),
        (report(0x84, 7, *[0] * 7), ProtocolError),
    ],
)
def test_step_never_ends_well_without_its_end(
    channel: ShimChannel, tmp_path: Path, said: bytes, error: type[Exception]
) -> None:
    """End of file, half a report, garbage and another step's end are errors for the step, and for later ones."""

    async def check() -> None:
        shim = FakeShim(tmp_path_ctl(tmp_path))
        shim.say(HELLO)
        await channel.hello(timeout=5)
        step = asyncio.create_task(channel.run_step(STEP))
        await asyncio.sleep(0)
        if said:
            shim.say(said)
        shim.die()
        with pytest.raises(error):
            await step
        with pytest.raises(error):
            await channel.run_step(STEP)
        channel.signal(15)
        channel.finish()

    asyncio.run(check())


def test_executor_is_the_only_writer_after_hello(channel: ShimChannel, tmp_path: Path) -> None:
    """Once the channel closes, the shim reads end of file: no other descriptor holds the FIFO open."""

    async def check() -> None:
        shim = FakeShim(tmp_path_ctl(tmp_path))
        shim.say(HELLO)
        await channel.hello(timeout=5)
        with pytest.raises(BlockingIOError):
            os.read(shim.control, 1)
        channel.close()
        assert os.read(shim.control, 1) == b""
        channel.close()
        shim.die()

    asyncio.run(check())


def test_command_larger_than_the_pipe_arrives_whole(channel: ShimChannel, tmp_path: Path) -> None:
    """A frame of a megabyte goes out as the shim reads, without blocking the loop."""

    async def check() -> None:
        shim = FakeShim(tmp_path_ctl(tmp_path))
        shim.say(HELLO)
        await channel.hello(timeout=5)
        step = asyncio.create_task(channel.run_step(StepCommand(1, ("x" * 1_000_000,))))
        got = b""
        while len(got) < 1_000_000:
            await asyncio.sleep(0)
            try:
                got += os.read(shim.control, 1 << 16)
            except BlockingIOError:
                continue
        shim.say(STARTED + EXITED)
        assert isinstance(await step, Exited)
        assert struct.unpack_from("<I", got)[0] == len(got) - 4
        shim.die()

    asyncio.run(check())


def test_cancelled_step_is_killed_and_the_next_waits_for_its_end(channel: ShimChannel, tmp_path: Path) -> None:
    """Cancelling the caller sends a kill; the next step's frame goes out only after the first one's end."""

    async def check() -> None:
        shim = FakeShim(tmp_path_ctl(tmp_path))
        shim.say(HELLO)
        await channel.hello(timeout=5)
        first = asyncio.create_task(channel.run_step(STEP))
        await asyncio.sleep(0)
        os.read(shim.control, 4096)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert os.read(shim.control, 4096) == b"\5\0\0\0\4\1\0\0\0"
        second = asyncio.create_task(channel.run_step(StepCommand(2, ("true",))))
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            os.read(shim.control, 1)
        shim.say(EXITED)
        await sent(shim)
        shim.say(report(0x84, 2, *[0] * 7))
        assert (await second).id == 2
        shim.die()

    asyncio.run(check())


async def sent(shim: FakeShim) -> None:
    """Wait until a command is there to read."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(shim.control, ready.set)
    await ready.wait()
    loop.remove_reader(shim.control)


def test_step_files(channel: ShimChannel, tmp_path: Path) -> None:
    """Scripts are everyone's to read, input the job's alone; names that could replace ours are refused."""
    ctl = tmp_path_ctl(tmp_path)
    assert channel.write_script("step-1.sh", "echo \udcff\n") == "/.forgeyard/step-1.sh"
    assert (ctl / "step-1.sh").read_bytes() == b"echo \xff\n"
    assert stat.S_IMODE((ctl / "step-1.sh").stat().st_mode) == 0o444
    path = channel.write_stdin(1, b"in")
    assert stat.S_IMODE((ctl / "stdin-1").stat().st_mode) == 0o400
    channel.remove(path)
    channel.remove(path)
    assert not (ctl / "stdin-1").exists()
    for name in ("../x", "control", "init", "", "..", "a/b"):
        with pytest.raises(InvalidRequest):
            channel.write_script(name, "")
    with pytest.raises(ExecutorError):
        channel.write_script("step-1.sh", "again")
