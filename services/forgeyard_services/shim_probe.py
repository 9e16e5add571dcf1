"""A probe as a step of the service's own init: no helper container, killed by it with all that it started."""

from __future__ import annotations

import os

from forgeyard_model.result import ProcessExit
from forgeyard_process_shim.channel import ShimChannel, ShimDied
from forgeyard_process_shim.protocol import NoExec, StepCommand
from forgeyard_services.contract import ProbeOutcome


async def probe_in(channel: ShimChannel, command: StepCommand, seconds: float) -> ProbeOutcome:
    """Run `command` in the container behind `channel`, which was made with ``probes=True``.

    A container that is gone is an outcome, too: how it ended is told by the end of the service.

    :raises InvalidRequest: no frame can hold the command.
    """
    try:
        done = await channel.run_probe(command, timeout=seconds)
    except ShimDied as error:
        return ProbeOutcome(None, error=str(error))
    if isinstance(done.end, NoExec):
        why = f"{command.argv[0]}: {os.strerror(done.end.errno)}"
        return ProbeOutcome(None, done.output, done.timed_out, error=why)
    return ProbeOutcome(ProcessExit.from_wait_status(done.end.status), done.output, done.timed_out)
