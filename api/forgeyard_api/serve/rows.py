"""Attempts as rows of the store, and back."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from google.protobuf.message import DecodeError

from forgeyard_api.serve.attempt_types import AttemptState, AttemptView
from forgeyard_api.serve.life import AttemptLife, Record
from forgeyard_api.serve.requests import wanted_from
from forgeyard_api.serve.store import AttemptStore, StoredAttempt
from forgeyard_api.wire.convert import from_message, to_message
from forgeyard_api.wire.errors import detail_of, error_of
from forgeyard_api.wire.messages import executor as wire
from forgeyard_api.wire.messages import result as wire_result
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.job import Job
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.result import CancellationReason, ExecutionResult

log: Final = logging.getLogger("forgeyard.serve")

Key = tuple[int, str]

_NOTHING: Final = ResourceReservation(0.0, 0)


class Rows:
    """The store, in the words of attempts."""

    def __init__(self, store: AttemptStore, reserve: Any) -> None:
        self._store = store
        self._reserve = reserve
        self._digests: dict[Key, str] = {}

    def digest(self, key: Key) -> str:
        """Of the Prepare that an attempt came from."""
        return self._digests[key]

    async def add(self, life: AttemptLife, request: bytes, digest: str, owner: tuple[int, int]) -> None:
        """Write down a new attempt."""
        view = life.view
        row = StoredAttempt(
            owner_uid=view.owner_uid,
            attempt_id=view.attempt_id,
            request=request,
            digest=digest,
            state=view.state.value,
            runtime=view.runtime,
            created_at=view.created_at.timestamp(),
            owner_pid=owner[0],
            owner_start=owner[1],
            start_asked=life.start_asked,
            lease=life.wanted.lease,
        )
        await self._store.add(row)
        self._digests[view.owner_uid, view.attempt_id] = digest

    async def update(self, key: Key, **changes: Any) -> None:
        """Change columns by their names."""
        await self._store.update(*key, **changes)

    async def become(self, key: Key, life: AttemptLife) -> None:
        """Write down what it has become."""
        view = life.view
        result = None if view.result is None else to_message(view.result, wire_result.ExecutionResult())
        await self._store.update(
            *key,
            state=view.state.value,
            sandbox_id=view.sandbox_id,
            bundle_digest=view.bundle_digest,
            notes=json.dumps(view.notes),
            started_at=_seconds(view.started_at),
            finished_at=_seconds(view.finished_at),
            handed=view.state is not AttemptState.QUEUED,
            result=None if result is None else result.SerializeToString(),
            error=None if view.error is None else detail_of(view.error).SerializeToString(),
        )

    async def remove(self, key: Key) -> None:
        """Forget it."""
        await self._store.remove(*key)
        self._digests.pop(key, None)

    async def all(self, record: Record) -> list[tuple[AttemptLife, StoredAttempt]]:
        """Every attempt of the store, oldest first. A row that can't be read is removed, with a message."""
        found = []
        for row in await self._store.all():
            try:
                life = self._life(row, record)
            except (ForgeyardError, DecodeError, ValueError, TypeError, OverflowError):
                log.exception("the attempt %r of uid %d can't be read and is forgotten", row.attempt_id, row.owner_uid)
                await self._store.remove(row.owner_uid, row.attempt_id)
                continue
            self._digests[row.owner_uid, row.attempt_id] = row.digest
            found.append((life, row))
        return found

    def _life(self, row: StoredAttempt, record: Record) -> AttemptLife:
        wanted = wanted_from(wire.PrepareRequest.FromString(row.request))
        result = None
        if row.result is not None:
            result = from_message(ExecutionResult, wire_result.ExecutionResult.FromString(row.result))
        view = AttemptView(
            attempt_id=row.attempt_id,
            tenant=wanted.tenant,
            name=wanted.job.name,
            state=AttemptState(row.state),
            owner_uid=row.owner_uid,
            created_at=datetime.fromtimestamp(row.created_at, UTC),
            reserved=_NOTHING if row.state == AttemptState.ENDED else self._reserved(wanted.job),
            runtime=row.runtime,
            sandbox_id=row.sandbox_id,
            labels=wanted.labels,
            started_at=_time(row.started_at),
            finished_at=_time(row.finished_at),
            result=result,
            error=None if row.error is None else error_of(wire.ErrorDetail.FromString(row.error)),
            bundle_digest=row.bundle_digest,
            notes=tuple(json.loads(row.notes or "[]")),
            services=tuple(service.name for service in wanted.job.services),
        )
        life = AttemptLife(wanted, view, f"{row.owner_uid}/{row.attempt_id}", record)
        if row.start_asked:
            life.ask_start()
        if row.cancel_asked:
            life.was_cancelled(CancellationReason(row.cancel_asked), kill=row.cancel_kill)
        life.finish_asked = row.finish_asked
        return life

    def _reserved(self, job: Job) -> ResourceReservation:
        reserved: ResourceReservation = self._reserve(job)
        return reserved


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
