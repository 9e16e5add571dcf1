"""What came of an attempt (seed, sections 116-122): outcome, exit, and the evidence behind both."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from forgeyard_model.cache import CacheReport
from forgeyard_model.errors import FailureClass
from forgeyard_model.network import NetworkEvidence
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.profile import ExecutionProfile


class ExecutionOutcome(StrEnum):
    """The verdict. The exit code stays separate from it (section 118)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    RESOURCE_EXCEEDED = "resource_exceeded"
    SANDBOX_VIOLATION = "sandbox_violation"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"

    @property
    def failure_class(self) -> FailureClass:
        """The class a scheduler maps it into."""
        return _CLASS[self]


Outcome = ExecutionOutcome

_CLASS: Final = {
    ExecutionOutcome.SUCCEEDED: FailureClass.NONE,
    ExecutionOutcome.FAILED: FailureClass.WORKLOAD,
    ExecutionOutcome.CANCELLED: FailureClass.CANCELLED,
    ExecutionOutcome.TIMED_OUT: FailureClass.TIMEOUT,
    ExecutionOutcome.OUT_OF_MEMORY: FailureClass.RESOURCE,
    ExecutionOutcome.RESOURCE_EXCEEDED: FailureClass.RESOURCE,
    ExecutionOutcome.SANDBOX_VIOLATION: FailureClass.SECURITY,
    ExecutionOutcome.INFRASTRUCTURE_FAILURE: FailureClass.INFRASTRUCTURE,
}


class CancellationReason(StrEnum):
    """Why somebody stopped the attempt (section 106)."""

    USER = "user"
    RUN_CANCELLED = "run_cancelled"
    SUPERSEDED = "superseded"
    FAIL_FAST = "fail_fast"
    LEASE_EXPIRED = "lease_expired"
    RUNNER_DRAIN = "runner_drain"
    SHUTDOWN = "shutdown"


class EndCause(StrEnum):
    """What ended the steps: their own end, or one of us, or the loss of the sandbox."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    SANDBOX_DIED = "sandbox_died"
    INFRASTRUCTURE = "infrastructure"
    SERVICE_FAILED = "service_failed"


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """A raw wait status taken apart: `code` or `signal`, never both. `raw` as wait(2) gives it."""

    raw: int
    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False

    @classmethod
    def from_wait_status(cls, raw: int) -> ProcessExit:
        """Read a status of wait(2): `exit 137` and `kill -9` stay two different facts."""
        if raw & 0x7F:
            return cls(raw, signal=raw & 0x7F, core_dumped=bool(raw & 0x80))
        return cls(raw, code=(raw >> 8) & 0xFF)

    @property
    def ok(self) -> bool:
        """Exit code 0."""
        return self.code == 0

    @property
    def shell_code(self) -> int:
        """As a shell shows it: the code, or 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit {self.code}"
        try:
            return f"signal {signal.Signals(self.signal or 0).name}"
        except ValueError:
            return f"signal {self.signal}"


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step. `exit` is None when it was skipped, never executed, or lost; `error` says why.

    exec_code: 126 or 127 when it could not be executed. duration: seconds. leftovers: processes the step left
    behind that the shim killed.
    """

    name: str
    exit: ProcessExit | None
    started_at: datetime | None = None
    duration: float | None = None
    skipped: bool = False
    masked: bool = False
    error: str = ""
    exec_code: int | None = None
    leftovers: int = 0

    @property
    def failed(self) -> bool:
        """It ended badly, or could not run at all. A background step that still runs has not failed."""
        return bool(self.error) or (self.exit is not None and not self.exit.ok)


@dataclass(frozen=True, slots=True)
class MemoryEvidence:
    """Bytes; `oom_kills` counts kills by the memory limit of this sandbox alone. None: the host can't tell."""

    limit: int | None = None
    peak: int | None = None
    oom_kills: int | None = None
    tmpfs: int | None = None


@dataclass(frozen=True, slots=True)
class PidsEvidence:
    """`refused`: how often a fork met the limit."""

    limit: int | None = None
    peak: int | None = None
    refused: int | None = None


@dataclass(frozen=True, slots=True)
class DiskEvidence:
    """Bytes of the writable layer. `full`: it was seen with no room left while the job ran.

    out_of_files: it is full of files, not of bytes. watched: no filesystem holds the limit; the executor looks, and
    kills the job that is past it, so `limit` can be overrun by what is written between two looks.
    """

    limit: int | None = None
    peak: int | None = None
    full: bool = False
    out_of_files: bool = False
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Kernel facts, read from outside the job, that the verdict rests on."""

    memory: MemoryEvidence = field(default_factory=MemoryEvidence)
    pids: PidsEvidence = field(default_factory=PidsEvidence)
    disk: DiskEvidence = field(default_factory=DiskEvidence)


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Observational (section 122): seconds and bytes, None where the platform can't tell."""

    cpu_time: float | None = None
    peak_memory: int | None = None
    disk_written: int | None = None
    io_read: int | None = None
    io_written: int | None = None


