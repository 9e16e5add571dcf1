"""Sizes, durations and cpu counts, as users write them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.limits import Limits, ResourceLimits
from forgeyard_model.units import format_duration, format_size, parse_cpus, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        (1048576, 1 << 20),
        ("1b", 1),
        ("1k", 1 << 10),
        ("1kb", 1 << 10),
        ("1KiB", 1 << 10),
        ("64MiB", 64 << 20),
        ("64 MiB", 64 << 20),
        ("64m", 64 << 20),
        ("64MB", 64 << 20),
        ("2g", 2 << 30),
        ("1.5g", 3 << 29),
        ("1t", 1 << 40),
        (" 5m ", 5 << 20),
    ],
)
def test_sizes_are_read_as_docker_reads_them(text: str | int, size: int) -> None:
    """Every suffix is a power of 1024; a bare integer is bytes."""
    assert parse_size(text, field="memory") == size


@pytest.mark.parametrize("text", ["", "m", "-1", "-5m", "0", "0g", "1.2.3", "5 5", "1x", "1kk", "9999p", True, "٣m"])
def test_sizes_that_are_none(text: str | int) -> None:
    """Zero, negatives, nonsense and the impossible are refused, by the field's name."""
    with pytest.raises(InvalidRequest) as caught:
        parse_size(text, field="memory")
    assert caught.value.field == "memory"
    assert caught.value.cure


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("1h30m", 5400),
        ("1m30s", 90),
        ("250ms", 0.25),
        ("1.5s", 1.5),
        ("1h1m1s1ms", 3661.001),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """Units may be combined, largest first."""
    assert parse_duration(text, field="timeout") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-5s", "0s", "30m1h", "1d", "400d", "9000h", "1.5h", "1 m", "infinity", "nan"]
)
def test_durations_that_are_none(text: str) -> None:
    """Zero, nonsense, the wrong order and more than a year are refused."""
    with pytest.raises(InvalidRequest):
        parse_duration(text, field="timeout")


@pytest.mark.parametrize(("text", "cure"), [("90", "write 90s"), (90, "write 90s"), ("1.5", "write 1.5s")])
def test_a_bare_number_gets_its_cure(text: str | int, cure: str) -> None:
    """A number without a unit is answered with what to write."""
    with pytest.raises(InvalidRequest) as caught:
        parse_duration(text, field="timeout")
    assert caught.value.cure.endswith(cure)


def test_zero_is_a_duration_where_it_makes_sense() -> None:
    """A grace of nothing is a choice."""
    assert parse_duration("0s", field="grace", allow_zero=True) == 0


@pytest.mark.parametrize(("text", "cpus"), [("2", 2.0), (2, 2.0), ("0.5", 0.5), ("0.01", 0.01)])
def test_cpus(text: str | float, cpus: float) -> None:
    """Whole processors and parts of one."""
    assert parse_cpus(text, field="cpus") == cpus


@pytest.mark.parametrize("text", ["", "0", "-1", "0.001", "two", "nan", "inf", "1e9", True])
def test_cpus_that_are_none(text: str) -> None:
    """Nothing that could not be enforced."""
    with pytest.raises(InvalidRequest):
        parse_cpus(text, field="cpus")


@given(st.text())
def test_no_text_surprises_a_parser(text: str) -> None:
    """Whatever is written, it is a value or an InvalidRequest."""
    for parse in (parse_size, parse_duration, parse_cpus):
        with suppress(InvalidRequest):
            assert parse(text, field="x") > 0


@given(st.integers(min_value=1 << 10, max_value=1 << 50))
def test_shown_sizes_can_be_read(size: int) -> None:
    """What is shown for people parses again, to the digits shown."""
    assert parse_size(format_size(size), field="x") == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "250ms"), (1.5, "1.5s"), (125, "2m05s"), (120, "2m"), (3720, "1h02m"), (59.99, "60s")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    """Three digits at the most, units that fit."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("memory", "1MiB"),
        ("disk", "1MiB"),
        ("pids", 0),
        ("pids", 3),
        ("pids", True),
        ("nofile", 5),
        ("pids", 5_000_000),
    ],
)
def test_limits_too_small_to_live_with(limit: str, value: object) -> None:
    """A limit no process could start under names itself."""
    with pytest.raises(InvalidRequest) as caught:
        Limits(**{limit: value})  # type: ignore[arg-type]  # the wrong types are the point
    assert caught.value.field == limit


def test_limits_fill_in_what_is_not_set() -> None:
    """A job's own limit stays, a default fills the gap."""
    mine, defaults = Limits(memory="512MiB"), ResourceLimits(memory=1, pids=7)
    assert mine.or_default(defaults) == ResourceLimits(memory=512 << 20, pids=7)


def test_a_long_bare_number_is_not_repeated_in_the_cure() -> None:
    """The value is shown shortened once; the cure stays one readable line."""
    with pytest.raises(InvalidRequest) as caught:
        parse_duration("1" * 400, field="timeout")
    assert len(str(caught.value)) < 200
