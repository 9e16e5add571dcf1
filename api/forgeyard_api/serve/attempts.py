"""All attempts of a server: taken in once by their name, ordered, run, watched, and found again after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from forgeyard_api.observe import audit
from forgeyard_api.serve.admission import Admission, Claim
from forgeyard_api.serve.attempt_types import (
    MAX_ATTEMPT_ID,
    AttemptEvent,
    AttemptState,
    AttemptView,
    Caller,
    EventKind,
    OnClientDeath,
    Wanted,
)
from forgeyard_api.serve.events import EventHub
from forgeyard_api.serve.life import AttemptLife, Records, cancelled
from forgeyard_api.serve.watches import Watches
from forgeyard_executor.interface import JobExecutor
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, InvalidRequest
from forgeyard_model.job import EMPTY, Job, Step
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.live import LiveContainer
from forgeyard_model.result import CancellationReason, StepResult
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark

log: Final = logging.getLogger("forgeyard.serve")

INSPECT_SECONDS: Final = 1.0
"""A backend that does not answer by then is left out of what is shown."""

EMPTY_EXECUTORS: Final[Mapping[str, JobExecutor]] = MappingProxyType({})

Key = tuple[int, str]


class AttemptTable:
    """The attempts by owner and name. Open it, and close it: closing leaves what runs at a keeper running.

    :param reserve: what a job would set aside, under the configuration.
    :param result_ttl: seconds for which an ended attempt is kept.
    :param retired: those who take no new attempts, and may have some from before.
    """

    def __init__(
        self,
        rows: Records,
        executors: Mapping[str, JobExecutor],
        admission: Admission,
        reserve: Callable[[Job], ResourceReservation],
        *,
        result_ttl: float = 3600.0,
        retired: Mapping[str, JobExecutor] = EMPTY_EXECUTORS,
    ) -> None:
        self.retired = retired
        self.events_hub = EventHub()
        self.draining = False
        self._rows = rows
        self._executors = dict(executors)
        self._admission = admission
        self._reserve = reserve
        self._result_ttl = result_ttl
        self._lives: dict[Key, AttemptLife] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches = Watches(self._expire)
        self._taking = asyncio.Lock()

    # ---- open and close

    async def open(self) -> None:
        """Take up what the store has: queue again what nobody had, adopt what a keeper has, report the rest lost."""
        from forgeyard_api.serve.adoption import take_up

        for life, row in await self._rows.all(self._recorded):
            self._lives[row.owner_uid, row.attempt_id] = life
            if not life.ended:
                self._watches.watch(self._key(life), lease=row.lease, owner=(row.owner_pid, row.owner_start))
            await take_up(self, life, row)
        self._pump()
        self._spawn(self._sweep())

    async def close(self) -> None:
        """Stop looking after them. Whoever wants them ended has done so before."""
        self._watches.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ---- callers

    async def prepare(self, caller: Caller, wanted: Wanted, request: bytes) -> AttemptView:
        """Take an attempt in; one that has been taken in by this name is returned as it stands.

        :param request: the Prepare as it came, which is what makes two of them the same.
        :raises InvalidRequest: for a name that is taken by another request, or for what could never run here.
        :raises ExecutorError: draining, queue_full.
        """
        _check_name(wanted.attempt_id)
        key, digest = (caller.uid, wanted.attempt_id), hashlib.sha256(request).hexdigest()
        async with self._taking:
            known = self._lives.get(key)
            if known is not None:
                if self._rows.digest(key) != digest:
                    raise InvalidRequest(
                        "attempt_id", wanted.attempt_id, "names another request already: take a new one"
                    )
                return self._shown(known)
            try:
                # Its caller may be gone before it is written down; then it is taken in all the same.
                life = await shielded(self._take_in(caller, wanted, request, digest))
            finally:
                self._pump()
        return self._shown(life)

    async def start(self, caller: Caller, attempt_id: str) -> AttemptView:
        """Let it run as soon as it is prepared. Repeating it is no error."""
        life = self._own(caller, attempt_id)
        if not life.start_asked:
            await self._rows.update(self._key(life), start_asked=True)
            life.ask_start()
        return self._shown(life)

    async def wait(self, caller: Caller, attempt_id: str, until: AttemptState = AttemptState.ENDED) -> AttemptView:
        """Once it has got that far, or has ended."""
        return await self._own(caller, attempt_id).until(until)

    async def exec(self, caller: Caller, attempt_id: str, step: Step) -> StepResult:
        """Run one more step in it."""
        return await self._own(caller, attempt_id).exec(step)

    async def finish(self, caller: Caller, attempt_id: str) -> None:
        """No further step comes."""
        life = self._own(caller, attempt_id)
        await life.until(AttemptState.RUNNING)
        if not life.ended:
            await self._rows.update(self._key(life), finish_asked=True)
            life.finish()

    async def cancel(
        self,
        caller: Caller,
        attempt_id: str,
        reason: CancellationReason = CancellationReason.USER,
        *,
        kill: bool = False,
    ) -> None:
        """Ask it to stop. Returns at once; one that has ended stays as it is."""
        await self._cancel(self._own(caller, attempt_id), reason, kill=kill)

    async def renew(self, caller: Caller, attempt_id: str, lease: float | None = None) -> datetime:
        """Extend its lease; when that expires now.

        :raises InvalidRequest: it has none.
        """
        life = self._own(caller, attempt_id)
        seconds = lease or life.wanted.lease
        if seconds is None:
            raise InvalidRequest("lease", attempt_id, "the attempt was prepared without one")
        await self._rows.update(self._key(life), lease=seconds)
        self._watches.watch(self._key(life), lease=seconds)
        return datetime.now(UTC) + timedelta(seconds=seconds)

    async def cleanup(self, caller: Caller, attempt_id: str) -> None:
        """Cancel what runs, drop its output and forget it. One that is not there is no error."""
        with suppress(ExecutorError):
            life = self._own(caller, attempt_id)
            await self._cancel(life, CancellationReason.USER, kill=True)
            await life.until(AttemptState.ENDED)
            await self._forget(life)

    async def output(
        self,
        caller: Caller,
        attempt_id: str,
        service: str = "",
        *,
        after: SpoolMark = START,
        follow: bool = True,
    ) -> AsyncGenerator[OutputChunk, None]:
        """What the job, or its service, writes after `after`. Waits for it to run."""
        life = self._own(caller, attempt_id)
        if follow:
            await life.until(AttemptState.RUNNING)
        if life.running is None:
            return
        running = life.running
        source = (
            running.service_output(service, after=after, follow=follow)
            if service
            else running.output(after=after, follow=follow)
        )
        async with aclosing(source):
            async for chunk in source:
                yield chunk

    def list(
        self,
        caller: Caller,
        states: Iterable[AttemptState] = (),
        labels: Mapping[str, str] = EMPTY,
        tenant: str = "",
    ) -> tuple[AttemptView, ...]:
        """Those that `caller` may see, oldest first."""
        wanted = frozenset(states)
        return tuple(
            self._shown(life)
            for life in sorted(self._lives.values(), key=lambda life: life.view.created_at)
            if caller.may_see(life.view.owner_uid)
            and (not wanted or life.view.state in wanted)
            and labels.items() <= life.view.labels.items()
            and (not tenant or life.view.tenant == tenant)
        )

    def find(self, caller: Caller, name: str) -> AttemptView:
        """By its name, by its sandbox's id, or by a prefix of either that fits no other.

        :raises ExecutorError: LOST, no_such_attempt.
        """
        return self._shown(self._found(caller, name))

    async def inspect(self, caller: Caller, name: str) -> tuple[AttemptView, tuple[LiveContainer, ...]]:
        """It and its containers; none where it has none, or its backend does not answer in time."""
        life = self._found(caller, name)
        if life.executor is None or not life.view.sandbox_id or life.ended:
            return self._shown(life), ()
        try:
            async with asyncio.timeout(INSPECT_SECONDS):
                return self._shown(life), await life.executor.inspect_attempt(life.view.sandbox_id)
        except (TimeoutError, ForgeyardError) as error:
            log.warning("inspecting %s: %s", name, str(error) or "no answer in time")
            return self._shown(life), ()

    def events(self, caller: Caller, attempt_id: str = "") -> AsyncGenerator[AttemptEvent, None]:
        """What becomes of the attempts that `caller` may see, and of the server, from now on."""
        return self.events_hub.subscribe(
            lambda event: (
                attempt_id in ("", event.attempt_id) and (not event.attempt_id or caller.may_see(event.owner_uid))
            )
        )

    # ---- the server itself

    def drain(self, on: bool = True) -> None:  # it is what is asked
        """Take no more attempts in, or take them in again. What has been taken in goes on."""
        if on != self.draining:
            self.draining = on
            self.tell(EventKind.DRAIN if on else EventKind.UNDRAIN)

    async def stop_all(self, reason: CancellationReason, *, kill: bool = False, queued_only: bool = False) -> None:
        """Cancel every attempt; with `queued_only` those that have not begun."""
        for life in list(self._lives.values()):
            if not life.ended and (not queued_only or life.view.state is AttemptState.QUEUED):
                await self._cancel(life, reason, kill=kill)

    async def until_idle(self) -> None:
        """Until none is left that has not ended."""
        for life in list(self._lives.values()):
            await life.until(AttemptState.ENDED)

    @property
    def counts(self) -> tuple[int, int]:
        """Attempts that were let out of the queue and have not ended, and those in it."""
        return self._admission.running, self._admission.waiting

    @property
    def busy(self) -> bool:
        """Whether any has not ended."""
        return any(not life.ended for life in self._lives.values())

    @property
    def executors(self) -> Mapping[str, JobExecutor]:
        """Who runs attempts, by the runtime's name."""
        return self._executors

    @property
    def names(self) -> frozenset[str]:
        """What executors know the attempts by."""
        return frozenset(life.name for life in self._lives.values())

    def tell(self, kind: EventKind, life: AttemptLife | None = None, message: str = "") -> None:
        """Tell whoever watches."""
        if life is None:
            self.events_hub.publish(AttemptEvent(datetime.now(UTC), kind, message=message))
            return
        view = life.view
        self.events_hub.publish(AttemptEvent(datetime.now(UTC), kind, view.attempt_id, message, view.owner_uid, view))

    # ---- for adoption

    def queue(self, life: AttemptLife) -> None:
        """Put an attempt that nobody runs into the queue."""
        self._admission.enqueue(self._claim(life))

    def follow(self, life: AttemptLife) -> None:
        """Count an adopted attempt, and look after it to its end."""
        self._admission.restore(self._claim(life))
        self._spawn(self._course(life, life.go_on()))

    # ---- inside

    async def _take_in(self, caller: Caller, wanted: Wanted, request: bytes, digest: str) -> AttemptLife:
        if self.draining:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "draining",
                "this host takes no more attempts in",
                resolution="ask another",
            )
        if wanted.runtime and wanted.runtime not in self._executors:
            raise InvalidRequest("runtime", wanted.runtime, f"this server has {', '.join(self._executors)}")
        runtime = wanted.runtime or next(iter(self._executors))
        view = AttemptView(
            attempt_id=wanted.attempt_id,
            tenant=wanted.tenant,
            name=wanted.job.name,
            state=AttemptState.QUEUED,
            owner_uid=caller.uid,
            created_at=datetime.now(UTC),
            reserved=self._reserve(wanted.job),
            runtime=runtime,
            labels=wanted.labels,
            services=tuple(service.name for service in wanted.job.services),
        )
        life = AttemptLife(replace(wanted, runtime=runtime), view, f"{caller.uid}/{wanted.attempt_id}", self._recorded)
        claim = self._claim(life)
        self._admission.check(claim)
        self._admission.enqueue(claim)
        owner = self._watches.identity(caller.pid) if wanted.on_client_death is OnClientDeath.CANCEL else (0, 0)
        try:
            await self._rows.add(life, request, digest, owner)
        except BaseException:
            self._admission.release(claim.key)
            raise
        key = self._key(life)
        self._lives[key] = life
        self._watches.watch(key, lease=wanted.lease, owner=owner)
        audit.prepared(caller, wanted)
        self.tell(EventKind.QUEUED, life)
        return life

    def _pump(self) -> None:
        """Run what there is room for."""
        for claim in self._admission.admit():
            owner, _, attempt_id = claim.key.partition("/")
            life = self._lives[int(owner), attempt_id]
            executor = self._executors[life.view.runtime]
            self._spawn(self._course(life, life.run(executor)))

    async def _course(self, life: AttemptLife, course: Coroutine[Any, Any, None]) -> None:
        try:
            await course
        finally:
            self._admission.release(self._claim(life).key)
            if life.ended:
                self._watches.unwatch(self._key(life))
        self._pump()

    async def _recorded(self, life: AttemptLife) -> None:
        await self._rows.become(self._key(life), life)
        self.tell(EventKind(life.view.state.value), life, "" if life.view.error is None else str(life.view.error))
        if life.was_lost:
            self.tell(EventKind.LOST, life)

    async def _cancel(self, life: AttemptLife, reason: CancellationReason, *, kill: bool = False) -> None:
        if life.ended:
            return
        await self._rows.update(self._key(life), cancel_asked=reason.value, cancel_kill=kill or life.kill_asked)
        await life.cancel(reason, kill=kill)
        if life.view.state is AttemptState.QUEUED and self._admission.position(self._claim(life).key):
            self._admission.release(self._claim(life).key)
            await life.fail(cancelled(reason))
            self._watches.unwatch(self._key(life))

    async def _expire(self, key: Key, reason: CancellationReason) -> None:
        life = self._lives.get(key)
        if life is not None:
            await self._cancel(life, reason)

    async def _sweep(self) -> None:
        """Forget ended attempts whose time has come."""
        while True:
            await asyncio.sleep(min(60.0, self._result_ttl))
            limit = datetime.now(UTC) - timedelta(seconds=self._result_ttl)
            for life in list(self._lives.values()):
                if life.ended and life.view.finished_at is not None and life.view.finished_at < limit:
                    await self._forget(life)

    async def _forget(self, life: AttemptLife) -> None:
        try:
            await life.forget()
        except ForgeyardError as error:
            log.warning("output of %s: %s", life.name, error)
        await self._rows.remove(self._key(life))
        self._lives.pop(self._key(life), None)

    def _own(self, caller: Caller, attempt_id: str) -> AttemptLife:
        life = self._lives.get((caller.uid, attempt_id))
        return self._found(caller, attempt_id) if life is None else life

    def _found(self, caller: Caller, name: str) -> AttemptLife:
        seen = [life for life in self._lives.values() if caller.may_see(life.view.owner_uid)]
        exact = [life for life in seen if name in (life.view.attempt_id, life.view.sandbox_id)]
        matching = exact or [
            life
            for life in seen
            if name and (life.view.attempt_id.startswith(name) or life.view.sandbox_id.startswith(name))
        ]
        if len(matching) == 1:
            return matching[0]
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            "no_such_attempt",
            f"{len(matching) or 'no'} attempt{'s' if len(matching) > 1 else ''} of yours match {name!r}",
            resolution="`forgeyard ps` lists them",
        )

    def _shown(self, life: AttemptLife) -> AttemptView:
        return replace(life.view, queue_position=self._admission.position(self._claim(life).key))

    @staticmethod
    def _claim(life: AttemptLife) -> Claim:
        return Claim(life.name, life.view.tenant, life.view.reserved, life.wanted.priority)

    @staticmethod
    def _key(life: AttemptLife) -> Key:
        return life.view.owner_uid, life.view.attempt_id

    def _spawn(self, course: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(course)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_name(attempt_id: str) -> None:
    if not attempt_id or len(attempt_id) > MAX_ATTEMPT_ID or "\0" in attempt_id:
        raise InvalidRequest("attempt_id", attempt_id, f"give 1 to {MAX_ATTEMPT_ID} characters")
