"""Follows what becomes of attempts, beside them: whoever counts, traces or records it is never in an attempt's way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import Final, Protocol

from forgeyard_api.observe import audit
from forgeyard_api.serve.attempt_types import AttemptEvent, EventKind
from forgeyard_api.serve.events import EventHub
from forgeyard_model.errors import ExecutorError

log: Final = logging.getLogger("forgeyard.serve")

CLOSE_SECONDS: Final = 10.0

Times = Mapping[EventKind, datetime]
"""When an attempt became what. Of one that was adopted, only since then."""


class Watcher(Protocol):
    """Makes something of events."""

    def saw(self, event: AttemptEvent, times: Times) -> None:
        """An event; `times` of its attempt, with it. Must not block, nor raise."""


@asynccontextmanager
async def followed(hub: EventHub, watchers: Sequence[Watcher]) -> AsyncIterator[None]:
    """Show all events of the block to `watchers`. The hub closes at its end, and what is left is shown first."""
    follower = _Follower(hub, watchers)
    task = asyncio.ensure_future(follower.run())
    await asyncio.sleep(0)  # it listens from here on
    try:
        yield
    finally:
        hub.close()
        await asyncio.wait((task,), timeout=CLOSE_SECONDS)
        task.cancel()


class _Follower:
    def __init__(self, hub: EventHub, watchers: Sequence[Watcher]) -> None:
        self._hub = hub
        self._watchers = watchers
        self._times: dict[tuple[int, str], dict[EventKind, datetime]] = {}

    async def run(self) -> None:
        """Until the hub closes."""
        while True:
            try:
                async with aclosing(self._hub.subscribe(lambda _: True)) as events:
                    async for event in events:
                        self._show(event)
                    return
            except ExecutorError as error:
                log.error("metrics, spans and the audit miss events: %s", error)  # noqa: TRY400  # all there is to it
                self._times.clear()

    def _show(self, event: AttemptEvent) -> None:
        times = self._timed(event)
        for watcher in self._watchers:
            try:
                watcher.saw(event, times)
            except Exception:  # one that fails must not blind the others
                log.exception("%s failed at %s", type(watcher).__name__, event.kind.value)

    def _timed(self, event: AttemptEvent) -> Times:
        if not event.attempt_id:
            return {}
        key = event.owner_uid, event.attempt_id
        times = self._times.setdefault(key, {})
        times.setdefault(event.kind, event.time)
        if event.kind in (EventKind.ENDED, EventKind.LOST):
            del self._times[key]
        return times


class EventLog:
    """Writes events into the server's log, with the names by which an attempt is found elsewhere."""

    def saw(self, event: AttemptEvent, times: Times) -> None:
        """One line each."""
        if event.view is None:
            log.info("%s", event.kind.value)
            return
        outcome = "" if event.view.result is None else f": {event.view.result.outcome.value}"
        log.info(
            "attempt %s%s",
            event.kind.value,
            outcome or (f": {event.message}" if event.message else ""),
            extra={"attempt_id": event.attempt_id, "sandbox": event.view.sandbox_id, "runtime": event.view.runtime},
        )


class Auditor:
    """Records what of attempts' ends is a security event."""

    def saw(self, event: AttemptEvent, times: Times) -> None:
        """Only ends are."""
        if event.kind is EventKind.ENDED and event.view is not None:
            audit.ended(event.view)
