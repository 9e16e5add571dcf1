"""A service's output as lines, bounded: what it writes is never trusted to have an end of line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MOST_LINE: Final = 8 << 10
"""Bytes of a line that are looked at or shown; the rest of it is dropped."""
TAIL_LINES: Final = 20
TAIL_BYTES: Final = 16 << 10


class LineSplitter:
    """Feed it bytes as they come, get whole lines without their ends, each cut to MOST_LINE."""

    def __init__(self) -> None:
        self._open = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """Lines that `data` completes."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._extend(piece)
            yield self.rest()
            self._open.clear()
        self._extend(rest)

    def _extend(self, piece: bytes) -> None:
        self._open += piece[: MOST_LINE - len(self._open)]

    def rest(self) -> str:
        """The line that has no end yet."""
        return self._open.removesuffix(b"\r").decode("utf-8", "replace")


def last_lines(data: bytes, most: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of `data`, as text."""
    splitter = LineSplitter()
    lines = [*splitter.feed(data)]
    if rest := splitter.rest():
        lines.append(rest)
    return tuple(lines[-most:])
