"""What the supervisor needs of whoever makes containers: a launcher, and each service's container behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from forgeyard_model.plan import ImageHealthcheck
from forgeyard_model.result import Evidence, ProcessExit
from forgeyard_model.services import ServiceSpec


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """How a service's program ended.

    :param exit: None when it never ran, or when its whole container was lost.
    :param oom: the service's memory limit killed it.
    :param error: why there is no exit: it could not be executed, or its container died.
    :param lost: its container was ended from outside, by no limit of its own: no service is to be blamed for that.
    """

    exit: ProcessExit | None
    oom: bool = False
    error: str = ""
    lost: bool = False

    def __str__(self) -> str:
        """``exit 3``, ``signal SIGKILL, out of memory``, or the error."""
        how = str(self.exit) if self.exit is not None else self.error or "its container was lost"
        return f"{how}, out of memory" if self.oom else how


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """How a command inside a service ended.

    :param exit: None when it could not be executed; `error` then says why.
    :param output: the end of what it wrote, both streams together.
    :param timed_out: it was killed, with its children, since its time was up.
    """

    exit: ProcessExit | None
    output: bytes = b""
    timed_out: bool = False
    error: str = ""


class RunningService(Protocol):
    """One service's container: its init is up at an open gate, its program starts with `start_main`."""

    @property
    def address(self) -> str:
        """Where the service is reached on the job's network, for people."""
        ...

    @property
    def identity(self) -> str:
        """Digest of what it runs on, as provenance shows it."""
        ...

    @property
    def exposed_ports(self) -> tuple[str, ...]:
        """As its image has them: ``5432/tcp``."""
        ...

    @property
    def image_health(self) -> ImageHealthcheck | None:
        """The image's own HEALTHCHECK."""
        ...

    @property
    def ended(self) -> asyncio.Future[ServiceEnd]:
        """Done once its program has ended, by itself or by `kill`; also when it could not be executed.

        Never an exception, never to be cancelled.
        """
        ...

    async def start_main(self) -> None:
        """Start its program. That it can't be executed shows in `ended`.

        :raises ForgeyardError: the container could not be asked.
        """
        ...

    async def probe(self, argv: tuple[str, ...], seconds: float) -> ProbeOutcome:
        """Run a command inside, as the service's user and with its environment, for `seconds`. One at a time.

        Cancelled: the command is killed with its children. A container that is gone is an outcome with `error`.
        """
        ...

    async def connect(self, port: int, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a port of it, from the job's network, by its address. The caller closes it.

        :raises OSError: refused or unreachable. TimeoutError, which is one, after `seconds`.
        """
        ...

    def output(self) -> AsyncGenerator[bytes, None]:
        """What it writes, both streams in order of arrival, from the first byte on, until its input is closed."""
        ...

    async def output_tail(self, size: int) -> bytes:
        """The last `size` bytes of what it has written by now, what is still in its pipes included.

        Also after `kill`, until its output is removed.
        """
        ...

    async def kill(self) -> None:
        """End everything in the container, and see it dead. Idempotent.

        :raises ForgeyardError: something survived.
        """
        ...

    def evidence(self) -> Evidence:
        """What the kernel counted for it. Also after `kill`, until its control group is removed."""
        ...


class Launcher(Protocol):
    """Makes the containers of one attempt's services. It gives back what it made when the attempt is cleaned up."""

    async def launch(self, spec: ServiceSpec) -> RunningService:
        """A container for `spec`, its program not started yet. Called once for each service, several at a time.

        Cancelled or failed: what was made is the launcher's to undo, with the attempt or before.

        :raises ForgeyardError: it could not be made.
        """
        ...
