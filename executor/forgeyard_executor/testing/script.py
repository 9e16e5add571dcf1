"""What calls of something pretended do before they do what they are for: fail, take their time, be remembered."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from forgeyard_model.errors import ForgeyardError


class Script:
    """Failures and delays by verb.

    :ivar calls: every call so far, as verb and the name of what it was for, in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._failures: dict[str, deque[ForgeyardError]] = defaultdict(deque)
        self._delays: dict[str, float] = {}

    def fail(self, verb: str, error: ForgeyardError, times: int = 1) -> None:
        """The next `times` calls of `verb` raise `error`."""
        self._failures[verb].extend([error] * times)

    def delay(self, verb: str, seconds: float) -> None:
        """Each call of `verb` takes so long."""
        self._delays[verb] = seconds

    async def play(self, verb: str, name: str) -> None:
        """Take the time that `verb` takes, then fail if it has to."""
        self.calls.append((verb, name))
        if self._delays.get(verb):
            await asyncio.sleep(self._delays[verb])
        if self._failures[verb]:
            raise self._failures[verb].popleft()
