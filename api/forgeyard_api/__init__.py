"""What a Python program uses: jobs, policies, results and the executor, under the names of the docs.

Nothing is imported until it is asked for, so that `forgeyard --help` costs no client, pydantic or asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from forgeyard_executor import Executor
    from forgeyard_model.errors import ExecutorError, ForgeyardError, InvalidRequest, SandboxError
    from forgeyard_model.job import Job, Output, Shell, Step, When
    from forgeyard_model.limits import Limits
    from forgeyard_model.policy import NetworkPolicy as Network
    from forgeyard_model.policy import SourceMode
    from forgeyard_model.profile import ExecutionProfile as Profile
    from forgeyard_model.result import CancellationReason, ExecutionResult, Outcome

__all__ = [
    "CancellationReason",
    "ExecutionResult",
    "Executor",
    "ExecutorError",
    "ForgeyardError",
    "InvalidRequest",
    "Job",
    "Limits",
    "Network",
    "Outcome",
    "Output",
    "Profile",
    "SandboxError",
    "Shell",
    "SourceMode",
    "Step",
    "When",
]

_HOME: Final = {
    "CancellationReason": ("forgeyard_model.result", "CancellationReason"),
    "ExecutionResult": ("forgeyard_model.result", "ExecutionResult"),
    "Executor": ("forgeyard_executor", "Executor"),
    "ExecutorError": ("forgeyard_model.errors", "ExecutorError"),
    "ForgeyardError": ("forgeyard_model.errors", "ForgeyardError"),
    "InvalidRequest": ("forgeyard_model.errors", "InvalidRequest"),
    "Job": ("forgeyard_model.job", "Job"),
    "Limits": ("forgeyard_model.limits", "Limits"),
    "Network": ("forgeyard_model.policy", "NetworkPolicy"),
    "Outcome": ("forgeyard_model.result", "Outcome"),
    "Output": ("forgeyard_model.job", "Output"),
    "Profile": ("forgeyard_model.profile", "ExecutionProfile"),
    "SandboxError": ("forgeyard_model.errors", "SandboxError"),
    "Shell": ("forgeyard_model.job", "Shell"),
    "SourceMode": ("forgeyard_model.policy", "SourceMode"),
    "Step": ("forgeyard_model.job", "Step"),
    "When": ("forgeyard_model.job", "When"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)
