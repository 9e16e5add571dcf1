"""A container that somebody removes at its engine while its job runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.contract import ContainerState, ContainerStatus


async def removed_meanwhile(runtime: str, state: Callable[[], Awaitable[ContainerState]]) -> ExecutorError | None:
    """The loss of a container whose PID 1 died unasked, if its engine has forgotten it by now.

    The engine is asked once. Whoever removes a container kills it first, and the engine forgets it later, when that is
    nobody knows: so None does not say that nobody removes it, and no verdict may rest on it.

    :raises ForgeyardError: the engine does not say.
    """
    if (await state()).status is not ContainerStatus.ABSENT:
        return None
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "runtime_lost",
        f"the container was removed at {runtime} while its job ran",
        details="how the job would have ended is not known",
        resolution="look for whoever removes containers on this host",
    )
