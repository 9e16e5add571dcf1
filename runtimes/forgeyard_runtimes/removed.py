"""A container that somebody removes at its engine while its job runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.contract import ContainerState, ContainerStatus

_LOOKS: Final = 80
_PAUSE: Final = 0.05
"""Seconds. Whoever removes a container kills it first; the engine forgets it a little later, and tells nobody."""


async def is_removed(state: Callable[[], Awaitable[ContainerState]]) -> bool:
    """Whether a container whose PID 1 just died is forgotten by its engine before long.

    :raises ForgeyardError: the engine does not say.
    """
    for _ in range(_LOOKS):
        if (await state()).status is ContainerStatus.ABSENT:
            return True
        await asyncio.sleep(_PAUSE)
    return False


def removed_meanwhile(runtime: str) -> ExecutorError:
    """How such a job would have ended is not known."""
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "runtime_lost",
        f"the container was removed at {runtime} while its job ran",
        resolution="look for whoever removes containers on this host",
    )