@dataclass(frozen=True, slots=True)
class OutputSummary:
    """Bytes the job wrote per stream, and how many in the middle were not kept."""

    stdout_bytes: int = 0
    stderr_bytes: int = 0
    log_truncated: bool = False
    dropped_bytes: int = 0
    spool_error: str = ""


@dataclass(frozen=True, slots=True)
class CollectedOutput:
    """One declared output after collection. `missing` ones that were required make the job Failed."""

    path: str
    files: int = 0
    bytes: int = 0
    missing: bool = False
    optional: bool = False
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageUsed:
    """Which image a job ran in, and how it came here.

    :param asked: the reference as the job had it, also where a lock put a digest in the place of its tag.
    :param pinned: the same image by digest.
    :param platform: what was chosen for, as OS/ARCH.
    :param source: ``pulled`` for this job; ``unpacked``, when its bytes were there; ``present``, when all of it was.
    """

    asked: str
    pinned: str
    platform: str
    source: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What really ran, and behind which boundary. Nothing here is a claim that was not read back.

    :param stricter: where the runtime applied more than the job's bundle says, and does not always: ``field: what``.
    :param engine_image: the image at the runtime's engine that the root is made of, as the engine calls it; empty where
        the executor unpacked the image itself.
    """

    profile: ExecutionProfile
    isolation: IsolationLevel
    user_namespace: bool
    network: NetworkMode
    seccomp: str
    runtime: str
    rootfs: str
    plan_digest: str
    bundle_digest: str
    impure: tuple[str, ...] = ()
    uid_base: int | None = None
    image: ImageUsed | None = None
    stricter: tuple[str, ...] = ()
    engine_image: str = ""


class ServiceState(StrEnum):
    """How far a service came.

    READY, UNPROVEN: it lived to the end of the job; the second had no way to show that it was ready. COMPLETED: it
    had to exit 0 and did. FAILED: it never got ready. DIED: it ended by itself after it was ready. STOPPED: it was
    not ready yet when the start was given up for another cause. NOT_STARTED: what it waited for never came.
    """

    READY = "ready"
    COMPLETED = "completed"
    UNPROVEN = "unproven"
    FAILED = "failed"
    DIED = "died"
    STOPPED = "stopped"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class ServiceResult:
    """One service.

    :param identity: digest of its image, or of the host rootfs; empty when it never got that far.
    :param readiness: how it had to show that it is ready, in words.
    :param ports_open, ports_shut: of the ports that its image exposes, where these were its readiness.
    :param ready_after: seconds from the start of its program.
    :param exit: None while its program ran, until we ended it.
    :param oom: its memory limit killed it.
    :param log_tail: last lines of its output, cut to a bound; bytes that are no UTF-8 are replaced.
    :param last_probe: what the last probe said.
    :param message: what went wrong, for people; empty when nothing did.
    """

    name: str
    state: ServiceState
    image: str | None = None
    identity: str = ""
    readiness: str = ""
    ports_open: tuple[int, ...] = ()
    ports_shut: tuple[int, ...] = ()
    ready_after: float | None = None
    exit: ProcessExit | None = None
    oom: bool = False
    log_tail: tuple[str, ...] = ()
    last_probe: str = ""
    message: str = ""
    address: str = ""
    evidence: Evidence = field(default_factory=Evidence)


CLEANUP_NOTE: Final = "cleanup: "
"""How a note of a result begins that says what could not be undone."""
_NO_PHASES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The whole of it. `exit` is the deciding step's; `exit_code` is what the command line exits with.

    startup: seconds by phase, in order. notes: facts worth a reader's time that change no verdict.
    """

    sandbox_id: str
    attempt_id: str
    name: str
    outcome: ExecutionOutcome
    failure_class: FailureClass
    exit_code: int
    message: str
    end_cause: EndCause
    cancellation: CancellationReason | None
    exit: ProcessExit | None
    steps: tuple[StepResult, ...]
    started_at: datetime
    finished_at: datetime
    evidence: Evidence
    usage: ResourceUsage
    output: OutputSummary
    outputs: tuple[CollectedOutput, ...]
    provenance: Provenance
    startup: Mapping[str, float] = field(default_factory=lambda: _NO_PHASES)
    notes: tuple[str, ...] = ()
    caches: tuple[CacheReport, ...] = ()
    services: tuple[ServiceResult, ...] = ()
    network: NetworkEvidence | None = None
