"""A job's bytes made fit for a terminal: text stays, what would steer the terminal goes."""

from __future__ import annotations

import codecs
from enum import Enum, auto
from typing import Final

_KEPT: Final = "\n\r\t"
_ESCAPE: Final = "\x1b"
_CSI: Final = "\x9b"
_STRINGS: Final = frozenset("P]X^_")
"""After an escape: DCS, OSC, SOS, PM and APC, each of which goes on to its terminator (ECMA-48, 5.6)."""
_STRINGS_C1: Final = frozenset("\x90\x9d\x98\x9e\x9f")
_BELL: Final = "\x07"
_END: Final = "\x9c"


class _In(Enum):
    TEXT = auto()
    ESCAPE = auto()
    SEQUENCE = auto()
    STRING = auto()
    STRING_ESCAPE = auto()


class TerminalText:
    """One stream, piece by piece: a sequence or a character that is cut between two pieces is seen as one.

    A line break ends any sequence, so that a job can't hide what it says after an unfinished one.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._state = _In.TEXT

    def feed(self, data: bytes) -> bytes:
        """What of the next piece may be shown."""
        return "".join([char for char in self._decode(data) if self._shown(char)]).encode()

    def _shown(self, char: str) -> bool:
        if char == "\n":
            self._state = _In.TEXT
            return True
        state, self._state = self._state, self._next(char)
        plain = state is _In.TEXT and self._state is _In.TEXT
        return plain and (char in _KEPT or not _is_control(char))

    def _next(self, char: str) -> _In:
        if self._state is _In.TEXT:
            return _begins(char)
        if self._state is _In.ESCAPE:
            return _after_escape(char)
        if self._state is _In.SEQUENCE:
            # Parameters and intermediates are 0x20 to 0x3f; whatever else comes ends it.
            return _begins(char) if _is_control(char) else _In.SEQUENCE if " " <= char <= "?" else _In.TEXT
        if char in (_BELL, _END) or (self._state is _In.STRING_ESCAPE and char == "\\"):
            return _In.TEXT
        return _In.STRING_ESCAPE if char == _ESCAPE else _In.STRING


def _begins(char: str) -> _In:
    if char == _ESCAPE:
        return _In.ESCAPE
    if char == _CSI:
        return _In.SEQUENCE
    return _In.STRING if char in _STRINGS_C1 else _In.TEXT


def _after_escape(char: str) -> _In:
    if char == "[":
        return _In.SEQUENCE
    if char in _STRINGS:
        return _In.STRING
    if char == _ESCAPE or " " <= char <= "/":
        return _In.ESCAPE
    return _In.TEXT


def _is_control(char: str) -> bool:
    return char < " " or "\x7f" <= char <= "\x9f"
