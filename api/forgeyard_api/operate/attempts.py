"""Attempts as the server has them, as JSON and as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from forgeyard_api.result_file import error_json
from forgeyard_api.sandbox_commands import age
from forgeyard_api.wire.convert import from_message
from forgeyard_api.wire.errors import error_of
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.result import ExecutionResult
from forgeyard_model.result_json import result_json

HEAD = ("ATTEMPT", "STATE", "NAME", "RUNTIME", "TENANT", "AGE", "SANDBOX")
REFUSED = 125


def state_of(attempt: wire.Attempt) -> str:
    """As the API has it, in lower case; its number, when only a newer server knows it."""
    enum = attempt.DESCRIPTOR.fields_by_name["state"].enum_type
    known = None if enum is None else enum.values_by_number.get(attempt.state)
    return str(attempt.state) if known is None else known.name.removeprefix("ATTEMPT_STATE_").lower()


def attempt_json(attempt: wire.Attempt) -> dict[str, Any]:
    """An attempt as JSON; the names that `ps` of a state directory has mean the same here."""
    return {
        "attempt_id": attempt.attempt_id,
        "sandbox_id": attempt.sandbox_id or None,
        "name": attempt.name,
        "state": state_of(attempt),
        "tenant": attempt.tenant,
        "runtime": attempt.runtime,
        "labels": dict(attempt.labels),
        "services": [{"name": name} for name in attempt.services],
        "owner_uid": attempt.owner_uid,
        "queue_position": attempt.queue_position or None,
        "bundle_digest": attempt.bundle_digest or None,
        "notes": list(attempt.notes),
        **{name: _time(attempt, name) for name in ("created_at", "started_at", "finished_at")},
        **_end(attempt),
    }


def _end(attempt: wire.Attempt) -> Mapping[str, Any]:
    if attempt.HasField("result"):
        return {"result": json.loads(result_json(result_of(attempt)))}
    if attempt.HasField("error"):
        return dict(json.loads(error_json(error_of(attempt.error), REFUSED)))
    return {}


def result_of(attempt: wire.Attempt) -> ExecutionResult:
    """The result of an attempt that has one."""
    return from_message(ExecutionResult, attempt.result)


def time_of(attempt: wire.Attempt, name: str) -> datetime | None:
    """One of an attempt's times; None while it is not there."""
    return getattr(attempt, name).ToDatetime(tzinfo=UTC) if attempt.HasField(name) else None


def _time(attempt: wire.Attempt, name: str) -> str | None:
    found = time_of(attempt, name)
    return None if found is None else found.isoformat()


def attempt_row(attempt: wire.Attempt) -> tuple[str, ...]:
    """An attempt as a row below HEAD."""
    since = time_of(attempt, "started_at") or time_of(attempt, "created_at")
    return (
        attempt.attempt_id,
        shown_state(attempt),
        " ".join([attempt.name, *(f"+{name}" for name in attempt.services)]),
        attempt.runtime,
        attempt.tenant,
        "" if since is None else age(since),
        attempt.sandbox_id,
    )


def shown_state(attempt: wire.Attempt) -> str:
    """With its place in the queue, or what came of it."""
    state = state_of(attempt)
    if attempt.queue_position:
        return f"{state} ({attempt.queue_position})"
    if attempt.HasField("result"):
        result = result_of(attempt)
        return f"{result.outcome.value} ({result.exit_code})"
    return "error" if attempt.HasField("error") else state
