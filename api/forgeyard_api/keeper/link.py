"""A server's end of one keeper: calls that outlast a broken connection, and tell the keeper's death from it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from forgeyard_api.client.attempt import RemotePrepared
from forgeyard_api.client.calls import CALL_SECONDS, Calls, away, channel_to
from forgeyard_api.client.remote import RemoteExecutor
from forgeyard_api.keeper.process import KeeperProcess
from forgeyard_api.serve.attempt_types import OnClientDeath
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError

log: Final = logging.getLogger("forgeyard.serve")

_PAUSE: Final = 0.2
"""Seconds between two tries to reach a keeper that lives."""
LOST: Final = "keeper_lost"


class KeeperLink:
    """The connection to a keeper, until it is dead and what it left has been destroyed."""

    def __init__(self, process: KeeperProcess) -> None:
        self.process = process
        self.calls = _KeeperCalls(self)
        self.executor = _KeeperExecutor(self.calls)
        self._gone = asyncio.Event()
        self._told = asyncio.Event()
        self._answered = asyncio.Event()
        self._left = ""

    @property
    def pid(self) -> int:
        """Of the keeper."""
        return self.process.about.pid

    def answers(self) -> None:
        """It knows that it has a server, and what it is for."""
        self._answered.set()

    async def settled(self) -> bool:
        """Wait until it answers; False when it dies before."""
        await self._answered.wait()
        return not self._gone.is_set()

    def is_gone(self) -> None:
        """It is dead."""
        self._gone.set()
        self._answered.set()

    def was_lost(self, left: str = "what was left of it has been destroyed") -> None:
        """Its attempts may be reported lost.

        :param left: what became of them.
        """
        if not self._told.is_set():
            self._left = left
            self._told.set()

    async def or_lost(self) -> None:
        """A pause, when the keeper lives.

        :raises ExecutorError: LOST, keeper_lost, when it does not, once its leftovers have been seen to.
        """
        try:
            async with asyncio.timeout(_PAUSE):
                await self._gone.wait()
        except TimeoutError:
            return
        await self.refuse_if_gone()

    async def refuse_if_gone(self) -> None:
        """Nothing can be asked of a keeper that is dead.

        :raises ExecutorError: as `or_lost`.
        """
        if not self._gone.is_set():
            return
        await self._told.wait()
        raise ExecutorError(
            ExecutorErrorKind.LOST,
            LOST,
            "the process that kept the attempt died",
            details=self._left,
            resolution="run it again, and look into the server's log",
        )


@dataclass(frozen=True, slots=True)
class KeptPrepared(RemotePrepared):
    """A prepared attempt, and who keeps it."""

    link: KeeperLink


class _KeeperCalls(Calls):
    """Calls to a keeper. While it lives they are repeated until they are answered."""

    def __init__(self, link: KeeperLink) -> None:
        target = link.process.place.target
        super().__init__(channel_to(target), target, reconnect=0.0)
        self._link = link

    async def call(self, name: str, request: Any, *, seconds: float = CALL_SECONDS, service: str = "Executor") -> Any:
        while True:
            try:
                return await self.once(name, request, seconds=seconds, service=service)
            except ExecutorError as error:
                if not away(error) and error.reason != "call_deadline":
                    raise
                log.warning("the keeper %d is asked again: %s", self._link.pid, error)

    async def once(self, name: str, request: Any, *, seconds: float, service: str = "Executor") -> Any:
        await self._link.refuse_if_gone()
        try:
            return await super().once(name, request, seconds=seconds, service=service)
        except ExecutorError as error:
            if away(error):
                await self._link.or_lost()
            raise

    async def stream(self, name: str, request: Any, *, service: str = "Executor") -> AsyncGenerator[Any, None]:
        await self._link.refuse_if_gone()
        try:
            async with aclosing(super().stream(name, request, service=service)) as answers:
                async for answer in answers:
                    yield answer
        except ForgeyardError as error:
            if away(error):
                await self._link.or_lost()
            raise


class _KeeperExecutor(RemoteExecutor):
    """Its executor. An attempt is the keeper's whether or not anybody here waits for it."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, reconnect=math.inf, on_client_death=OnClientDeath.CONTINUE)

    async def abandoned(self, attempt_id: str) -> None:
        """The server closes, or it says itself that the attempt is to end."""

    async def names(self) -> frozenset[str]:
        """Of every attempt that the keeper has, ended ones too."""
        answer = await self._calls.call("ListSandboxes", wire.ListSandboxesRequest())
        return frozenset(attempt.attempt_id for attempt in answer.attempts)

    async def retire(self, *, retired: bool) -> None:
        """Have it take no more attempts, and end once it has none; or take them again."""
        await self._calls.once("Drain", wire.DrainRequest(drain=retired), seconds=CALL_SECONDS)
