"""Security events (seed, section 262): who came, what was granted, what was refused, what was violated.

Each is a record of the logger ``forgeyard.audit``, where runtimes report what they refuse at the gate as well; see
`audit_writer` for where they go. None holds a value of an environment, an argument or an input of a job.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from forgeyard_api.serve.attempt_types import AttemptView, Caller, Wanted
from forgeyard_model.errors import ExecutorError, ForgeyardError, InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.job import Job
from forgeyard_model.policy import ApprovedHostPath, NetworkPolicy
from forgeyard_model.result import CLEANUP_NOTE, ExecutionOutcome, ExecutionResult

log: Final = logging.getLogger("forgeyard.audit")

NOT_SECURITY: Final = frozenset(
    {SandboxErrorKind.INVALID_FILESYSTEM_PLAN, SandboxErrorKind.UNSUPPORTED_ISOLATION, SandboxErrorKind.INTERNAL}
)
"""Kinds of sandbox failure that are no failure of what holds privileges."""


class Event(StrEnum):
    """What is recorded."""

    SERVER_STARTED = "server_started"
    CONNECTED = "connected"
    CONNECTION_REFUSED = "connection_refused"
    PREPARED = "prepared"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    EXEC = "exec"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    RELOADED = "reloaded"
    VIOLATION = "violation"
    POLICY_REFUSED = "policy_refused"
    HELPER_FAILED = "helper_failed"
    CLEANUP_FAILED = "cleanup_failed"
    GATE_REFUSED = "gate_refused"
    CAPABILITY_LOST = "capability_lost"
    CAPABILITY_BACK = "capability_back"
    AUDIT_LOST = "audit_lost"


def record(event: Event, message: str, *, warning: bool = False, **facts: Any) -> None:
    """Write one down. `facts` are values that JSON has; those that are None are left out."""
    given = {name: value for name, value in facts.items() if value is not None}
    log.log(logging.WARNING if warning else logging.INFO, "%s", message, extra={"audit": {"event": event, **given}})


# ---- callers


def connected(caller: Caller, path: str) -> None:
    """Somebody may talk to us."""
    record(Event.CONNECTED, f"uid {caller.uid} connected", **_who(caller), path=path)


def connection_refused(path: str, why: str, *, uid: int, gid: int, pid: int) -> None:
    """Somebody may not."""
    record(Event.CONNECTION_REFUSED, why, warning=True, uid=uid, gid=gid, pid=pid, path=path)


def prepared(caller: Caller, wanted: Wanted) -> None:
    """An attempt was taken in: with what it was granted."""
    facts = {**granted(wanted.job), "source": wanted.source, "output": wanted.output, "runtime": wanted.runtime or None}
    record(
        Event.PREPARED,
        f"attempt {wanted.attempt_id!r} of uid {caller.uid} was taken in",
        **_who(caller),
        attempt_id=wanted.attempt_id,
        tenant=wanted.tenant or None,
        trusted=wanted.trusted,
        **facts,
    )


def answered(caller: Caller | None, call: str, error: ForgeyardError, attempt_id: str) -> None:
    """A call failed. Those that are refusals are recorded: of a Prepare, and of what only others may.

    :param caller: None: nobody knows who it was.
    """
    if caller is None or call == "Prepare" or reason_of(error) == "not_allowed":
        refused(caller, call, error, attempt_id=attempt_id)


def refused(caller: Caller | None, call: str, error: ForgeyardError, *, attempt_id: str = "") -> None:
    """A call was refused. Of a value that can't be used its field is named, never the value."""
    why = {"field": error.field} if isinstance(error, InvalidRequest) else {"reason": reason_of(error)}
    record(
        Event.REFUSED,
        f"{call} was refused",
        warning=True,
        **({} if caller is None else _who(caller)),
        call=call,
        attempt_id=attempt_id or None,
        failure_class=error.failure_class.value,
        **why,
    )


