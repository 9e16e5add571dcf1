"""A Prepare as a message, and what it asks for."""

from __future__ import annotations

from datetime import UTC
from types import MappingProxyType
from typing import Final

from forgeyard_api.serve.attempt_types import OnClientDeath, Wanted
from forgeyard_api.wire.convert import from_message, to_message
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import Job

_PULLS: Final = ("", "missing", "always", "never")
_DEATHS: Final = {
    wire.CLIENT_DEATH_CONTINUE: OnClientDeath.CONTINUE,
    wire.CLIENT_DEATH_CANCEL: OnClientDeath.CANCEL,
}


def wanted_from(message: wire.PrepareRequest, *, on_client_death: OnClientDeath = OnClientDeath.CONTINUE) -> Wanted:
    """What `message` asks for.

    :param on_client_death: where it does not say.
    :raises InvalidRequest: for a value that can't be used, by its field.
    """
    if message.pull not in _PULLS:
        raise InvalidRequest("pull", message.pull, "use missing, always or never")
    lease = message.lease.ToTimedelta().total_seconds() if message.HasField("lease") else None
    if lease is not None and lease <= 0:
        raise InvalidRequest("lease", f"{lease:g}s", "give a positive time, or leave it out")
    if not message.HasField("job"):
        raise InvalidRequest("job", "", "give the job to run")
    return Wanted(
        attempt_id=message.attempt_id,
        job=from_message(Job, message.job),
        tenant=message.tenant,
        labels=MappingProxyType(dict(message.labels)),
        source=message.source or None,
        output=message.output or None,
        deadline=message.deadline.ToDatetime(tzinfo=UTC) if message.HasField("deadline") else None,
        trusted=message.trusted,
        runtime=message.runtime,
        pull=message.pull,
        on_client_death=_DEATHS.get(message.on_client_death, on_client_death),
        lease=lease,
        start=message.start,
        priority=message.priority,
    )


def request_from(wanted: Wanted) -> wire.PrepareRequest:
    """The Prepare that asks for `wanted`."""
    message = wire.PrepareRequest(
        attempt_id=wanted.attempt_id,
        tenant=wanted.tenant,
        labels=dict(wanted.labels),
        source=wanted.source or "",
        output=wanted.output or "",
        trusted=wanted.trusted,
        runtime=wanted.runtime,
        pull=wanted.pull,
        on_client_death=next(number for number, death in _DEATHS.items() if death is wanted.on_client_death),
        start=wanted.start,
        priority=wanted.priority,
    )
    to_message(wanted.job, message.job)
    if wanted.deadline is not None:
        message.deadline.FromDatetime(wanted.deadline)
    if wanted.lease is not None:
        message.lease.FromNanoseconds(round(wanted.lease * 1e9))
    return message
