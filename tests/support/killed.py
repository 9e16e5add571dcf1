"""Executors that tests kill: what they leave is undone whatever the test makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forgeyard_executor import Executor

if TYPE_CHECKING:
    from egress_host import EgressHost


@contextmanager
def undone(state: Path, *, runtime: str | None = None, host: EgressHost | None = None) -> Iterator[None]:
    """For a block in which an executor is killed, looked after and recovered from.

    A block that fails may have come before its recovery: opening an executor on `state` is one, and where it was done
    already there is nothing left for it to do.

    :param runtime: of the killed executor. host: whose network it had.
    """

    async def recover() -> None:
        async with Executor.open(state, runtime=runtime):
            pass

    try:
        yield
    except BaseException:
        if host is None:
            asyncio.run(recover())
        else:
            host.play(recover)
        raise
