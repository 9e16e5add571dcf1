"""Run untrusted jobs, each from one generated OCI bundle.

async with Executor.open() as executor:
    async with executor.run(Job(rootfs="host", steps=[Step("make", "test")]), source=".") as execution:
        result = await execution.wait()
"""

from forgeyard_executor.execution import Execution
from forgeyard_executor.executor import Executor
from forgeyard_executor.recovery import RecoveryReport, SandboxInfo, list_sandboxes
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.enforcement import Enforcement, PlanReport, PlanRow
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    FailureClass,
    ForgeyardError,
    InvalidRequest,
    SandboxError,
    SandboxErrorKind,
)
from forgeyard_model.job import Job, Output, Shell, Step, Timeouts, When
from forgeyard_model.limits import Limits, ResourceLimits
from forgeyard_model.policy import ApprovedHostPath, SourceMode
from forgeyard_model.policy import NetworkPolicy as Network
from forgeyard_model.profile import ExecutionProfile as Profile
from forgeyard_model.result import CancellationReason, ExecutionResult, Outcome

__all__ = [
    "ApprovedHostPath",
    "CancellationReason",
    "Enforcement",
    "Execution",
    "ExecutionResult",
    "Executor",
    "ExecutorConfig",
    "ExecutorError",
    "ExecutorErrorKind",
    "FailureClass",
    "ForgeyardError",
    "InvalidRequest",
    "Job",
    "Limits",
    "Network",
    "Outcome",
    "Output",
    "PlanReport",
    "PlanRow",
    "Profile",
    "RecoveryReport",
    "ResourceLimits",
    "SandboxError",
    "SandboxErrorKind",
    "SandboxInfo",
    "Shell",
    "SourceMode",
    "Step",
    "Timeouts",
    "When",
    "list_sandboxes",
]
