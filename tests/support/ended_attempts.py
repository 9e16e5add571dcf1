"""Attempts that have ended, for whoever counts, traces or records them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from forgeyard_api.serve.attempt_types import AttemptEvent, AttemptState, AttemptView, EventKind
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.result import (
    EndCause,
    Evidence,
    ExecutionOutcome,
    ExecutionResult,
    OutputSummary,
    ProcessExit,
    Provenance,
    ResourceUsage,
    StepResult,
)

BEGIN: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PHASES: Final = {"pull": 1.0, "network": 0.5, "plan": 0.25, "setup": 0.5, "start": 0.125, "gate": 0.125}


def at(seconds: float) -> datetime:
    """That long after `BEGIN`, when the attempt was taken in."""
    return BEGIN + timedelta(seconds=seconds)


TIMES: Final = {
    EventKind.QUEUED: at(0),
    EventKind.PREPARING: at(2),
    EventKind.PREPARED: at(4),
    EventKind.RUNNING: at(4),
    EventKind.ENDED: at(20),
}


def result(**changes: Any) -> ExecutionResult:
    """Of two steps of five seconds each, which began at 5, and a second of cleaning up."""
    steps = tuple(
        StepResult(name, ProcessExit(0, code=0), at(5 + 5 * number), 5.0) for number, name in enumerate(("one", "two"))
    )
    provenance = Provenance(
        profile=ExecutionProfile.STANDARD_CI,
        isolation=IsolationLevel.CONTAINER,
        user_namespace=True,
        network=NetworkMode.DENY,
        seccomp="general-build",
        runtime="runc 1.2.3",
        rootfs="host",
        plan_digest="sha256:1",
        bundle_digest="sha256:2",
    )
    made = ExecutionResult(
        sandbox_id="01SANDBOX",
        attempt_id="attempt-1",
        name="build",
        outcome=ExecutionOutcome.SUCCEEDED,
        failure_class=ExecutionOutcome.SUCCEEDED.failure_class,
        exit_code=0,
        message="succeeded",
        end_cause=EndCause.EXITED,
        cancellation=None,
        exit=ProcessExit(0, code=0),
        steps=steps,
        started_at=at(4),
        finished_at=at(16),
        evidence=Evidence(),
        usage=ResourceUsage(peak_memory=100 << 20),
        output=OutputSummary(),
        outputs=(),
        provenance=provenance,
        startup=PHASES,
    )
    return replace(made, **changes)


def ended(
    ran: ExecutionResult | None = None,
    error: ForgeyardError | None = None,
    *,
    kind: EventKind = EventKind.ENDED,
    **changes: Any,
) -> AttemptEvent:
    """The event of an attempt's end."""
    view = AttemptView(
        attempt_id="attempt-1",
        tenant="tenant-x",
        name="build",
        state=AttemptState.ENDED,
        owner_uid=1000,
        created_at=BEGIN,
        reserved=ResourceReservation(1.0, 1 << 20),
        runtime="runc",
        sandbox_id="01SANDBOX",
        result=ran,
        error=error,
    )
    return AttemptEvent(at(20), kind, "attempt-1", "", 1000, replace(view, **changes))
