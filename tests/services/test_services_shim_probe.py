"""Probes of a service in a real container."""

from __future__ import annotations

import asyncio

import pytest
from shim_sandbox import sandbox

from forgeyard_model.result import ProcessExit
from forgeyard_services.contract import ProbeOutcome
from forgeyard_services.shim_probe import probe_in

pytestmark = pytest.mark.kernel


def test_outcomes_of_real_probes() -> None:
    """An exit with its words, a time-out, a program that is not there, and a container that is gone."""

    async def check() -> None:
        async with sandbox(probes=True) as box:
            script = box.command("/bin/sh", "-c", "echo no response >&2; exit 2")
            assert await probe_in(box.channel, script, 20) == ProbeOutcome(ProcessExit(0x200, code=2), b"no response\n")
            outcome = await probe_in(box.channel, box.command("sleep", "60"), 0.05)
            assert (outcome.timed_out, outcome.exit) == (True, ProcessExit(9, signal=9))
            outcome = await probe_in(box.channel, box.command("pg_is_ready"), 20)
            assert (outcome.exit, outcome.error) == (None, "pg_is_ready: No such file or directory")
            begun = asyncio.ensure_future(probe_in(box.channel, box.command("sleep", "60"), 20))
            await asyncio.sleep(0)
            box.channel.finish()
            assert (await begun).error == "the job's init ended before the job did"
            assert (await probe_in(box.channel, box.command("true"), 20)).exit is None
            assert (box.out, box.err) == (b"", b"")

    asyncio.run(check())
