"""Image configs, and the table that merges ENTRYPOINT and CMD with a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest, SandboxError
from forgeyard_model.plan import ImageHealthcheck
from forgeyard_oci.image_argv import image_argv
from forgeyard_oci.image_config import ImageConfig
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


IMAGES = [None, [], "", [""], ["sh"], ["/ep.sh"], "/ep.sh"]


@pytest.mark.parametrize("entrypoint", IMAGES)
@pytest.mark.parametrize("cmd", [None, [], ["sh"], "sh"])
@pytest.mark.parametrize("override", [None, (), ("",), ("/x",)])
@pytest.mark.parametrize("args", [(), ("ls",)])
def test_every_combination_of_image_and_request(
    entrypoint: Any, cmd: Any, override: tuple[str, ...] | None, args: tuple[str, ...]
) -> None:
    """Case C45: null, [] and "" of an image are one thing; of a request null is none of the others."""
    config = read(Entrypoint=entrypoint, Cmd=cmd)
    image = [entrypoint] if isinstance(entrypoint, str) else entrypoint or []
    default = [cmd] if isinstance(cmd, str) else cmd or []
    start = (image if any(image) else []) if override is None else [word for word in override if word]
    expected = (*start, *(args or (default if override is None else ())))
    if expected:
        assert image_argv(override, config.entrypoint, config.cmd, args) == expected
    else:
        with pytest.raises(InvalidRequest, match="nothing to run"):
            image_argv(override, config.entrypoint, config.cmd, args)


def test_volumes_are_absolute_and_clean() -> None:
    """Normal paths, each once; the root is none, and that is noted."""
    config = read(Volumes={"/b/../a": {}, "/a/": {}, "/z": None, "//": {}})
    assert config.volumes == ("/a", "/z")
    assert "root as a volume" in config.notes[0]


@pytest.mark.parametrize("path", ["", "data", "./x", "/a\0b"])
def test_a_bad_volume_is_named(path: str) -> None:
    """What docker would not mount either."""
    with pytest.raises(SandboxError, match="Volumes") as caught:
        read(Volumes={path: {}})
    assert caught.value.reason == "bad_config"


def test_exposed_ports_are_sorted_and_have_a_protocol() -> None:
    """A bare number is TCP."""
    config = read(ExposedPorts={"5432/tcp": {}, "80": {}, "53/udp": None, "80/tcp": {}})
    assert config.exposed_ports == ("53/udp", "80/tcp", "5432/tcp")


@pytest.mark.parametrize("port", ["", "0", "65536", "8000-8010/tcp", "x/tcp", "80/icmp", "80/", "-1", "٨٠", "1/tcp\n"])
def test_a_bad_port_is_named(port: str) -> None:
    """Ranges too: no image that a builder made has one."""
    with pytest.raises(SandboxError, match="ExposedPorts"):
        read(ExposedPorts={port: {}})


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (None, None),
        ({}, None),
        ({"Test": []}, None),
        ({"Test": ["NONE"]}, None),
        ({"Test": ["CMD", "/probe", "-q"]}, ImageHealthcheck(("/probe", "-q"))),
        ({"Test": ["CMD-SHELL", "a || b"], "Interval": 0, "Retries": 0}, ImageHealthcheck(("/bin/sh", "-c", "a || b"))),
        (
            {"Test": ["CMD", "p"], "Interval": 2 * 10**9, "Timeout": 5 * 10**8, "StartPeriod": 10**9, "Retries": 7},
            ImageHealthcheck(("p",), 2.0, 0.5, 1.0, 7),
        ),
    ],
)
def test_healthchecks(words: dict[str, Any] | None, check: ImageHealthcheck | None) -> None:
    """Docker's words in seconds, with docker's defaults."""
    assert read(Healthcheck=words).healthcheck == check


def test_a_healthcheck_for_the_shell_takes_the_images_shell() -> None:
    """As docker has it."""
    check = read(Shell=["/bin/bash", "-ec"], Healthcheck={"Test": ["CMD-SHELL", "x"]}).healthcheck
    assert check is not None
    assert check.test == ("/bin/bash", "-ec", "x")


@pytest.mark.parametrize(
    "words",
    [
        {"Test": ["RUN", "x"]},
        {"Test": ["CMD"]},
        {"Test": ["CMD-SHELL", "a", "b"]},
        {"Test": ["CMD", "a\0"]},
        {"Test": ["CMD", "a"], "Interval": -1},
        {"Test": ["CMD", "a"], "Timeout": 1},
        {"Test": ["CMD", "a"], "StartPeriod": 10**18},
        {"Test": ["CMD", "a"], "Retries": -1},
    ],
)
def test_a_bad_healthcheck_is_named(words: dict[str, Any]) -> None:
    """The field that is wrong is in the message."""
    with pytest.raises(SandboxError, match=r"Healthcheck\.") as caught:
        read(Healthcheck=words)
    assert caught.value.reason == "bad_config"


@pytest.mark.parametrize("config", [{"Volumes": ["/a"]}, {"ExposedPorts": "80"}, {"Healthcheck": "x"}, {"Env": [1]}])
def test_a_field_of_another_type_is_named(config: dict[str, Any]) -> None:
    """With its name as the image has it."""
    with pytest.raises(SandboxError) as caught:
        read(**config)
    assert next(iter(config)) in str(caught.value)


def test_a_root_file_system_carries_all_of_it() -> None:
    """What `rootfs` makes has each word of the config."""
    config = read(Volumes={"/v": {}}, ExposedPorts={"1": {}}, StopSignal="SIGQUIT", WorkingDir="/w", Cmd=["c"])
    plan = config.rootfs(("/lower",), "sha256:x")
    assert (plan.volumes, plan.exposed_ports, plan.stop_signal, plan.workdir) == (("/v",), ("1/tcp",), 3, "/w")
    assert (plan.lowers, plan.identity, plan.cmd, plan.writable) == (("/lower",), "sha256:x", ("c",), True)


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


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "User",
                "Env",
                "Entrypoint",
                "Cmd",
                "WorkingDir",
                "Volumes",
                "ExposedPorts",
                "Healthcheck",
                "Shell",
                "Other",
            ]
        ),
        _JSON,
    )
)
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
