"""Sizes, durations and cpu counts as users write them (CONTRACT.md, Command line)."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from forgeyard_model.errors import InvalidRequest

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\Z", re.ASCII)
_POWER: Final = {"": 0, "b": 0}
for _n, _letter in enumerate("kmgtp", start=1):
    for _suffix in (_letter, _letter + "b", _letter + "ib", _letter + "i"):
        _POWER[_suffix] = _n

_DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?\Z", re.ASCII)

MAX_SIZE: Final = 1 << 62
"""Bytes. Above this a size is a typing mistake, and signed kernel interfaces overflow."""
MAX_SECONDS: Final = 366 * 24 * 3600.0


def parse_size(text: str | int, *, field: str) -> int:
    """Bytes in `text`: k/m/g, kb, KiB all mean powers of 1024, a bare integer is bytes.

    :raises InvalidRequest: for zero, negatives, nonsense, or more than 4 EiB.
    """
    match = _SIZE.match(_written(text)) if not isinstance(text, bool) else None
    if match is None or match[2].lower() not in _POWER:
        raise InvalidRequest(field, text, "write a size such as 64MiB, 2g or 1048576")
    size = int(Decimal(match[1]) * 1024 ** _POWER[match[2].lower()])
    if size <= 0:
        raise InvalidRequest(field, text, "must be more than 0; leave it out for the profile's default")
    if size > MAX_SIZE:
        raise InvalidRequest(field, text, "is larger than any machine; write a size such as 64MiB or 2g")
    return size


def parse_duration(text: str | int | float, *, field: str, allow_zero: bool = False) -> float:
    """Seconds in `text`, such as 90s, 15m, 1h30m, 250ms. A bare number is refused.

    :raises InvalidRequest: for a bare number, zero (unless allowed), nonsense, or more than a year.
    """
    shown = _written(text)
    if re.fullmatch(r"-?\d+(\.\d+)?", shown):
        example = f"{shown.lstrip('-')}s" if len(shown) <= 12 else "90s"
        raise InvalidRequest(field, text, f"a bare number has no unit: write {example}")
    match = _DURATION.match(shown)
    if match is None or not any(match.groups()):
        raise InvalidRequest(field, text, "write a duration such as 90s, 15m or 1h30m")
    hours, minutes, seconds, millis = (float(part or 0) for part in match.groups())
    total = hours * 3600 + minutes * 60 + seconds + millis / 1000
    if total <= 0 and not allow_zero:
        raise InvalidRequest(field, text, "must be more than 0; leave it out for the profile's default")
    if total > MAX_SECONDS:
        raise InvalidRequest(field, text, "is longer than a year; write a duration such as 90s or 15m")
    return total


def parse_cpus(text: str | float, *, field: str) -> float:
    """Number of cpus, such as 2 or 0.5.

    :raises InvalidRequest: for zero, negatives, less than 0.01, or more than 8192.
    """
    try:
        value = Decimal(_written(text))
    except InvalidOperation as error:
        raise InvalidRequest(field, text, "write a number of cpus such as 2 or 0.5") from error
    if isinstance(text, bool) or not value.is_finite() or not Decimal("0.01") <= value <= 8192:
        raise InvalidRequest(field, text, "write a number of cpus from 0.01 to 8192")
    return float(value)


def _written(value: str | float) -> str:
    """As the user wrote it. Python does not write out integers of thousands of digits: those are no size at all."""
    try:
        return str(value).strip()
    except ValueError:
        return ""


def format_size(size: int) -> str:
    """Bytes for people: MiB where exact, as `plan` echoes them."""
    for unit, shift in (("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} B"


def format_duration(seconds: float) -> str:
    """Seconds for people: 250ms, 1.5s, 2m05s, 1h02m."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if rest else f"{minutes}m"
    return f"{minutes // 60}h{minutes % 60:02}m"
