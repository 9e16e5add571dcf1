"""WWW-Authenticate: what a registry asks for (RFC 9110, section 11.6.1). Pure; no text makes it fail."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

MAX_HEADERS: Final = 16 << 10
"""Characters of all headers together that are looked at."""
MAX_CHALLENGES: Final = 16

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_GAP: Final = re.compile(r"[\s,]*")
_EQUALS: Final = re.compile(r"\s*=\s*")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)(?:"|\\?\Z)', re.DOTALL)
# More than a token may hold, as some registries leave the quotes out around URLs.
_BARE: Final = re.compile(r'[^\s,"]*')
_TOKEN68: Final = re.compile(r"\s+([A-Za-z0-9._~+/-]+=*)\s*(?=,|\Z)")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Challenge:
    """One scheme and its parameters, both in lower case. What stands in the place of parameters is left out."""

    scheme: str
    params: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str:
        """A parameter, "" when it is not there."""
        return self.params.get(name, "")


def parse_challenges(headers: Iterable[str]) -> tuple[Challenge, ...]:
    """Every challenge of the header's lines, in order. What can't be read is skipped; a repeated parameter counts once.

    A line may hold several challenges, and commas stand between challenges as well as between parameters.
    """
    found: list[tuple[str, dict[str, str]]] = []
    left = MAX_HEADERS
    for header in headers:
        _parse_line(header[:left], found)
        left -= len(header[:left])
    return tuple(Challenge(scheme, params) for scheme, params in found[:MAX_CHALLENGES])


def _parse_line(text: str, found: list[tuple[str, dict[str, str]]]) -> None:
    params: dict[str, str] | None = None  # those of the last line's challenge do not go on here
    place = 0
    while (place := _end(_GAP, text, place)) < len(text):
        word = _TOKEN.match(text, place)
        if word is None:
            place += 1
            continue
        place = word.end()
        equals = _EQUALS.match(text, place)
        if equals is None:
            params = {}
            found.append((word[0].lower(), params))
            place = _end(_TOKEN68, text, place)
            continue
        value, place = _value(text, equals.end())
        if params is not None:
            params.setdefault(word[0].lower(), value)


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return place if found is None else found.end()


def _value(text: str, place: int) -> tuple[str, int]:
    if quoted := _QUOTED.match(text, place):
        return _ESCAPE.sub(r"\1", quoted[1]), quoted.end()
    bare = _BARE.match(text, place)
    return (bare[0], bare.end()) if bare else ("", place)
