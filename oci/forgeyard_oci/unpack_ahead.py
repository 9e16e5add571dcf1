"""Runs an iterator in a thread of its own, a few items ahead, so that inflating and writing files overlap."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_AHEAD: Final = 6


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


class ReadAhead:
    """The items of `items`; its errors are raised where they would have been. Close it, or its thread waits for ever.

    All of `items`'s own code runs in that thread: what it counts may be looked at from outside, not changed.
    """

    def __init__(self, items: Iterator[bytes]) -> None:
        self._items = items
        self._queue: queue.Queue[bytes | _Ended] = queue.Queue(_AHEAD)
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._end: _Ended | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._end is None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="layer", daemon=True)
                self._thread.start()
            item = self._queue.get()
            if not isinstance(item, _Ended):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """End the thread; `items` is not read further. May be called twice."""
        self._stopped = True
        while self._thread is not None and self._thread.is_alive():
            # It may be waiting for room to put one more item, and then its end.
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._end = self._end or _Ended(None)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._queue.put(item)
                if self._stopped:
                    break
        except BaseException as caught:  # noqa: BLE001  whatever it is, it is raised in the thread that reads
            error = caught
        self._queue.put(_Ended(error))
