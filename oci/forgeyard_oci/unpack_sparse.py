"""Maps of sparse files in tars: GNU's old headers, and its pax formats 0.0, 0.1 and 1.0.

A map is a tuple of (offset, length) pieces of data; what lies between them is a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from forgeyard_oci.image_errors import refused

SparseMap = tuple[tuple[int, int], ...]

_MAX_PIECES: Final = 1 << 16
_PIECE: Final = 24  # two numbers of 12 bytes in an old GNU header
_DIGITS: Final = 20


def checked_map(numbers: Sequence[int], real_size: int, stored: int) -> SparseMap:
    """Pairs from a flat list, in order, within the file, and as long together as the data stored for them.

    :raises SandboxError: when any of that does not hold.
    """
    pieces = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    end = total = 0
    for offset, length in pieces:
        if offset < end or length < 0:
            raise _bad("its pieces overlap")
        end = offset + length
        total += length
    if len(numbers) % 2 or end > real_size or total != stored:
        raise _bad("it does not fit the file")
    return pieces


def gnu_numbers(block: bytes, count: int, number: Callable[[bytes], int]) -> list[int]:
    """The pieces in (part of) an old GNU header; an empty field ends them."""
    numbers: list[int] = []
    for at in range(0, count * _PIECE, _PIECE):
        if not block[at]:
            break
        numbers += [number(block[at : at + 12]), number(block[at + 12 : at + _PIECE])]
    return numbers


def pax_numbers(records: Sequence[tuple[str, bytes]], headers: Mapping[str, bytes]) -> list[int] | None:
    """The pieces of pax formats 0.1 (one list) and 0.0 (repeated records); None when neither is there."""
    if "GNU.sparse.map" in headers:
        return [decimal(word) for word in _split(headers["GNU.sparse.map"], b",")]
    wanted = ("GNU.sparse.offset", "GNU.sparse.numbytes")
    numbers = [decimal(value) for key, value in records if key in wanted]
    if len(numbers) > 2 * _MAX_PIECES:
        raise _bad("it has too many pieces")
    return numbers or None


def data_numbers(read_block: Callable[[], bytes]) -> tuple[list[int], int]:
    """The pieces of pax format 1.0, which stand before the data; and how many bytes they took with padding."""
    buffer, used = b"", 0
    numbers: list[int] = []
    wanted = None
    while wanted is None or len(numbers) < wanted:
        line, newline, rest = buffer.partition(b"\n")
        if newline:
            buffer = rest
            if wanted is None:
                wanted = 2 * decimal(line)
            else:
                numbers.append(decimal(line))
        elif len(buffer) > _DIGITS:
            raise _bad("it has no numbers")
        else:
            buffer += read_block()
            used += 512
        if (wanted or 0) > 2 * _MAX_PIECES:
            raise _bad("it has too many pieces")
    return numbers, used


def decimal(text: bytes) -> int:
    """A number of a pax header. int() alone takes signs, spaces and underscores."""
    if not text.isdigit() or len(text) > _DIGITS:
        raise _bad("it has no numbers")
    return int(text)


def _split(text: bytes, separator: bytes) -> list[bytes]:
    words = text.split(separator, 2 * _MAX_PIECES)
    return [word for word in words if word] if text else []


def _bad(why: str) -> Exception:
    return refused("bad_tar", "the layer holds a broken map of a sparse file", details=why)
