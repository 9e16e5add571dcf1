"""A server's end of a keeper: a remote executor whose death is told from a failure of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_api.client.attempt import RemoteAttempt, RemotePrepared
from forgeyard_api.client.calls import Calls, away
from forgeyard_api.client.remote import RemoteExecutor
from forgeyard_api.serve.attempt_types import OnClientDeath
from forgeyard_api.serve.life import Attached
from forgeyard_api.wire.messages import executor as wire
from forgeyard_executor.images import AS_USUAL, ImageOptions
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.result import ExecutionResult

if TYPE_CHECKING:
    from forgeyard_executor.interface import PreparedAttempt

LOSS_SECONDS: Final = 90.0
"""How long the report of a lost attempt waits for what is left of it to be destroyed."""


class KeptExecutor(RemoteExecutor):
    """An executor in a keeper.

    :param older: keepers of earlier versions for the same runtime, which may have an attempt that this one has not.
    """

    def __init__(self, calls: Calls, older: Sequence[KeptExecutor] = ()) -> None:
        super().__init__(calls, reconnect=0.0, on_client_death=OnClientDeath.CONTINUE)
        self._older = older
        self._lost = asyncio.Event()

    def was_lost(self) -> None:
        """The keeper is dead, and what it left has been destroyed, as far as that could be done."""
        self._lost.set()

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
    ) -> RemotePrepared:
        """As any executor's.

        :raises ExecutorError: also LOST, keeper_lost.
        """
        try:
            return await super().prepare_job(
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
        except ForgeyardError as error:
            raise await self.explained(error) from error

    async def start(self, prepared: PreparedAttempt) -> RemoteAttempt:
        """As any executor's.

        :raises ExecutorError: also LOST, keeper_lost.
        """
        try:
            return await super().start(prepared)
        except ForgeyardError as error:
            raise await self.explained(error) from error

    async def attach(self, attempt_id: str) -> Attached | None:
        """The attempt of that name, wherever it is kept."""
        found = await super().attach(attempt_id)
        for keeper in self._older:
            if found is not None:
                break
            found = await keeper.attach(attempt_id)
        return found

    async def explained(self, error: ForgeyardError) -> ForgeyardError:
        """`error`, or what it means when the keeper is dead: then it is told only once its leftovers are gone."""
        if not away(error):
            return error
        try:
            async with asyncio.timeout(LOSS_SECONDS):
                await self._lost.wait()
        except TimeoutError:
            return error
        return ExecutorError(
            ExecutorErrorKind.LOST,
            "keeper_lost",
            "the process that kept the attempt died",
            details="what was left of it has been destroyed",
            resolution="run it again, and look into the server's log",
        )

    def _running(self, attempt: wire.Attempt) -> RemoteAttempt:
        return KeptAttempt(self, self._calls, attempt.attempt_id, attempt.sandbox_id)


class KeptAttempt(RemoteAttempt):
    """An attempt in a keeper."""

    def __init__(self, executor: KeptExecutor, calls: Calls, attempt_id: str, sandbox_id: str) -> None:
        super().__init__(calls, attempt_id, sandbox_id, reconnect=0.0)
        self._executor = executor

    async def wait(self) -> ExecutionResult:
        """As any attempt's.

        :raises ExecutorError: also LOST, keeper_lost.
        """
        try:
            return await super().wait()
        except ForgeyardError as error:
            raise await self._executor.explained(error) from error
