"""Frames between executor and init, without a kernel."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest
from forgeyard_process_shim.protocol import (
    MAX_FRAME,
    BackgroundExited,
    Exited,
    Hello,
    NoExec,
    ProtocolError,
    Report,
    ReportDecoder,
    ShimNote,
    Stage,
    Started,
    StepCommand,
    StepFlag,
    encode_finish,
    encode_go,
    encode_kill_step,
    encode_signal,
    encode_step,
)

WORD = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
NAME = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=10)


def frame(kind: int, *words: int) -> bytes:
    """A report as init.c writes it."""
    return struct.pack(f"<IB{len(words)}Q", 1 + 8 * len(words), kind, *words)


REPORTS = st.one_of(
    st.builds(lambda a, b, c, d: (frame(0x81, a, b, c, d), Hello(a, b, c, d)), WORD, WORD, WORD, WORD),
    st.builds(lambda a, b: (frame(0x82, a, b), Started(a, b)), WORD, WORD),
    st.builds(lambda a, b, c: (frame(0x83, a, b, c), NoExec(a, b, Stage(c))), WORD, WORD, st.integers(1, 5)),
    st.builds(lambda a, s: (frame(0x84, a, s, 2, 1, 500000, 0, 3, 4), Exited(a, s, 2, 1.5, 3e-6, 4096)), WORD, WORD),
    st.builds(lambda a, s: (frame(0x85, a, s, 0, 1, 0, 2, 0, 1), BackgroundExited(a, s, 1.0, 2.0, 1024)), WORD, WORD),
)


@given(st.lists(REPORTS, max_size=8), st.lists(st.integers(1, 60)))
def test_reports_survive_any_chunking(reports: list[tuple[bytes, Report]], sizes: list[int]) -> None:
    """However the pipe cuts the bytes, the same reports come out, and nothing is left over."""
    data, decoder, seen = b"".join(raw for raw, _ in reports), ReportDecoder(), []
    for size in [*sizes, len(data) or 1]:
        chunk, data = data[:size], data[size:]
        seen += decoder.feed(chunk)
    seen += decoder.feed(data)
    assert seen == [report for _, report in reports]
    assert decoder.idle


@given(st.binary(max_size=600))
def test_garbage_is_a_typed_error_and_never_piles_up(data: bytes) -> None:
    """Any bytes decode, wait for at most one report's rest, or raise ProtocolError."""
    decoder = ReportDecoder()
    try:
        decoder.feed(data)
    except ProtocolError:
        return
    assert len(decoder._pending) < 4 + 255


@pytest.mark.parametrize("raw", [frame(0x81, 1), frame(0x99, 1), frame(0x83, 1, 2, 9), b"\0\0\0\0", b"\0\0\1\0"])
def test_wrong_reports_are_refused(raw: bytes) -> None:
    """Too few words, an unknown type or stage, a length of nothing or of too much."""
    with pytest.raises(ProtocolError):
        ReportDecoder().feed(raw)


def test_note_is_text() -> None:
    """An error report carries words, also when they are no UTF-8."""
    assert ReportDecoder().feed(struct.pack("<IB", 4, 0x86) + b"a\xff\n") == [ShimNote("a�")]


@given(st.lists(TEXT, min_size=1, max_size=5), st.dictionaries(NAME, TEXT, max_size=5), st.booleans(), st.booleans())
def test_step_frame_holds_every_word(argv: list[str], env: dict[str, str], background: bool, merge: bool) -> None:
    """Counts, flags and strings of a step stand in its frame as init.c reads them."""
    raw = encode_step(StepCommand(7, tuple(argv), env, "/w", "/in", background, merge), StepFlag.ALWAYS)
    length, kind, number, flags, argc, envc = struct.unpack_from("<IBIIII", raw)
    strings = raw[21:].split(b"\0")
    wanted = ["/w", "/in", *argv, *(f"{key}={value}" for key, value in env.items()), ""]
    assert (length, kind, number, argc, envc) == (len(raw) - 4, 2, 7, len(argv), len(env))
    assert flags == 16 | background | 2 * merge
    assert [text.decode("utf-8", "surrogateescape") for text in strings] == wanted


@pytest.mark.parametrize(
    "command",
    [
        StepCommand(1, ()),
        StepCommand(1, ("a\0b",)),
        StepCommand(1, ("\ud800",)),
        StepCommand(1, ("a",), {"": "x"}),
        StepCommand(1, ("a",), {"A=B": "x"}),
        StepCommand(1, ("a",), {"A": "x\0"}),
        StepCommand(1, ("a",), cwd="/\0"),
        StepCommand(1, ("x" * MAX_FRAME,)),
        StepCommand(1, ("x",) * 70_000),
    ],
)
def test_step_that_no_exec_can_take_is_refused(command: StepCommand) -> None:
    """NULs, bad names, lone surrogates and too much of anything are the request's fault."""
    with pytest.raises(InvalidRequest):
        encode_step(command)


def test_small_commands() -> None:
    """The other commands are a type and words."""
    assert encode_go() == b"\1\0\0\0\1"
    assert encode_finish() == b"\1\0\0\0\5"
    assert encode_signal(3, 15) == b"\x09\0\0\0\3\3\0\0\0\x0f\0\0\0"
    assert encode_kill_step(3) == b"\5\0\0\0\4\3\0\0\0"


@pytest.mark.parametrize(
    ("number", "stage", "code"), [(2, 4, 127), (20, 4, 127), (2, 5, 126), (13, 4, 126), (2, 3, 126)]
)
def test_shell_code_of_what_never_ran(number: int, stage: int, code: int) -> None:
    """127 is `not found` and nothing else."""
    assert NoExec(1, number, Stage(stage)).shell_code == code
