"""How far a container has got, and how it ended, in the words of the Container Runtime Interface. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from forgeyard_api.cri.messages import cri
from forgeyard_api.cri.pods import Pod, ShownContainer
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView
from forgeyard_model.result import ExecutionResult, Outcome, ServiceResult, ServiceState

OOM_KILLED: Final = "OOMKilled"
OOM_CODE: Final = 137
UNKNOWN_CODE: Final = 255
"""Of a container that has ended, nobody knows how."""

_REASONS: Final = {Outcome.SUCCEEDED: "Completed", Outcome.FAILED: "Error", Outcome.OUT_OF_MEMORY: OOM_KILLED}
_FINE: Final = (ServiceState.READY, ServiceState.UNPROVEN, ServiceState.COMPLETED, ServiceState.STOPPED)


@dataclass(frozen=True, slots=True)
class Course:
    """A container's way so far. Times are nanoseconds since the epoch; 0: not yet, or unknown."""

    state: cri.ContainerState
    started_at: int = 0
    finished_at: int = 0
    exit_code: int = 0
    reason: str = ""
    message: str = ""


def nanoseconds(time: datetime | None) -> int:
    """Since the epoch; 0 for no time."""
    return 0 if time is None else round(time.timestamp() * 1_000_000) * 1000


def pod_state(view: AttemptView) -> cri.PodSandboxState:
    """Ready while there is a sandbox."""
    ready = view.state in (AttemptState.PREPARED, AttemptState.RUNNING)
    return cri.SANDBOX_READY if ready else cri.SANDBOX_NOTREADY


def course_of(pod: Pod, container: ShownContainer) -> Course:
    """The course of a container of `pod`."""
    view, started = pod.view, nanoseconds(pod.view.started_at)
    if view.state is AttemptState.ENDED:
        return _ended(view, container, started)
    if view.state is AttemptState.PREPARED:
        return Course(cri.CONTAINER_CREATED)
    if not container.fresh or container.live is None:
        return Course(cri.CONTAINER_UNKNOWN, started, message="its runtime does not answer")
    if container.live.state == "created":
        return Course(cri.CONTAINER_CREATED)
    if container.live.state == "running":
        return Course(cri.CONTAINER_RUNNING, started)
    return Course(
        cri.CONTAINER_EXITED, started, 0, UNKNOWN_CODE, "Unknown", "it ended; how is judged once the attempt has ended"
    )


def _ended(view: AttemptView, container: ShownContainer, started: int) -> Course:
    finished = nanoseconds(view.finished_at)
    if view.result is None:
        reason = "Unknown" if view.error is None else _camel(str(getattr(view.error, "kind", "error")))
        message = "" if view.error is None else str(view.error)
        return Course(cri.CONTAINER_EXITED, started, finished, UNKNOWN_CODE, reason, message)
    if not container.service:
        return _job_ended(view.result, finished)
    result = next((item for item in view.result.services if item.name == container.service), None)
    if result is None:
        return Course(cri.CONTAINER_EXITED, started, finished, UNKNOWN_CODE, "Unknown", "its end was not recorded")
    return _service_ended(result, started, finished)


def _job_ended(result: ExecutionResult, finished: int) -> Course:
    reason = _REASONS.get(result.outcome) or _camel(result.outcome.value)
    if result.outcome is Outcome.OUT_OF_MEMORY:
        code = OOM_CODE
    elif result.outcome is Outcome.SUCCEEDED:
        code = 0
    else:
        # A job that was stopped or lost has not succeeded, whatever its last step managed to exit with.
        code = (result.exit.shell_code if result.exit is not None else 0) or result.exit_code or UNKNOWN_CODE
    started = nanoseconds(result.started_at)
    return Course(cri.CONTAINER_EXITED, started, finished, code, reason, result.message)


def _service_ended(result: ServiceResult, started: int, finished: int) -> Course:
    if result.state is ServiceState.NOT_STARTED:
        return Course(cri.CONTAINER_EXITED, 0, finished, UNKNOWN_CODE, "NotStarted", result.message)
    if result.oom:
        return Course(cri.CONTAINER_EXITED, started, finished, OOM_CODE, OOM_KILLED, result.message)
    fine = result.state in _FINE
    code = result.exit.shell_code if result.exit is not None else 0 if fine else UNKNOWN_CODE
    reason = "Completed" if fine else _camel(result.state.value)
    message = result.message or ("ended with its job" if result.exit is None else "")
    return Course(cri.CONTAINER_EXITED, started, finished, code, reason, message)


def _camel(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_"))
