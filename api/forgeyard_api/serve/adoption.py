"""What becomes of the attempts that a dead server had: each is queued again, adopted, or reported lost, once."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from forgeyard_api.serve.attempt_types import AttemptState, EventKind
from forgeyard_api.serve.life import AttemptLife, Keeper, cancelled, keeper_of
from forgeyard_api.serve.store import StoredAttempt
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError

if TYPE_CHECKING:
    from forgeyard_api.serve.attempts import AttemptTable
    from forgeyard_executor.interface import JobExecutor

log: Final = logging.getLogger("forgeyard.serve")

_PAUSE: Final = 1.0
"""Seconds between two questions to a keeper that lives and does not answer."""


async def take_up(table: AttemptTable, life: AttemptLife, row: StoredAttempt) -> None:
    """Go on with an attempt of the store."""
    executor = table.executors.get(row.runtime)
    keeper = keeper_of(executor or table.retired.get(row.runtime))
    if life.ended:
        await _with_its_output(life, keeper)
        return
    if not row.handed:
        await _queue_again(table, life, executor)
        return
    try:
        found = keeper is not None and await _adopted(life, keeper)
    except ForgeyardError as error:
        await life.fail(error)
        return
    if found:
        if not life.ended:
            table.follow(life)
        table.tell(EventKind.ADOPTED, life)
    elif life.view.state is AttemptState.PREPARING:
        await life.back_to_the_queue()  # it is started only after it was written down as prepared: nothing of it ran
        await _queue_again(table, life, executor)
    else:
        await life.fail(_lost(row))


async def _with_its_output(life: AttemptLife, keeper: Keeper | None) -> None:
    """It has ended; its keeper may still have what it wrote, and is told when that may go."""
    try:
        if keeper is not None:
            await life.adopt(keeper)
    except ForgeyardError as error:
        log.warning("the output of %s can't be had: %s", life.name, error)


async def _queue_again(table: AttemptTable, life: AttemptLife, executor: JobExecutor | None) -> None:
    """Nobody but the store knew of it: nothing of it has begun."""
    if life.cancelled is not None:
        await life.fail(cancelled(life.cancelled))
    elif executor is None:
        await life.fail(
            ExecutorError(
                ExecutorErrorKind.LOST,
                "runtime_gone",
                f"this server runs nothing on {life.view.runtime} any more",
                resolution="ask for another runtime, or configure it again",
            )
        )
    else:
        try:
            table.queue(life)
        except ForgeyardError as error:
            await life.fail(error)


async def _adopted(life: AttemptLife, keeper: Keeper) -> bool:
    """Whether its keeper has it. One that lives and does not answer is asked until it does: it may have it.

    :raises ExecutorError: LOST, when the keeper died over it.
    """
    while True:
        try:
            return await life.adopt(keeper)
        except ExecutorError as error:
            if error.kind is ExecutorErrorKind.LOST and error.reason != "server_unavailable":
                raise
            log.warning("the keeper is asked again for %s: %s", life.name, error)
        await asyncio.sleep(_PAUSE)


def _lost(row: StoredAttempt) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "server_lost",
        "the server died while it ran, and nobody kept it",
        details=f"it was {row.state}; what was left of it has been destroyed",
        resolution="run it again",
    )
