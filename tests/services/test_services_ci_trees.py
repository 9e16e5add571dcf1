"""CI files are other people's: whatever tree they hold, the readers answer or refuse, and never break."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.services import checked_services
from forgeyard_services.ci_files import read_services
from forgeyard_services.ci_words import image_names

WORDS = st.sampled_from(
    [
        *("services", "default", "variables", "extends", "inherit", "a", "b", "name", "alias", "command", "docker"),
        *("jobs", "image", "env", "ports", "volumes", "options", "container", "$A", "${B}", "$$", "80:80", "pg:1"),
        *("--health-cmd x", "-e A=b", "--ulimit nofile=5", "--env", "/data", "x:/data", "HEALTHCHECK_TCP_PORT", ""),
    ]
)
LEAVES = WORDS | st.none() | st.booleans() | st.integers(-5, 99999) | st.text(max_size=8)


def trees(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and mappings of `children`."""
    return st.lists(children, max_size=3) | st.dictionaries(WORDS | st.integers(), children, max_size=5)


SERVICES = st.recursive(LEAVES, trees, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(LEAVES, trees, max_leaves=25)
    | st.fixed_dictionaries({"services": st.lists(SERVICES, max_size=3), "variables": SERVICES})
    | st.fixed_dictionaries({"a": st.fixed_dictionaries({"services": SERVICES, "extends": SERVICES}), "b": SERVICES})
    | st.fixed_dictionaries(
        {"jobs": st.dictionaries(WORDS, st.fixed_dictionaries({"services": SERVICES}), max_size=2)}
    ),
    st.none() | st.sampled_from(["a", "b"]),
)
def test_any_tree_is_read_or_refused(tree: Any, job: str | None) -> None:
    """InvalidRequest is the only error, also of what our own checks say of what was read."""
    with suppress(InvalidRequest):
        specs, notes = read_services(tree, job)
        assert all(isinstance(note, str) for note in notes)
        checked_services(specs)


@given(st.text(max_size=300))
def test_any_image_has_names(image: str) -> None:
    """One or two, without the characters that no host name has."""
    names = image_names(image)
    assert 1 <= len(names) <= 2
    assert not any(character in name for name in names for character in "/:@ ")
