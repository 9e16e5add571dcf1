"""What a job fetched, or tried to: one record a request, and bounded totals for the result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

log: Final = logging.getLogger("forgeyard.networks")

MOST_TOTALS: Final = 1000
OTHERS: Final = "others"
_MOST_WORD: Final = 32


class ProxyVerdict(StrEnum):
    """How a request ended. FAILED: it was allowed, or would have been read, and something went wrong after that."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProxyRecord:
    """One request.

    :ivar method: empty when no request was read. `host`, `port`: where it was to go, empty and 0 when unknown.
    :ivar address: the one that was connected to; empty when none was, or when a proxy of the executor resolved it.
    :ivar reason: a snake_case word; empty for ALLOWED. `status`: of the answer, 0 when there was none.
    :ivar bytes_up: from the job, `bytes_down`: to the job; bodies and tunnels, with heads of what was forwarded.
    :ivar duration: seconds.
    """

    method: str
    host: str
    port: int
    address: str
    verdict: ProxyVerdict
    reason: str
    status: int
    bytes_up: int
    bytes_down: int
    duration: float

    def document(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProxyTotal:
    """All requests to one destination with one end. `host` is "others" for what had no total of its own."""

    host: str
    port: int
    address: str
    verdict: ProxyVerdict
    reason: str
    count: int
    bytes_up: int
    bytes_down: int


_Key = tuple[str, int, str, ProxyVerdict, str]


class ProxyAudit:
    """Collects totals.

    :param each: called with every record. An exception of it is logged: an audit that is full ends no download.
    """

    def __init__(self, each: Callable[[ProxyRecord], None] | None = None) -> None:
        self._each = each
        self._totals: dict[_Key, list[int]] = {}

    def add(self, record: ProxyRecord) -> None:
        """One more."""
        key: _Key = (record.host, record.port, record.address, record.verdict, record.reason)
        if key not in self._totals and len(self._totals) >= MOST_TOTALS:
            key = (OTHERS, 0, "", record.verdict, "")
        total = self._totals.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += record.bytes_up
        total[2] += record.bytes_down
        if self._each is not None:
            try:
                self._each(record)
            except Exception:
                log.exception("an audit record of the fetch proxy could not be passed on")

    def totals(self) -> tuple[ProxyTotal, ...]:
        """So far, in the order they began."""
        return tuple(ProxyTotal(*key, *numbers) for key, numbers in self._totals.items())


def shown_method(text: bytes) -> str:
    """A method as records have it: the job may write anything there."""
    return text[:_MOST_WORD].decode("ascii", "replace")
