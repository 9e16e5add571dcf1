"""A server's keepers: found again after a restart, started where there is none, replaced when one dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from forgeyard_api.keeper.kept import KeptExecutor
from forgeyard_api.keeper.link import LOST, KeeperLink
from forgeyard_api.keeper.place import config_digest
from forgeyard_api.keeper.process import KeeperProcess, Wish, find, reap, recover, start
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError

log: Final = logging.getLogger("forgeyard.serve")

_AGAIN: Final = 0.1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
"""Seconds between tries to start a keeper."""


class Keepers:
    """The keepers of one server.

    :param config: what they have to go by. A keeper of another version, or under another configuration, takes no new
        attempts; those it has it serves to their end.
    """

    def __init__(self, wish: Wish, config: ExecutorConfig, runtimes: tuple[str, ...]) -> None:
        self._wish = wish
        self._runtimes = runtimes
        self._version = version("forgeyard-executor")
        self._config = config_digest(config)
        self._kept: dict[str, KeptExecutor] = {runtime: KeptExecutor(runtime) for runtime in runtimes}
        self._links: list[KeeperLink] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._recovering = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(cls, wish: Wish, config: ExecutorConfig, runtimes: tuple[str, ...]) -> AsyncIterator[Keepers]:
        """Find or start a keeper for each of `runtimes`. At the end of the block they are left running.

        What dead ones left has been destroyed by then.

        :raises ForgeyardError: one can't be started, or what a dead one left can't be destroyed.
        """
        keepers = cls(wish, config, runtimes)
        try:
            await keepers._open()
            yield keepers
        finally:
            await keepers._close()

    def executors(self) -> dict[str, KeptExecutor]:
        """Whom new attempts are given to, by runtime."""
        return {runtime: self._kept[runtime] for runtime in self._runtimes}

    def retired(self) -> dict[str, KeptExecutor]:
        """Those of runtimes that are configured no more: they have attempts, and take none."""
        return {runtime: kept for runtime, kept in self._kept.items() if runtime not in self._runtimes}

    async def end_strays(self, known: frozenset[str]) -> None:
        """End what keepers have that is none of `known`: nobody could ask for it any more.

        :param known: names of attempts.
        """
        for link in [link for kept in self._kept.values() for link in kept.links]:
            try:
                for name in sorted(await link.executor.names() - known):
                    log.warning("the keeper %d has %s, which nobody can ask for: it is ended", link.pid, name)
                    await link.executor.forget(name)
            except ExecutorError as error:
                if error.reason != LOST:
                    raise

    # ---- inside

    async def _open(self) -> None:
        found, died = await find(self._wish)
        for process in reversed(found):  # the youngest is the one to go on with
            await self._connect(process, current=self._serves_new(process))
        started = False
        for runtime in self._runtimes:
            if self._kept[runtime].current is None:
                await self._start(runtime)
                started = True
        if died and not started:
            await recover(self._wish, self._runtimes[0])

    def _serves_new(self, process: KeeperProcess) -> bool:
        about = process.about
        kept = self._kept.get(about.runtime)
        own = about.version == self._version and about.config == self._config
        return own and about.runtime in self._runtimes and kept is not None and kept.current is None

    async def _start(self, runtime: str) -> None:
        """Its opening destroys what dead ones left."""
        async with self._recovering:
            process = await start(self._wish, runtime)
        if not await self._connect(process, current=True):
            raise ExecutorError(
                ExecutorErrorKind.SPAWN_FAILED,
                "keeper_not_started",
                f"the keeper for {runtime} died at once",
                resolution="see the end of its log, which is in the server's",
            )

    async def _connect(self, process: KeeperProcess, *, current: bool) -> bool:
        """Whether it lives to take new attempts, where it is to be the current one."""
        link = KeeperLink(process)
        self._links.append(link)
        kept = self._kept.setdefault(process.about.runtime, KeptExecutor(process.about.runtime))
        if not current:
            await kept.add(link, current=False)
        self._spawn(self._listen(link, kept, retired=not current))
        if current and not await link.settled():
            return False
        if current:
            await kept.add(link, current=True)
        return True

    async def _listen(self, link: KeeperLink, kept: KeptExecutor, *, retired: bool) -> None:
        """Listen to its events, by which a keeper knows that it has a server, and we that it lives."""
        about, place = link.process.about, link.process.place
        while place.kept:
            try:
                await link.executor.retire(retired=retired)
                link.answers()
                async with aclosing(link.calls.stream("Events", wire.EventsRequest())) as events:
                    async for _ in events:
                        pass
            except ForgeyardError as error:
                log.info("the keeper %d for %s does not answer: %s", about.pid, about.runtime, error)
            await asyncio.sleep(_AGAIN)
        link.is_gone()
        reap(about.pid)
        self._links.remove(link)
        await self._gone(link, kept)
        await link.calls.close()

    async def _gone(self, link: KeeperLink, kept: KeptExecutor) -> None:
        """Its attempts are reported lost once what it left is destroyed."""
        about, place = link.process.about, link.process.place
        was_current = kept.current is link
        ended = not place.directory.exists()  # it removes that itself, when it has nothing left
        if ended:
            log.info("the keeper %d for %s has ended", about.pid, about.runtime)
        else:
            log.error("the keeper %d for %s died; its log ends: %s", about.pid, about.runtime, place.last_words(5))
        kept.drop(link, "the last one died")
        place.remove()
        if was_current:
            await self._replace(link, kept)
        elif not ended:
            await self._recover(link, about.runtime)
        link.was_lost()

    async def _replace(self, link: KeeperLink, kept: KeptExecutor) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._start(kept.runtime)
            except ForgeyardError as error:
                log.error("no keeper for %s: %s", kept.runtime, error)  # noqa: TRY400  # its message is all there is
                kept.drop(link, str(error))
                link.was_lost(f"what was left of it could not be destroyed yet: {error}")
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
            else:
                return

    async def _recover(self, link: KeeperLink, runtime: str) -> None:
        try:
            async with self._recovering:
                await recover(self._wish, runtime)
        except ForgeyardError as error:
            log.error("recovery after a keeper's death: %s", error)  # noqa: TRY400  # as above
            link.was_lost(f"what was left of it could not be destroyed yet: {error}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for link in self._links:
            await link.calls.close()
