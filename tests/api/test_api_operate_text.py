"""What of a job's bytes reaches a terminal, and which lines are the last."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_api.operate.logs import Tail
from forgeyard_api.operate.terminal_text import TerminalText
from forgeyard_runtimes.spool_format import OutputChunk

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain \xc3\xa9\t\r\n", b"plain \xc3\xa9\t\r\n"),
        (b"\x1b[1;31mred\x1b[0m", b"red"),
        (b"\x1b]0;title\x07after", b"after"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", b"link"),
        (b"\x1bPq#0\x1b\\sixel", b"sixel"),
        (b"\x1b(Bx\x1b=y\x1bcz", b"xyz"),
        (b"\xc2\x9b2Jx\xc2\x9d0;t\xc2\x9cy", b"xy"),
        (b"a\x08\x07\x00b", b"ab"),
        (b"\x1b]0;never ended\nseen\n", b"\nseen\n"),
        (b"\x1b[\x1b[31mx", b"x"),
        (b"\xff", b"\xef\xbf\xbd"),
    ],
)
def test_sequences_go(data: bytes, shown: bytes) -> None:
    """Text stays, in whatever pieces it comes."""
    whole, piecewise = TerminalText(), TerminalText()
    assert whole.feed(data) == shown
    assert b"".join(piecewise.feed(data[at : at + 1]) for at in range(len(data))) == shown


@given(st.binary(max_size=200))
def test_nothing_steers_the_terminal(data: bytes) -> None:
    """No control character is left but line ends and tabs, and no line is lost."""
    shown = TerminalText().feed(data).decode()
    assert all(char in "\n\r\t" or char.isprintable() or not ("\x00" <= char <= "\x9f") for char in shown)
    assert shown.count("\n") == data.count(b"\n")


def test_the_last_lines() -> None:
    """Of both streams together, also such as came in pieces and such as have no end."""
    tail = Tail(3)
    for stream, data in (("stdout", b"a\nb"), ("stderr", b"x\n"), ("stdout", b"c\nd\n"), ("stdout", b"e")):
        tail.add(OutputChunk(stream, NOW, data))  # type: ignore[arg-type]  # one of the two names
    assert [(chunk.stream, chunk.data) for chunk in tail.chunks()] == [
        ("stdout", b"bc\n"),
        ("stdout", b"d\n"),
        ("stdout", b"e"),
    ]
