"""Image configs, and the table that merges ENTRYPOINT and CMD with a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest, SandboxError
from forgeyard_oci.image_config import ImageConfig, image_argv
from forgeyard_oci.image_manifest import ConfigFile, parse_json


def read(**config: Any) -> ImageConfig:
    """A config as an image's blob would have it."""
    return ImageConfig.read(parse_json(ConfigFile, json.dumps({"config": config}).encode(), "config"))


@pytest.mark.parametrize(
    ("override", "entrypoint", "cmd", "args", "argv"),
    [
        # nothing, or arguments: ENTRYPOINT, then the arguments or CMD
        (None, (), ("sh",), (), ("sh",)),
        (None, (), ("sh",), ("ls", "-l"), ("ls", "-l")),
        (None, ("/ep.sh",), (), (), ("/ep.sh",)),
        (None, ("/ep.sh",), ("sh",), (), ("/ep.sh", "sh")),
        (None, ("/ep.sh",), ("sh",), ("ls",), ("/ep.sh", "ls")),
        (None, ("sh",), ("sh",), (), ("sh", "sh")),
        (None, ("sh",), ("sh",), ("-c", "true"), ("sh", "-c", "true")),
        # an entry point of the request's own: CMD is dropped
        (("/x",), ("/ep.sh",), ("sh",), (), ("/x",)),
        (("/x", "-v"), ("/ep.sh",), ("sh",), ("a",), ("/x", "-v", "a")),
        # cleared, in both spellings
        ((), ("/ep.sh",), ("sh",), ("ls",), ("ls",)),
        (("",), ("/ep.sh",), ("sh",), ("ls",), ("ls",)),
    ],
)
def test_argv_table(
    override: tuple[str, ...] | None,
    entrypoint: tuple[str, ...],
    cmd: tuple[str, ...],
    args: tuple[str, ...],
    argv: tuple[str, ...],
) -> None:
    """The documented table, row by row (field case C45)."""
    assert image_argv(override, entrypoint, cmd, args) == argv


@pytest.mark.parametrize(
    ("override", "entrypoint", "cmd"),
    [(None, (), ()), ((), ("/ep.sh",), ("sh",)), (("",), ("/ep.sh",), ("sh",)), (None, (), ("",))],
)
def test_nothing_to_run_is_an_error(
    override: tuple[str, ...] | None, entrypoint: tuple[str, ...], cmd: tuple[str, ...]
) -> None:
    """An empty result names the cure; the image's CMD does not come back when its ENTRYPOINT was cleared."""
    with pytest.raises(InvalidRequest, match="after --"):
        image_argv(override, entrypoint, cmd, ())


@pytest.mark.parametrize(
    "empty", [{}, {"Entrypoint": None, "Cmd": None, "Env": None, "User": None, "WorkingDir": None}]
)
def test_absent_and_null_are_empty(empty: dict[str, Any]) -> None:
    """Go writes null for what is absent."""
    config = read(**empty)
    assert (config.user, dict(config.env), config.entrypoint, config.cmd, config.workdir) == ("", {}, (), (), "")


def test_env_is_split_at_the_first_equals_sign() -> None:
    """Values may hold equals signs and be empty; the last of two wins."""
    assert dict(read(Env=["A=1", "B=x=y", "C=", "A=2"]).env) == {"A": "2", "B": "x=y", "C": ""}


@pytest.mark.parametrize("entry", ["NOVALUE", "=x", "", "A=\0"])
def test_bad_env_is_named(entry: str) -> None:
    """An entry that is no NAME=VALUE is refused, not dropped."""
    with pytest.raises(SandboxError, match="Env") as caught:
        read(Env=[entry])
    assert caught.value.reason == "bad_config"


@pytest.mark.parametrize(
    ("written", "read_as"),
    [("/srv/app", "/srv/app"), ("srv", "/srv"), ("/a/../../b", "/b"), ("//x//", "/x"), ("/", "/"), ("..", "/")],
)
def test_workdir_is_absolute_and_inside(written: str, read_as: str) -> None:
    """A relative directory starts at the root, which `..` does not leave."""
    assert read(WorkingDir=written).workdir == read_as


def test_a_bare_string_is_a_list_of_one() -> None:
    """Some images carry ENTRYPOINT and CMD as strings."""
    config = read(Entrypoint="/ep.sh", Cmd="run")
    assert (config.entrypoint, config.cmd) == (("/ep.sh",), ("run",))


_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.sampled_from(["User", "Env", "Entrypoint", "Cmd", "WorkingDir", "Other"]), _JSON))
def test_any_config_gives_a_config_or_our_error(config: dict[str, Any]) -> None:
    """Whatever JSON stands in an image, we answer with one of our own errors at the worst."""
    try:
        result = read(**config)
    except SandboxError:
        return
    assert result.workdir == "" or result.workdir.startswith("/")


def test_deeply_nested_json_is_our_error() -> None:
    """JSON nested beyond all reason is an unreadable config, not a crash."""
    data = b'{"config":' * 50_000 + b"}" * 50_000
    with pytest.raises(SandboxError):
        parse_json(ConfigFile, data, "config")
