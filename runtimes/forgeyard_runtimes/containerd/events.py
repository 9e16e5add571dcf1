"""What the daemon says has happened: OOM kills and ends. Listened to over breaks; after one its state is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Any, Final

from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.containerd.errors import DaemonError
from forgeyard_runtimes.containerd.messages import events, task_events, task_types
from forgeyard_runtimes.containerd.task import get_task

log: Final = logging.getLogger("forgeyard.containerd")

_TOPICS: Final = ("/tasks/oom", "/tasks/exit")
_RETRY: Final = 0.2
"""Seconds between attempts to listen again; gRPC's own back-off is behind it."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What was heard of a container.

    :param oom: something in it was killed for want of memory.
    :param exit_status: of PID 1, 128+n for signal n; None while it runs, or when nobody said.
    :param started: it had a task. gone: the daemon has none any more, and nobody said how it ended.
    :param breaks: how often nobody listened for a while: then an OOM may have been missed.
    """

    oom: bool = False
    exit_status: int | None = None
    started: bool = False
    gone: bool = False
    breaks: int = 0

    @property
    def over(self) -> bool:
        """Whether its end is known."""
        return self.gone or self.exit_status is not None


class EventWatch:
    """Listens for as long as it is started, in the event loop of the first `start`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen: dict[str, Sight] = {}
        self._news = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    def start(self, container_id: str) -> None:
        """Take notice of a container."""
        self._seen.setdefault(container_id, Sight())
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())

    def started(self, container_id: str) -> None:
        """It has a task now."""
        self._change(container_id, started=True)

    def sight(self, container_id: str) -> Sight:
        """What was heard of it so far."""
        return self._seen.get(container_id, Sight())

    async def exited(self, container_id: str) -> Sight:
        """Once the end of its PID 1 was heard of. Has no end by itself: give it one."""
        while not (sight := self.sight(container_id)).over:
            self._news.clear()
            await self._news.wait()
        return sight

    def forget(self, container_id: str) -> None:
        """Take no more notice of it."""
        self._seen.pop(container_id, None)

    async def close(self) -> None:
        """Listen no more. Repeating it is no error."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listener

    async def _listen(self) -> None:
        namespace = self._client.namespace
        filters = [f'topic=="{topic}",namespace=={namespace}' for topic in _TOPICS]
        while True:
            try:
                async for envelope in self._client.stream(calls.EVENTS, events.SubscribeRequest(filters=filters)):
                    self._note(envelope)
            except DaemonError as error:
                log.info("containerd's events broke off: %s", error)
            self._seen = {name: replace(sight, breaks=sight.breaks + 1) for name, sight in self._seen.items()}
            await asyncio.sleep(_RETRY)
            await self._catch_up()

    def _note(self, envelope: events.Envelope) -> None:
        if envelope.topic == "/tasks/oom":
            oom = task_events.TaskOOM.FromString(envelope.event.value)
            self._change(oom.container_id, oom=True)
        elif envelope.topic == "/tasks/exit":
            end = task_events.TaskExit.FromString(envelope.event.value)
            if end.id == end.container_id:  # of PID 1, not of a process that was run beside it
                self._change(end.container_id, exit_status=end.exit_status)

    def _change(self, container_id: str, **news: Any) -> None:
        if (sight := self._seen.get(container_id)) is not None:
            self._seen[container_id] = replace(sight, **news)
            self._news.set()

    async def _catch_up(self) -> None:
        """Nothing is said twice: whoever ended meanwhile is found by asking."""
        for container_id in [name for name, sight in self._seen.items() if sight.started and not sight.over]:
            with contextlib.suppress(DaemonError):
                process = await get_task(self._client, container_id)
                if process is None:
                    self._change(container_id, gone=True)
                elif process.status == task_types.STOPPED:
                    self._change(container_id, exit_status=process.exit_status)
