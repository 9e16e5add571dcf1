"""An event loop on a clock of its own: it never waits, its time goes on when nothing else can."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """A selector for which time passes at once."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; else the time that was to be waited is over."""
        found = super().select(0)
        if not found and timeout is None:
            raise AssertionError("everything waits for ever")
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` is the clock's."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        """Seconds on the virtual clock."""
        return self.clock.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
