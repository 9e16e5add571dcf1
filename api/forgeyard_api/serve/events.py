"""What becomes of attempts, for any number of listeners. A slow one loses its place, never holds up an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from forgeyard_api.serve.attempt_types import AttemptEvent
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

BACKLOG: Final = 4096
"""Events that a listener may be behind."""

_Queue = asyncio.Queue[AttemptEvent | None]
_END: Final = None
"""The last thing a listener gets: it is behind, and no longer among the listeners, or the hub closes."""


class EventHub:
    """Publishes events to those who listen at that moment."""

    def __init__(self) -> None:
        self._listeners: dict[_Queue, Callable[[AttemptEvent], bool]] = {}

    @property
    def listened(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def publish(self, event: AttemptEvent) -> None:
        """Tell everybody whom it concerns."""
        for queue, wanted in list(self._listeners.items()):
            if not wanted(event):
                continue
            if queue.qsize() >= BACKLOG:
                del self._listeners[queue]
                queue.put_nowait(_END)
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        """No more comes: listeners get what is theirs, and end."""
        for queue in self._listeners:
            queue.put_nowait(_END)

    async def subscribe(self, wanted: Callable[[AttemptEvent], bool]) -> AsyncGenerator[AttemptEvent, None]:
        """Events from now on for which `wanted` is true, until the hub closes.

        :raises ExecutorError: LOST, fell_behind.
        """
        queue: _Queue = asyncio.Queue()
        self._listeners[queue] = wanted
        try:
            while (event := await queue.get()) is not _END:
                yield event
            if queue in self._listeners:
                return
        finally:
            self._listeners.pop(queue, None)
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "fell_behind",
            f"more than {BACKLOG} events were not read in time",
            resolution="list the attempts, then listen again",
        )
