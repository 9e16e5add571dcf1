"""Waiting for work in threads, which goes on when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

InPool = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a blocking call in a bounded pool of threads."""


async def to_the_end(*works: Awaitable[Any]) -> list[Any]:
    """The results of all `works`, in order. Every one has ended when this returns, whatever happens.

    :raises BaseException: the first that one of them raised, or the caller's cancellation, once all have ended.
    """
    futures = [asyncio.ensure_future(work) for work in works]
    cancelled: asyncio.CancelledError | None = None
    while any(not future.done() for future in futures):
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError as error:
            cancelled = error
    failures = [future.exception() for future in futures if not future.cancelled()]
    if cancelled is not None:
        raise cancelled
    for failure in failures:
        if failure is not None:
            raise failure
    return [future.result() for future in futures]


class Lazy(Generic[T]):
    """Something that the first who needs it makes, for all. After a failure the next one tries again. Thread-safe."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []

    def get(self) -> T:
        """It, made by now. Blocking."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    @property
    def made(self) -> T | None:
        """It, if it is there already."""
        return self._made[0] if self._made else None

    def take(self) -> T | None:
        """It, if it is there; the next `get` makes another one."""
        with self._lock:
            return self._made.pop() if self._made else None
