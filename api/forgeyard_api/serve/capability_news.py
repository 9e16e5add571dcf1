"""Tells whoever listens to events that a runtime's host can do less than before, or more again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Final

from forgeyard_api.serve.attempt_types import EventKind
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_executor.capability_cache import changed
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ForgeyardError

log: Final = logging.getLogger("forgeyard.serve")

PAUSE: Final = 5.0
"""Seconds before an executor that could not be asked is asked again; a keeper that died has a successor by then."""


async def tell_of_changes(table: AttemptTable, runtime: str) -> None:
    """Publish each change of what `runtime` can do here. Ends only when it is cancelled."""
    seen: ExecutorCapabilities | None = None
    while True:
        try:
            async with aclosing(table.executors[runtime].watch_capabilities()) as changes:
                async for found in changes:
                    message = words(seen, found)
                    if message:
                        table.tell(EventKind.CAPABILITIES, message=f"{runtime}: {message}")
                    seen = found
        except ForgeyardError as error:
            log.info("what %s can do is not known at the moment: %s", runtime, error)
        await asyncio.sleep(PAUSE)


def words(before: ExecutorCapabilities | None, after: ExecutorCapabilities) -> str:
    """What went and what came back; empty where nothing did, or nothing was known before."""
    if before is None:
        return ""
    found = changed(before, after)
    parts = [
        f"{word} {', '.join(sorted(names))}"
        for word, names in (
            ("no more", [feature.value for feature, lost, _ in found if lost]),
            ("now", [feature.value for feature, lost, _ in found if not lost]),
        )
        if names
    ]
    return "; ".join(parts)
