"""Probes: foreground steps beside a service, with output of their own and a time of their own, in a real container."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import shim_sandbox

from forgeyard_model.errors import ExecutorError
from forgeyard_process_shim.probe_pipe import PROBE_TAIL, ProbeEnd
from forgeyard_process_shim.protocol import Exited, NoExec, Started, StepCommand, StepFlag, encode_step

sandbox = shim_sandbox.sandbox

pytestmark = pytest.mark.kernel


async def probe(box: shim_sandbox.Sandbox, script: str, *, timeout: float = 20.0, **more: Any) -> ProbeEnd:
    """Run a shell script as a probe."""
    return await box.channel.run_probe(box.command("/bin/sh", "-c", script, **more), timeout=timeout)


def status(end: ProbeEnd) -> int:
    """The raw status of a probe that had a process."""
    assert isinstance(end.end, Exited)
    return end.end.status


def test_a_probes_output_stays_out_of_the_services_log() -> None:
    """Both streams of a probe come back with it; the service's own output goes on beside it, and only that."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            script = "while ! test -e /tmp/go; do :; done; echo service; exec sleep 700"
            assert isinstance(await box.channel.start_background(box.command("/bin/sh", "-c", script)), Started)
            end = await probe(box, "echo out; echo err >&2; exit 3")
            assert (status(end), end.output, end.timed_out) == (0x300, b"out\nerr\n", False)
            assert (await probe(box, "touch /tmp/go; true")).output == b""
            while not box.out:
                await asyncio.sleep(0)
            assert (bytes(box.out), bytes(box.err)) == (b"service\n", b"")

    asyncio.run(check())


def test_a_probe_past_its_time_is_killed_with_its_children() -> None:
    """`sleep 60` under a shell, its child that ignores signals and one in another session: all dead, service alive."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            await box.channel.start_background(box.command("/bin/sh", "-c", "echo $$ > /tmp/main; exec sleep 700"))
            script = "(trap '' TERM HUP; sleep 60; :) & setsid sleep 60 & echo begun; sleep 60"
            end = await probe(box, script, timeout=0.2)
            assert (end.timed_out, end.output) == (True, b"begun\n")
            assert status(end) == 9
            left = await probe(box, "ps ax | grep -c '[s]leep 60'; kill -0 $(cat /tmp/main)")
            assert (status(left), left.output) == (0, b"0\n")

    asyncio.run(check())


def test_only_the_tail_of_much_output_is_kept() -> None:
    """A probe that writes megabytes neither blocks nor fills memory, and the next one's output is its own."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            end = await probe(box, "head -c 3000000 /dev/zero; echo end")
            assert status(end) == 0
            assert (len(end.output), end.output[-5:]) == (PROBE_TAIL, b"\0end\n")
            assert (await probe(box, "echo next")).output == b"next\n"

    asyncio.run(check())


def test_a_cancelled_probe_leaves_nothing_to_the_next() -> None:
    """Cancelling the caller kills the probe; what it wrote is not the next one's."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            watch = "while ! test -e /tmp/begun; do :; done; echo seen; exec sleep 700"
            await box.channel.start_background(box.command("/bin/sh", "-c", watch))
            first = asyncio.create_task(probe(box, "echo stale; touch /tmp/begun; sleep 60"))
            while not box.out:
                await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            end = await probe(box, "ps ax | grep -c '[s]leep 60'")
            assert end.output == b"0\n"

    asyncio.run(check())


def test_a_probe_that_makes_its_pipe_non_blocking_breaks_no_other() -> None:
    """The pipe's flags are shared by all that have it; each probe starts with its own."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            source = "import os; os.set_blocking(1, False)"
            await box.channel.run_probe(box.command("/usr/bin/python3", "-c", source), timeout=20)
            end = await probe(box, "head -c 300000 /dev/zero && echo whole")
            assert end.output.endswith(b"whole\n")

    asyncio.run(check())


def test_a_missing_program_is_no_time_out() -> None:
    """A probe that can't be run says why."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            end = await box.channel.run_probe(box.command("no-such-probe"), timeout=20)
            assert isinstance(end.end, NoExec)
            assert (end.end.shell_code, end.timed_out) == (127, False)

    asyncio.run(check())


def test_without_a_probe_pipe_there_are_no_probes() -> None:
    """Job containers have none: asked for one they refuse, and a frame that wants it is a step that can't run."""

    async def check() -> None:
        async with sandbox() as box:
            with pytest.raises(ExecutorError) as caught:
                await probe(box, "true")
            assert caught.value.reason == "shim_order"
            end = await box.channel.run_step(box.command("true", probe=True))
            assert isinstance(end, NoExec)
            assert (await box.sh("true")).status == 0

    asyncio.run(check())


def test_the_flag_is_part_of_the_frame() -> None:
    """PROBE travels beside the other flags."""
    frame = encode_step(StepCommand(1, ("true",), probe=True, merge_output=True))
    assert int.from_bytes(frame[9:13], "little") == StepFlag.PROBE | StepFlag.MERGE_OUTPUT
