"""How WWW-Authenticate is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_oci.registry.challenge import MAX_CHALLENGES, Challenge, parse_challenges

REALM = "https://auth.example.org/token"


@pytest.mark.parametrize(
    ("headers", "challenges"),
    [
        ([], []),
        ([""], []),
        ([", ,"], []),
        (["Basic"], [("basic", {})]),
        (['Basic realm="a"'], [("basic", {"realm": "a"})]),
        (
            [f'Bearer realm="{REALM}",service="s",scope="repository:a/b:pull,push"'],
            [("bearer", {"realm": REALM, "service": "s", "scope": "repository:a/b:pull,push"})],
        ),
        ([f'Bearer realm="{REALM}", scope="aws"'], [("bearer", {"realm": REALM, "scope": "aws"})]),
        ([f"bearer realm={REALM},service=s"], [("bearer", {"realm": REALM, "service": "s"})]),
        (['BEARER REALM = "x" , Service="y"'], [("bearer", {"realm": "x", "service": "y"})]),
        (
            ['Basic realm="r", Bearer realm="t",scope="a,b"'],
            [("basic", {"realm": "r"}), ("bearer", {"realm": "t", "scope": "a,b"})],
        ),
        (['Basic realm="r"', 'Bearer realm="t"'], [("basic", {"realm": "r"}), ("bearer", {"realm": "t"})]),
        (['Negotiate, Basic realm="r"'], [("negotiate", {}), ("basic", {"realm": "r"})]),
        (['Negotiate YWJj==, Basic realm="r"'], [("negotiate", {}), ("basic", {"realm": "r"})]),
        (['Bearer realm="a\\"b\\\\c, Basic x"'], [("bearer", {"realm": 'a"b\\c, Basic x'})]),
        (['Bearer realm="open'], [("bearer", {"realm": "open"})]),
        (['Bearer realm="a",realm="b"'], [("bearer", {"realm": "a"})]),
        (['Bearer realm="",scope=""'], [("bearer", {"realm": "", "scope": ""})]),
        (['Basic realm="r"', 'scope="x"'], [("basic", {"realm": "r"})]),
        (['realm="x"'], []),
    ],
)
def test_challenges(headers: list[str], challenges: list[tuple[str, dict[str, str]]]) -> None:
    """Several in a line or in several lines, commas in quotes, missing parts, other schemes."""
    assert parse_challenges(headers) == tuple(Challenge(scheme, params) for scheme, params in challenges)


def test_a_flood_of_challenges_is_cut_off() -> None:
    """What a registry sends is looked at up to a bound."""
    assert len(parse_challenges(["a b=c," * 100_000] * 10)) == MAX_CHALLENGES


@given(st.lists(st.text(alphabet='aB ,="\\\\\t\x00\xe9/:', max_size=60) | st.text(max_size=60), max_size=3))
def test_no_text_makes_it_fail(headers: list[str]) -> None:
    """Any header gives challenges with names in lower case, or none."""
    for challenge in parse_challenges(headers):
        assert challenge.scheme
        assert challenge.scheme == challenge.scheme.lower()


_WORD = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,8}", fullmatch=True)
_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)


@given(st.lists(st.tuples(_WORD, st.dictionaries(_WORD.map(str.lower), _TEXT, max_size=4)), max_size=4))
def test_what_is_written_by_the_rules_is_read_back(challenges: list[tuple[str, dict[str, str]]]) -> None:
    """Schemes and quoted parameters, joined as the standard has it, come back the same."""
    quoted = [
        scheme
        + " "
        + ", ".join('{}="{}"'.format(k, v.replace("\\", r"\\").replace('"', r"\"")) for k, v in params.items())
        for scheme, params in challenges
    ]
    wanted = tuple(Challenge(scheme.lower(), params) for scheme, params in challenges)
    assert parse_challenges([", ".join(quoted)]) == wanted
    assert parse_challenges(quoted) == wanted
