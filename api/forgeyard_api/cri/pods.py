"""Attempts as pods: found by any of their names, and looked at without waiting for a backend that hangs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from forgeyard_api.cri.ids import JOB, OPERATOR, container_id, owner, pod_id
from forgeyard_api.serve.attempt_types import AttemptEvent, AttemptState, AttemptView
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, InvalidRequest
from forgeyard_model.live import LiveContainer

LOOK_SECONDS: Final = 1.2
"""For all that are looked at together: a client gives up after two."""

KEPT: Final = 128
"""Attempts of which is kept what was seen of them last, for those who look after their end."""

T = TypeVar("T")
_LIVE: Final = (AttemptState.PREPARED, AttemptState.RUNNING)
Containers = tuple[LiveContainer, ...]


@dataclass(frozen=True, slots=True)
class ShownContainer:
    """A container of an attempt.

    :param service: empty for the job's.
    :param live: as it was seen last, if ever. :param fresh: that was now.
    """

    container_id: str
    service: str
    name: str
    live: LiveContainer | None
    fresh: bool


@dataclass(frozen=True, slots=True)
class Pod:
    """An attempt, and its containers; none before it is prepared, and none where nothing was ever made."""

    pod_id: str
    view: AttemptView
    containers: tuple[ShownContainer, ...]


class Pods:
    """The attempts of a table, as an operator sees them."""

    def __init__(self, table: AttemptTable) -> None:
        self._table = table
        self._seen: OrderedDict[str, Containers] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Containers]] = {}

    def views(self) -> tuple[AttemptView, ...]:
        """All attempts, oldest first."""
        return self._table.list(OPERATOR)

    def find(self, name: str) -> AttemptView:
        """An attempt by its pod's id, its sandbox's, or its caller's own name, or by a prefix of one of these.

        :raises ExecutorError: no_such_attempt. :raises InvalidRequest: several match.
        """
        return _only(name, (((pod_id(view), view.sandbox_id, view.attempt_id), view) for view in self.views()))

    def find_container(self, name: str) -> tuple[AttemptView, str]:
        """A container by its id, by what its runtime calls it, or by a prefix of these: its attempt and service.

        :raises ExecutorError: no_such_attempt. :raises InvalidRequest: several match.
        """
        return _only(
            name,
            (
                ((item.container_id, item.live.container_id if item.live else ""), (view, item.service))
                for view in self.views()
                for item in self.known(view).containers
            ),
        )

    def known(self, view: AttemptView) -> Pod:
        """A pod by what is known without asking anybody."""
        return self._pod(view, self._seen.get(pod_id(view), ()), fresh=False)

    async def look(self, views: Iterable[AttemptView]) -> list[Pod]:
        """Pods as they are now. Of a backend that does not answer, what is known, not `fresh`."""
        wanted = list(views)
        asked = {pod_id(view): self._ask(view) for view in wanted if view.state in _LIVE}
        if asked:
            await asyncio.wait(asked.values(), timeout=LOOK_SECONDS)
        return [self._looked_at(view, asked.get(pod_id(view))) for view in wanted]

    def events(self) -> AsyncGenerator[AttemptEvent, None]:
        """What becomes of attempts, from now on."""
        return self._table.events(OPERATOR)

    async def close(self) -> None:
        """Stop asking."""
        for task in self._asking.values():
            task.cancel()
        if self._asking:
            await asyncio.wait(tuple(self._asking.values()), timeout=LOOK_SECONDS)

    def _looked_at(self, view: AttemptView, task: asyncio.Task[Containers] | None) -> Pod:
        if task is None or not task.done() or task.cancelled():
            return self.known(view)
        found = task.result()
        return self._pod(view, found, fresh=True) if found else self.known(view)

    def _ask(self, view: AttemptView) -> asyncio.Task[Containers]:
        """A question that is already on its way is not asked twice, however long its answer takes."""
        key = pod_id(view)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.get_running_loop().create_task(self._inspect(view, key))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return task

    async def _inspect(self, view: AttemptView, key: str) -> Containers:
        try:
            _, found = await self._table.inspect(owner(view), view.sandbox_id)
        except ForgeyardError:
            return ()  # it vanished in between; what is known of it is shown
        if found:
            self._seen[key] = found
            self._seen.move_to_end(key)
            while len(self._seen) > KEPT:
                self._seen.popitem(last=False)
        return found

    def _pod(self, view: AttemptView, seen: Containers, *, fresh: bool) -> Pod:
        made = bool(view.sandbox_id) and view.state.rank >= AttemptState.PREPARED.rank
        containers: list[ShownContainer] = []
        for number, service in enumerate((JOB, *view.services) if made else ()):
            # The job's is first, and a service may have the job's name.
            live = (
                next(iter(seen), None)
                if number == 0
                else next((item for item in seen[1:] if item.name == service), None)
            )
            name = service or view.name or "job"
            containers.append(
                ShownContainer(container_id(view, service), service, name, live, fresh and live is not None)
            )
        return Pod(pod_id(view), view, tuple(containers))


def _only(name: str, named: Iterable[tuple[tuple[str, ...], T]]) -> T:
    """The one that is called `name`, or the one of which a name begins with that."""
    all_named = list(named)
    found = [thing for names, thing in all_named if name and name in names]
    if not found:
        found = [thing for names, thing in all_named if name and any(item.startswith(name) for item in names)]
    if len(found) > 1:
        raise InvalidRequest("id", name, f"{len(found)} of them begin so: give more of it")
    if not found:
        raise ExecutorError(ExecutorErrorKind.LOST, "no_such_attempt", f"nothing here is called {name!r}")
    return found[0]
