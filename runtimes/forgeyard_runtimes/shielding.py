"""Work that must be completed whatever happens to the task that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def shielded(work: Awaitable[T]) -> T:
    """Await `work` to its end even when cancelled meanwhile; the cancellation is raised afterwards.

    asyncio.shield alone would let the caller go on while the work still runs, and undo what it is still making.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:  # noqa: BLE001  task.result() below raises it
            break
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
