"""What a pretended job does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from forgeyard_model.errors import ForgeyardError
from forgeyard_model.job import Step
from forgeyard_model.result import ExecutionOutcome

_NONE: Final[Mapping[str, bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FakeStep:
    """How one step is to go. Times in seconds.

    :param exit_code: what it exits with. signal: the number of the signal that ends it instead.
    :param seconds: how long it runs; with `holds` until `FakeAttempt.release` is called, or it is stopped.
    :param output, error_output: what it writes to each stream, at its start.
    :param stubborn: it does not end at the soft signal, only when it is killed.
    :param error: why its program can't be executed; `exec_code` is then 126 or 127.
    """

    exit_code: int = 0
    signal: int = 0
    seconds: float = 0.0
    holds: bool = False
    output: bytes = b""
    error_output: bytes = b""
    stubborn: bool = False
    error: str = ""
    exec_code: int = 127


@dataclass(frozen=True, slots=True)
class FakeService:
    """How one service is to go. Times in seconds from its start.

    :param output: what it writes, at its start. None: what its own health check looks for in its log, if it does.
    :param ready_after: when its probes begin to succeed. None: they never do.
    :param ends_after: when its program ends by itself. None: it runs until the job is over.
    :param exit_code: what it then exits with.
    :param lost: its container was ended from outside, which nobody can blame it for.
    """

    output: bytes | None = None
    ready_after: float | None = 0.0
    ends_after: float | None = None
    exit_code: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class FakeRun:
    """How one job is to go. Times in seconds. What is not said goes well, and at once.

    :param output, error_output: what it writes to each stream as soon as it runs.
    :param service_output: what each service writes, by name.
    :param exit_code: of its last step, and of each step that is sent later.
    :param seconds: how long its last step runs; with `holds` until `release` is called, or it is stopped.
    :param stubborn: its last step does not stop when it is asked to, only when it is killed or its grace is over.
    :param steps: how steps go, by name, in the place of the four above.
    :param services: how services go, by name. Others are ready at once, and live to the end.
    :param files: what it leaves in /work/output, by relative path. None: all that it promised, empty.
    :param outcome: the verdict it comes to where nothing else ends it first, with the evidence that makes it so.
        SANDBOX_VIOLATION has none: the real executor comes to it by no evidence yet.
    :param prepare_seconds: how long it takes to prepare.
    :param refused: what preparing it ends with. broken: what starting it ends with. lost: what waiting ends with.
    """

    output: bytes = b""
    error_output: bytes = b""
    service_output: Mapping[str, bytes] = field(default_factory=lambda: _NONE)
    exit_code: int = 0
    outcome: ExecutionOutcome | None = None
    seconds: float = 0.0
    holds: bool = False
    prepare_seconds: float = 0.0
    refused: ForgeyardError | None = None
    broken: ForgeyardError | None = None
    lost: ForgeyardError | None = None
    stubborn: bool = False
    steps: Mapping[str, FakeStep] = field(default_factory=lambda: MappingProxyType({}))
    services: Mapping[str, FakeService] = field(default_factory=lambda: MappingProxyType({}))
    files: Mapping[str, bytes] | None = None

    def step(self, step: Step, *, last: bool) -> FakeStep:
        """How `step` goes, the `last` of those that the job was started with, or one sent later."""
        if step.name in self.steps:
            return self.steps[step.name]
        if not last:
            return FakeStep()
        return FakeStep(
            exit_code=self._code, signal=self._signal, seconds=self.seconds, holds=self.holds, stubborn=self.stubborn
        )

    def service(self, name: str) -> FakeService:
        """How the service `name` goes."""
        found = self.services.get(name, FakeService())
        written = self.service_output.get(name)
        return (
            found
            if written is None
            else FakeService(written, found.ready_after, found.ends_after, found.exit_code, found.lost)
        )

    @property
    def _code(self) -> int:
        failed = (ExecutionOutcome.FAILED, ExecutionOutcome.RESOURCE_EXCEEDED, ExecutionOutcome.SANDBOX_VIOLATION)
        return self.exit_code or (1 if self.outcome in failed else 0)

    @property
    def _signal(self) -> int:
        return 9 if self.outcome is ExecutionOutcome.OUT_OF_MEMORY and not self.exit_code else 0
