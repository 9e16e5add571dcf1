"""The executor of one runtime that a server has: whichever keeper is the current one, and those it took over from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Unpack

from forgeyard_api.keeper.link import LOST, KeeperLink, KeptPrepared
from forgeyard_api.serve.life import Attached
from forgeyard_executor.images import AS_USUAL, ImageOptions
from forgeyard_executor.interface import JobOptions
from forgeyard_executor.recovery import SandboxInfo
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.live import LiveContainer

if TYPE_CHECKING:
    from forgeyard_api.client.attempt import RemoteAttempt, RemotePrepared
    from forgeyard_executor.interface import PreparedAttempt, RunningAttempt

WAIT_SECONDS: Final = 60.0
"""How long a new attempt waits for a keeper that takes the place of one that died."""


class KeptExecutor:
    """Runs jobs in keepers. New attempts go to the current one; each attempt stays with the one that has it."""

    def __init__(self, runtime: str) -> None:
        self.runtime = runtime
        self._current: KeeperLink | None = None
        self._links: list[KeeperLink] = []
        self._why = "it is being started"
        self._changed = asyncio.Condition()

    # ---- what keepers there are

    @property
    def current(self) -> KeeperLink | None:
        """Whom new attempts are given to."""
        return self._current

    @property
    def links(self) -> tuple[KeeperLink, ...]:
        """All that live."""
        return tuple(self._links)

    async def add(self, link: KeeperLink, *, current: bool) -> None:
        """One more."""
        self._links.append(link)
        async with self._changed:
            if current:
                self._current = link
            self._changed.notify_all()

    def drop(self, link: KeeperLink, why: str) -> None:
        """One less.

        :param why: there is none for new attempts, as long as that is so.
        """
        if link in self._links:
            self._links.remove(link)
        if self._current is link:
            self._current = None
        self._why = why

    # ---- an executor

    async def capabilities(self, *, renew: bool = False) -> ExecutorCapabilities:
        """What the host really provides.

        :raises ExecutorError: also keeper_unavailable.
        """
        return await (await self._available()).executor.capabilities(renew=renew)

    async def watch_capabilities(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """The same, and again whenever it changes, from one keeper after the other."""
        while True:
            link = await self._available()
            try:
                async with aclosing(link.executor.watch_capabilities()) as changes:
                    async for found in changes:
                        yield found
            except ExecutorError as error:
                if error.reason not in (LOST, "server_unavailable"):
                    raise

    async def prepare_job(
        self,
        job: Job,
        *,
        source: str | Path | None = None,
        output: str | Path | None = None,
        attempt_id: str | None = None,
        labels: Mapping[str, str] = EMPTY,
        deadline: datetime | None = None,
        tenant: str = "",
        trusted: bool = True,
        images: ImageOptions = AS_USUAL,
    ) -> KeptPrepared:
        """As any executor's.

        :raises ExecutorError: also LOST, keeper_lost and keeper_unavailable.
        """
        link = await self._available()
        prepared = await link.executor.prepare_job(
            job,
            source=source,
            output=output,
            attempt_id=attempt_id,
            labels=labels,
            deadline=deadline,
            tenant=tenant,
            trusted=trusted,
            images=images,
        )
        return _kept(prepared, link)

    async def start(self, prepared: PreparedAttempt) -> RemoteAttempt:
        """As any executor's.

        :raises ExecutorError: also LOST, keeper_lost.
        """
        return await _link_of(prepared).executor.start(prepared)

    async def discard(self, prepared: PreparedAttempt) -> None:
        """As any executor's."""
        await _link_of(prepared).executor.discard(prepared)

    async def close_execution(self, execution: RunningAttempt) -> None:
        """As any executor's."""
        await execution.drop_output()

    @asynccontextmanager
    async def run(
        self,
        job: Job,
        **options: Unpack[JobOptions],
    ) -> AsyncIterator[RemoteAttempt]:
        """As any executor's."""
        prepared = await self.prepare_job(job, **options)
        running = await self.start(prepared)
        try:
            yield running
        finally:
            await self.close_execution(running)

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """Of all its keepers."""
        found = [info for link in self.links for info in await link.executor.sandboxes()]
        return tuple(sorted(found, key=lambda info: info.started_at))

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """The containers of an attempt, whoever keeps it.

        :raises ExecutorError: LOST, when nobody does.
        """
        error: ExecutorError | None = None
        for link in self.links:
            try:
                return await link.executor.inspect_attempt(sandbox_id)
            except ExecutorError as refused:
                if refused.reason != "no_such_attempt":
                    raise
                error = refused
        raise error or self._unavailable()

    # ---- a keeper

    async def attach(self, attempt_id: str) -> Attached | None:
        """The attempt of that name, whoever has it.

        :raises ForgeyardError: one that may have it could not be asked.
        """
        lost: ExecutorError | None = None
        for link in self.links:
            try:
                found = await link.executor.attach(attempt_id)
            except ExecutorError as error:
                if error.reason != LOST:
                    raise
                lost = error
                continue
            if found is not None:
                return self._attached(found, link)
        if lost is not None:
            raise lost
        return None

    async def forget(self, attempt_id: str) -> None:
        """End it if it has not ended, and drop what keepers have of it."""
        for link in self.links:
            try:
                await link.executor.forget(attempt_id)
            except ExecutorError as error:
                if error.reason != LOST:  # a dead one has nothing more to forget
                    raise

    def _attached(self, found: Attached, link: KeeperLink) -> Attached:
        if found.prepared is not None:
            return replace(found, executor=self, prepared=_kept(found.prepared, link))
        if found.preparing is None:
            return replace(found, executor=self)
        preparing = found.preparing

        async def prepared() -> KeptPrepared:
            return _kept(await preparing(), link)

        return replace(found, executor=self, preparing=prepared)

    async def _available(self) -> KeeperLink:
        """The current keeper, which one that died is given the time to be replaced by.

        :raises ExecutorError: LOST, keeper_unavailable.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._changed:
                while self._current is None:
                    await self._changed.wait()
                return self._current
        except TimeoutError as error:
            raise self._unavailable() from error

    def _unavailable(self) -> ForgeyardError:
        return ExecutorError(
            ExecutorErrorKind.LOST,
            "keeper_unavailable",
            f"no process of this server runs containers on {self.runtime} at the moment",
            details=self._why,
            resolution="mend what it says; the server tries again by itself",
        )


def _kept(prepared: PreparedAttempt | RemotePrepared, link: KeeperLink) -> KeptPrepared:
    return KeptPrepared(prepared.sandbox_id, prepared.context, prepared.bundle_digest, prepared.notes, link)


def _link_of(prepared: PreparedAttempt) -> KeeperLink:
    if not isinstance(prepared, KeptPrepared):
        raise TypeError("it was prepared by another executor")
    return prepared.link
