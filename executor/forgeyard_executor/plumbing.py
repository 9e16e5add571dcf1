"""How containers get into an attempt's network where that is done at their gates: in which order, and what then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forgeyard_model.errors import SandboxError, SandboxErrorKind


@dataclass(slots=True)
class Plumbing:
    """Of one attempt. Whoever waits here is cancelled when the attempt ends before.

    :ivar put: puts what is known once all are connected to where the containers read it.
    """

    put: list[Callable[[], None]] = field(default_factory=list)
    job_pid: int = 0
    job_connected: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def connected(self, pid: int) -> None:
        """Process `pid` is the job's first, and its network is there: others may join it."""
        self.job_pid = pid
        self.job_connected.set()

    def settle(self) -> None:
        """All are connected: files get their last words, and programs may run."""
        for put in self.put:
            put()
        self.settled.set()

    def check_joined(self, name: str, pid: int) -> None:
        """That process `pid` is in the job's namespace, as a runtime was told.

        :raises SandboxError: NETWORK_SETUP_FAILED; the container must then be destroyed unreleased.
        """
        try:
            own, jobs = (Path(f"/proc/{each}/ns/net").stat().st_ino for each in (pid, self.job_pid))
        except OSError as error:
            raise _apart(name, f"it can't be seen: {error}") from error
        if own != jobs:
            raise _apart(name, f"it is in net:[{own}], the job in net:[{jobs}]")


def _apart(name: str, details: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED,
        "gate_network_shared",
        f"service {name} is not in the job's network namespace",
        details=details,
        resolution="check the runtime's version and configuration; nothing of the service was started",
    )
