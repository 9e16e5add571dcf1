"""A result, for tests of what is done with results."""

from __future__ import annotations

from datetime import UTC, datetime

from forgeyard_model.errors import FailureClass
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
)

START = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
RESULT = ExecutionResult(
    sandbox_id="01j00000000000000000000000",
    attempt_id="a",
    name="job",
    outcome=ExecutionOutcome.FAILED,
    failure_class=FailureClass.WORKLOAD,
    exit_code=1,
    message="step 'run' failed: exit 1",
    end_cause=EndCause.EXITED,
    cancellation=None,
    exit=ProcessExit.from_wait_status(256),
    steps=(),
    started_at=START,
    finished_at=START,
    evidence=Evidence(),
    usage=ResourceUsage(),
    output=OutputSummary(),
    outputs=(),
    provenance=Provenance(
        profile=ExecutionProfile.STANDARD_CI,
        isolation=IsolationLevel.NAMESPACE,
        user_namespace=True,
        network=NetworkMode.DENY,
        seccomp="general-build@1",
        runtime="runc 1.1.5",
        rootfs="host:sha256:00",
        plan_digest="sha256:01",
        bundle_digest="sha256:02",
    ),
)
