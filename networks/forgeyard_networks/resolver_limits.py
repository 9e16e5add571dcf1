"""How much a resolver does for one attempt."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResolverLimits:
    """Of one attempt. `rate`: questions a second, over UDP and TCP together; `pending`: upstream questions at a time.

    :ivar connections: TCP connections of one client.
    :ivar idle: seconds that a TCP connection may take over one question, or be silent.
    """

    rate: int = 2000
    pending: int = 256
    connections: int = 8
    idle: float = 10.0


class Bucket:
    """A rate, with a second's worth at once."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._left = float(rate)
        self._at = time.monotonic()

    def take(self) -> bool:
        """One, if there is one."""
        if self._left < 1:
            self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def reserve(self) -> float:
        """One that may come later: the seconds to wait for it."""
        if self._left < 1:
            self._refill()
        self._left -= 1
        return max(0.0, -self._left / self._rate)

    def give_back(self) -> None:
        """One that was not used."""
        self._left += 1

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(float(self._rate), self._left + (now - self._at) * self._rate)
        self._at = now