def acted(event: Event, caller: Caller, view: AttemptView, **facts: Any) -> None:
    """A caller did something to an attempt."""
    record(
        event,
        f"uid {caller.uid}: {event.value} at attempt {view.attempt_id!r} of uid {view.owner_uid}",
        **_who(caller),
        attempt_id=view.attempt_id,
        sandbox=view.sandbox_id or None,
        owner_uid=view.owner_uid,
        **facts,
    )


def drained(caller: Caller, on: bool) -> None:  # it is what was asked
    """An operator closed or opened this host for further attempts."""
    record(Event.DRAIN if on else Event.UNDRAIN, f"uid {caller.uid} asked for it", **_who(caller))


# ---- what became of attempts


def ended(view: AttemptView) -> None:
    """What of an attempt's end is a security event; for most of them nothing is."""
    if view.result is not None:
        _of_result(view, view.result)
    if view.error is not None:
        _of_error(view, view.error)


def _of_result(view: AttemptView, result: ExecutionResult) -> None:
    if result.outcome is ExecutionOutcome.SANDBOX_VIOLATION:
        record(Event.VIOLATION, result.message, warning=True, **_which(view))
    for note in result.notes:
        if note.startswith(CLEANUP_NOTE):
            record(Event.CLEANUP_FAILED, note.removeprefix(CLEANUP_NOTE), warning=True, **_which(view))


def _of_error(view: AttemptView, error: ForgeyardError) -> None:
    sandbox = error.sandbox if isinstance(error, ExecutorError) else error
    if not isinstance(sandbox, SandboxError):
        return
    facts = {**_which(view), "kind": sandbox.kind.value, "reason": sandbox.reason}
    if sandbox.kind is SandboxErrorKind.SECURITY_VIOLATION:
        record(Event.VIOLATION, sandbox.brief, warning=True, **facts)
    elif sandbox.kind is SandboxErrorKind.UNSUPPORTED_ISOLATION:
        record(Event.POLICY_REFUSED, sandbox.brief, warning=True, **facts)
    elif sandbox.kind is SandboxErrorKind.CLEANUP_FAILED:
        record(Event.CLEANUP_FAILED, sandbox.brief, warning=True, **facts)
    elif sandbox.kind not in NOT_SECURITY:
        record(Event.HELPER_FAILED, sandbox.brief, warning=True, **facts)


def reason_of(error: ForgeyardError) -> str:
    """A word for programs that says which error it is."""
    return getattr(error, "reason", "") or type(error).__name__


# ---- what is said of each


def granted(job: Job) -> Mapping[str, Any]:
    """What of `job` goes beyond the least: whose files, which network, which privileges; nothing of its values."""
    return {
        "profile": job.profile.value,
        "root": "host" if job.image is None else job.image,
        "user": job.user,
        "capabilities": None if job.capabilities is None else job.capabilities.value,
        "network": None if job.network is None else _network(job.network),
        "host_paths": [_path(path) for path in job.host_paths] or None,
        "toolchains": [_path(path) for path in job.toolchains] or None,
        "services": {service.name: service.image or "host" for service in job.services} or None,
    }


def _network(policy: NetworkPolicy) -> dict[str, Any]:
    found: dict[str, Any] = {"mode": policy.mode.value}
    if policy.egress is not None:
        found["destinations"] = [
            {"to": destination.host or destination.cidr, "ports": list(destination.ports)}
            for destination in policy.egress.destinations
        ]
    if policy.audit:
        found["audit"] = True
    if policy.conflist:
        found["conflist"] = policy.conflist
    if policy.publish:
        found["published"] = [port.host_port for port in policy.publish]
    return found


def _path(path: ApprovedHostPath) -> dict[str, Any]:
    return {"source": path.source, "destination": path.destination, "read_only": path.read_only}


def _who(caller: Caller) -> dict[str, Any]:
    return {"uid": caller.uid, "gid": caller.gid, "pid": caller.pid}


def _which(view: AttemptView) -> dict[str, Any]:
    return {
        "attempt_id": view.attempt_id,
        "sandbox": view.sandbox_id or None,
        "owner_uid": view.owner_uid,
        "runtime": view.runtime or None,
    }
