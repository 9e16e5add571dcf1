"""What the server knows, as messages."""

from __future__ import annotations

from typing import Any

from forgeyard_api.serve.attempt_types import AttemptEvent, AttemptState, AttemptView
from forgeyard_api.wire.convert import enum_value, to_message
from forgeyard_api.wire.errors import detail_of
from forgeyard_api.wire.messages import capabilities as wire_capabilities
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.live import LiveContainer
from forgeyard_model.result import CancellationReason
from forgeyard_runtimes.spool_format import OutputChunk, SpoolMark

STATES = {state: getattr(wire, f"ATTEMPT_STATE_{state.value.upper()}") for state in AttemptState}


def state_from(number: int) -> AttemptState | None:
    """The state of a number; None for an unspecified one.

    :raises InvalidRequest: this version knows no such state.
    """
    if number == wire.ATTEMPT_STATE_UNSPECIFIED:
        return None
    for state, known in STATES.items():
        if known == number:
            return state
    raise InvalidRequest("state", str(number), f"this server knows {', '.join(STATES)}")


def reason_from(number: int) -> CancellationReason:
    """The reason of a number; an unspecified one is the user's wish."""
    if number == 0:
        return CancellationReason.USER
    enum = wire.CancelRequest.DESCRIPTOR.fields_by_name["reason"].enum_type
    found = enum_value(enum, CancellationReason, number, "reason")
    return CancellationReason(found.value)


def attempt_message(view: AttemptView) -> wire.Attempt:
    """An attempt as it stands."""
    message = wire.Attempt(
        attempt_id=view.attempt_id,
        tenant=view.tenant,
        name=view.name,
        state=STATES[view.state],
        sandbox_id=view.sandbox_id,
        runtime=view.runtime,
        labels=dict(view.labels),
        queue_position=view.queue_position,
        bundle_digest=view.bundle_digest,
        notes=view.notes,
        services=view.services,
        owner_uid=view.owner_uid,
    )
    message.created_at.FromDatetime(view.created_at)
    if view.started_at is not None:
        message.started_at.FromDatetime(view.started_at)
    if view.finished_at is not None:
        message.finished_at.FromDatetime(view.finished_at)
    if view.result is not None:
        to_message(view.result, message.result)
    if view.error is not None:
        message.error.CopyFrom(detail_of(view.error))
    return message


def capabilities_message(found: ExecutorCapabilities) -> Any:
    """What one runtime can do here."""
    return to_message(found, wire_capabilities.ExecutorCapabilities())


def chunk_message(chunk: OutputChunk, mark: SpoolMark) -> wire.OutputResponse:
    """A piece of output, and the place after it."""
    message = wire.OutputResponse(
        stream=chunk.stream,
        data=chunk.data,
        dropped_before=chunk.dropped_before,
        mark=wire.OutputMark(stdout=mark.stdout, stderr=mark.stderr),
    )
    message.time.FromDatetime(chunk.time)
    return message


def event_message(event: AttemptEvent) -> wire.EventsResponse:
    """Something that became of an attempt."""
    message = wire.EventsResponse(attempt_id=event.attempt_id, kind=event.kind.value, message=event.message)
    message.time.FromDatetime(event.time)
    return message


def container_message(container: LiveContainer) -> wire.Container:
    """One container of an attempt."""
    message = wire.Container(
        name=container.name,
        container_id=container.container_id,
        sandbox_id=container.sandbox_id,
        state=container.state,
        pid=container.pid or 0,
        bundle=container.bundle.config,
        bundle_digest=container.bundle.bundle_digest,
        plan_digest=container.bundle.plan_digest,
        rootfs=container.rootfs,
        image=container.image or "",
        address=container.address,
        cgroup=container.cgroup,
    )
    usage = container.usage
    if usage is not None:
        message.usage.at.FromDatetime(usage.at)
        for name in ("cpu_nanoseconds", "memory_bytes", "pids", "disk_bytes"):
            value = getattr(usage, name)
            if value is not None:
                setattr(message.usage, name, value)
    return message
