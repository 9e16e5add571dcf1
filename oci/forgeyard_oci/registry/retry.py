"""When a request is tried again, after how long, and when that has to end."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar

from forgeyard_model.errors import ExecutorError
from forgeyard_oci.registry.budget import Budget

_SECONDS: Final = re.compile(r"[0-9]{1,9}\Z")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How patient a client is. All times in seconds.

    :param connect: for name lookup, connection and TLS together.
    :param idle: without a single byte from the registry, after which a connection counts as dead.
    :param commit: for the registry's answer once a whole blob was sent; it may have to hash and move it first.
    :param slow_window, slow_rate: less than `slow_rate` bytes a second over `slow_window` counts as stalled.
    :param tick: how often cancellation and deadline are looked at while the network is waited for.
    :param tries: of one request, the first included.
    :param first_wait, most_wait: before the second try, doubled each time, up to this.
    :param longest_told: the longest wait a registry may ask for that is still sat through.
    """

    connect: float = 10.0
    idle: float = 30.0
    commit: float = 300.0
    slow_window: float = 60.0
    slow_rate: float = 1024.0
    tick: float = 0.2
    tries: int = 5
    first_wait: float = 0.5
    most_wait: float = 8.0
    longest_told: float = 120.0


class Transient(Exception):  # noqa: N818  it says what it is; nobody outside this package sees one
    """Something that another try may mend.

    :param error: what the caller gets when no try is left.
    :param told: seconds the registry asked us to wait, None when it named none.
    """

    def __init__(self, error: ExecutorError, told: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.told = told


class Tries:
    """Counts what failed of one request, and waits in between."""

    def __init__(self, timings: Timings, budget: Budget) -> None:
        self._timings = timings
        self._budget = budget
        self._failed = 0

    def progressed(self) -> None:
        """The last try brought something worth keeping: count from the start."""
        self._failed = 0

    def again(self, trouble: Transient) -> None:
        """Wait for the next try.

        :raises ExecutorError: the trouble's own, when no try is left or the wait would outlast the budget.
        """
        self._budget.check()
        self._failed += 1
        wait = self._wait(trouble.told)
        left = self._budget.remaining()
        too_long = wait > self._timings.longest_told or (left is not None and wait >= left)
        if too_long or self._failed >= self._timings.tries:
            raise trouble.error from trouble
        self._budget.wait(wait)

    def _wait(self, told: float | None) -> float:
        # Jitter, so that twenty jobs turned away together do not come back together.
        if told is not None:
            return told + random.uniform(0, min(1.0, told / 4))  # noqa: S311  no secret depends on it
        most = min(self._timings.most_wait, self._timings.first_wait * 2 ** (self._failed - 1))
        return random.uniform(most / 2, most)  # noqa: S311  as above


def attempt(act: Callable[[], _Result], timings: Timings, budget: Budget) -> _Result:
    """Call `act` until it does not raise Transient, or Tries says that it is enough."""
    tries = Tries(timings, budget)
    while True:
        try:
            return act()
        except Transient as trouble:
            tries.again(trouble)


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3); None when absent or neither number nor date."""
    text = (value or "").strip()
    if _SECONDS.match(text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
        return max(0.0, moment.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
