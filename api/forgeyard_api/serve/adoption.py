"""What becomes of the attempts that a dead server had: each is queued again, adopted, or reported lost, once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from forgeyard_api.serve.attempt_types import EventKind
from forgeyard_api.serve.life import AttemptLife, Keeper, cancelled
from forgeyard_api.serve.store import StoredAttempt
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError

if TYPE_CHECKING:
    from forgeyard_api.serve.attempts import AttemptTable
    from forgeyard_executor.interface import JobExecutor

log: Final = logging.getLogger("forgeyard.serve")


async def take_up(table: AttemptTable, life: AttemptLife, row: StoredAttempt) -> None:
    """Go on with an attempt of the store."""
    executor = table.executors.get(row.runtime)
    if not row.handed and not life.ended:
        await _queue_again(table, life, executor)
        return
    found = executor is not None and await _adopted(life, executor)
    if life.ended:
        return  # with its output, where a keeper still has it
    if not found:
        await life.fail(_lost(row))
        table.tell(EventKind.LOST, life)
        return
    table.follow(life)
    table.tell(EventKind.ADOPTED, life)


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


async def _adopted(life: AttemptLife, executor: JobExecutor) -> bool:
    """Whether its keeper has it. An executor in the server's own process has nothing that is older than the server."""
    if not hasattr(executor, "attach"):
        return False
    keeper: Keeper = executor  # type: ignore[assignment]  # it has what makes it one
    try:
        return await life.adopt(keeper)
    except ForgeyardError as error:
        log.warning("asking the keeper for %s: %s", life.name, error)
        return False


def _lost(row: StoredAttempt) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "server_lost",
        "the server died while it ran, and nobody kept it",
        details=f"it was {row.state}; what was left of it has been destroyed",
        resolution="run it again",
    )
