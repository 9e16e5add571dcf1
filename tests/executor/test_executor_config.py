"""The configuration: what is read, what is refused and where, which layer wins, and what can't be lowered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgeyard_executor.config_load import ENVIRONMENT, LoadedConfig, check_file, load_config
from forgeyard_executor.config_toml import ConfigProblem, InvalidConfig, parse_toml
from forgeyard_model.config import CacheRules, ExecutorConfig, Retention, Space, UidBlock, Watermarks
from forgeyard_model.config_file import ConfigFile
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel

GIB = 1 << 30
EVERYTHING = """\
state_dir = "/srv/forgeyard"
runtime = "crun"
minimum_isolation = "container"
allowed_registries = ["registry.example.org"]
allowed_images = [
  "oci:/srv/images/*",  # a bracket ] in a comment
  "registry.example.org/team/**",
]

[limits.default]
memory = "1GiB"
timeout = "10m"

[limits.maximum]
memory = "4GiB"
cpus = 4

[uid_block]
base = 3000000000
size = 131072

[[approved_host_paths]]
source = "/opt"

[[approved_host_paths]]
source = "/srv/models"
destination = "/models"
"""


class Files:
    """A system's and a user's file, and an environment."""

    def __init__(self, directory: Path) -> None:
        self.system = directory / "system.toml"
        self.user = directory / "user.toml"

    def load(self, system: str = "", user: str = "", **env: str) -> LoadedConfig:
        """The effective configuration of these texts."""
        for path, text in ((self.system, system), (self.user, user)):
            path.write_text(text)
            path.chmod(0o644)
        return load_config(system=self.system, user=self.user, env=env)

    def refusal(self, system: str = "", user: str = "", **env: str) -> list[str]:
        """Lines of the error, with the directory cut off."""
        with pytest.raises(InvalidConfig) as caught:
            self.load(system, user, **env)
        return str(caught.value).replace(f"{self.system.parent}/", "").splitlines()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Two files that are not there yet."""
    return Files(tmp_path)


def test_no_file_is_the_defaults(files: Files) -> None:
    """Without a file and a variable the product's own values hold."""
    missing = files.system.parent / "none"
    loaded = load_config(system=missing, user=missing, env={})
    assert loaded == LoadedConfig(ExecutorConfig())


def test_every_key_is_read(files: Files) -> None:
    """Each key of the schema that has a meaning reaches the effective configuration."""
    config = files.load(EVERYTHING).config
    assert (config.state_dir, config.runtime) == ("/srv/forgeyard", "crun")
    assert config.minimum_isolation is IsolationLevel.CONTAINER
    assert [rule.patterns for rule in config.allowed_registries] == [("registry.example.org",)]
    assert config.allowed_images[0].patterns == ("oci:/srv/images/*", "registry.example.org/team/**")
    assert (config.default_limits.memory, config.default_limits.wall_time) == (GIB, 600.0)
    assert (config.maximum_limits.memory, config.maximum_limits.cpus) == (4 * GIB, 4.0)
    assert config.uid_block == UidBlock(3_000_000_000, 131072)
    assert config.approved_host_paths == (
        ApprovedHostPath("/opt", "/opt"),
        ApprovedHostPath("/srv/models", "/models"),
    )


def test_origins_name_the_line(files: Files) -> None:
    """Multi-line values, tables and repeated tables do not shift the lines of what follows."""
    config = files.load(EVERYTHING).config
    lines = {key: origin.rpartition(":")[2] for key, origin in config.origins}
    text = EVERYTHING.splitlines()
    assert text[int(lines["allowed_images"]) - 1] == "allowed_images = ["
    assert text[int(lines["limits.default.timeout"]) - 1] == 'timeout = "10m"'
    assert text[int(lines["limits.maximum.cpus"]) - 1] == "cpus = 4"
    assert text[int(lines["uid_block"]) - 1] == "[uid_block]"
    assert lines["approved_host_paths"] == str(text.index("[[approved_host_paths]]") + 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\n", "system.toml:1 a: 1: unknown key; known here: state_dir"),
        ("\n\nminimum_isolatoin = 'container'\n", "system.toml:3 minimum_isolatoin: 'container': unknown key; did you"),
        (
            "[limits.maximum]\nmemroy = '1g'\n",
            "system.toml:2 limits.maximum.memroy: '1g': unknown key; did you mean mem",
        ),
        ("[limits]\nx = 1\n", "system.toml:2 limits.x: 1: unknown key; known here: default, maximum"),
        ("runtime = 1\n", "system.toml:1 runtime: 1: write a string, in quotes"),
        ("state_dir = 'srv'\n", "system.toml:1 state_dir: 'srv': write an absolute path without '..'"),
        ("minimum_isolation = 'vm'\n", "system.toml:1 minimum_isolation: 'vm': write process, namespace, container,"),
        ("minimum_isolation = 'none'\n", "system.toml:1 minimum_isolation: 'none': no job runs without isolation"),
        ("[limits.default]\nmemory = 0\n", "system.toml:2 limits.default.memory: 0: must be more than 0"),
        ("[limits.default]\ntimeout = '90'\n", "system.toml:2 limits.default.timeout: '90': a bare number has no unit"),
        ("[limits.maximum]\npids = 'unlimited'\n", "system.toml:2 limits.maximum.pids: 'unlimited': write a value"),
        ("[uid_block]\nbase = 0\nsize = 65536\n", "system.toml:2 uid_block.base: 0: must be greater than"),
        ("[uid_block]\nbase = 4294000000\nsize = 9999999\n", "system.toml:1 uid_block: base and size reach past"),
        (
            "[[approved_host_paths]]\nsource='/a'\n[[approved_host_paths]]\nsource='/b/../c'\n",
            "system.toml:4 approved_",
        ),
        ("[watermarks]\ngc_below='1g'\nrefuse_below='2g'\n", "system.toml:1 watermarks: gc_below has to be at least"),
        (
            "[limits.default]\nmemory='2g'\n[limits.maximum]\nmemory='1g'\n",
            "system.toml:2 limits.default.memory: 2048 MiB",
        ),
        ("a = \n", "system.toml:1 is no TOML: invalid value"),
        ("\n[a\n", "system.toml:2 is no TOML: expected ']'"),
        ("a = 1\na = 2\n", "system.toml:2 is no TOML: cannot overwrite a value"),
        ("a = '''\n", "system.toml:1 is no TOML: expected"),
    ],
)
def test_an_error_stands_at_its_line(files: Files, text: str, line: str) -> None:
    """``file:line key: value: cure``, for the text as TOML, for its keys and for their values."""
    assert files.refusal(text)[0].startswith(line)


def test_every_error_is_said_at_once(files: Files) -> None:
    """One look at the output is enough to mend a file."""
    found = files.refusal("a=1\nruntime=2\n[limits.default]\ncpus=-1\n")
    assert [line.split(" ")[0] for line in found] == ["system.toml:1", "system.toml:2", "system.toml:4"]


def test_user_beats_system_and_environment_beats_both(files: Files) -> None:
    """flag > environment > user > system > default."""
    system, user = 'runtime = "runc"\nstate_dir = "/a"\n[limits.default]\npids=10\nnofile=20\n', ""
    assert files.load(system).config.state_dir == "/a"
    user = 'state_dir = "/b"\n[limits.default]\npids=11\n'
    config = files.load(system, user).config
    assert (config.state_dir, config.default_limits.pids, config.default_limits.nofile) == ("/b", 11, 20)
    loaded = files.load(system, user, FORGEYARD_STATE_DIR="/c", FORGEYARD_LIMITS_DEFAULT_PIDS="12")
    assert (loaded.config.state_dir, loaded.config.default_limits.pids) == ("/c", 12)
    assert loaded.config.origin("state_dir") == "env FORGEYARD_STATE_DIR"
    assert loaded.config.origin("limits.default.pids") == "env FORGEYARD_LIMITS_DEFAULT_PIDS"
    assert loaded.config.origin("limits.default.nofile").endswith("system.toml:5")
    flags = {"state_dir": "/d", "runtime": "crun"}
    config = load_config(system=files.system, user=files.user, env={"FORGEYARD_STATE_DIR": "/c"}, flags=flags).config
    assert (config.state_dir, config.runtime, config.origin("runtime")) == ("/d", "crun", "--runtime")


@pytest.mark.parametrize(
    ("system", "user", "env", "line"),
    [
        (
            'minimum_isolation="container"',
            'minimum_isolation="namespace"',
            {},
            "user.toml:1 minimum_isolation: 'namespace': system.toml:1 demands container, which can't be lowered",
        ),
        (
            'minimum_isolation="container"',
            "",
            {"FORGEYARD_MINIMUM_ISOLATION": "process"},
            "env FORGEYARD_MINIMUM_ISOLATION: 'process': system.toml:1 demands container",
        ),
        (
            "exact_limits=true",
            "",
            {"FORGEYARD_EXACT_LIMITS": "false"},
            "env FORGEYARD_EXACT_LIMITS: false: system.toml:1 demands exact limits",
        ),
        (
            "limits.maximum.memory='1g'",
            "limits.maximum.memory='2g'",
            {},
            "user.toml:1 limits.maximum.memory: 2048 MiB: system.toml:1 allows 1024 MiB, which can't be raised",
        ),
        (
            "limits.maximum.timeout='1h'",
            "",
            {"FORGEYARD_LIMITS_MAXIMUM_TIMEOUT": "2h"},
            "env FORGEYARD_LIMITS_MAXIMUM_TIMEOUT: 2h00m: system.toml:1 allows 1h00m",
        ),
        (
            "limits.maximum.memory='1g'",
            "",
            {"FORGEYARD_LIMITS_DEFAULT_MEMORY": "2g"},
            "env FORGEYARD_LIMITS_DEFAULT_MEMORY: 2048 MiB: is above the maximum of 1024 MiB (system.toml:1)",
        ),
    ],
)
def test_a_demand_is_never_lowered(files: Files, system: str, user: str, env: dict[str, str], line: str) -> None:
    """Less than the system's file demands is refused by name, from wherever it comes."""
    assert files.refusal(system, user, **env)[0].startswith(line)


def test_a_demand_can_be_raised(files: Files) -> None:
    """Stricter values of the user or the environment hold."""
    loaded = files.load(
        'minimum_isolation="namespace"\nlimits.maximum.memory="4g"\n',
        'minimum_isolation="container"\n',
        FORGEYARD_LIMITS_MAXIMUM_MEMORY="2g",
        FORGEYARD_MINIMUM_ISOLATION="virtual_machine",
    )
    assert loaded.config.minimum_isolation is IsolationLevel.VIRTUAL_MACHINE
    assert loaded.config.maximum_limits.memory == 2 * GIB


def test_lists_of_what_is_allowed_add_up_to_less(files: Files) -> None:
    """A user's list does not replace the system's: an image has to pass both."""
    config = files.load('allowed_images=["a/*"]', 'allowed_images=["**"]', FORGEYARD_ALLOWED_IMAGES="a/b, c").config
    assert [rule.patterns for rule in config.allowed_images] == [("a/*",), ("**",), ("a/b", "c")]
    assert config.origin("allowed_images").count(",") == 2


@pytest.mark.parametrize("text", ["[uid_block]\nbase=65536\nsize=65536\n", "[[approved_host_paths]]\nsource='/opt'\n"])
def test_what_decides_for_everybody_is_the_systems(files: Files, text: str) -> None:
    """A user's file can't widen what jobs see, or move the id block."""
    assert "decides for everybody on this host" in files.refusal("", text)[0]


def test_what_is_kept_and_how_much_room_there_has_to_be(files: Files) -> None:
    """Each key by itself over the layer below; sizes and shares; what nothing sets has the product's default."""
    loaded = files.load(
        "[retention]\nimages='1h'\noutputs='2h'\n[watermarks]\nrefuse_below='1g'\n[caches]\nkey_size='1MiB'\n",
        "[retention]\nimages='3h'\n[watermarks]\ngc_below='12.5 %'\n",
    )
    config = loaded.config
    assert loaded.notes == ()
    assert config.retention == Retention(images=10800.0, outputs=7200.0)
    assert config.watermarks == Watermarks(Space(share=0.125), Space(bytes=GIB))
    assert config.caches == CacheRules(key_size=1 << 20)
    assert config.origin("retention.images").endswith("user.toml:2")
    assert config.origin("retention.outputs").endswith("system.toml:3")
    assert files.load("").config.watermarks.gc_below == Space(5 * GIB, 0.10)
    assert "from 0% to 99%" in files.refusal("[watermarks]\ngc_below='100%'\n")[0]
    assert "decides for everybody" in files.refusal("", "[caches]\nevery_profile=true\n")[0]
    assert files.refusal("[retention]\nimages='1'\n")[0].startswith(
        "system.toml:2 retention.images: '1': a bare number"
    )


def test_who_unpacks_images_is_the_systems(files: Files) -> None:
    """Each engine has a word of its own beside "own"; the origin of each key is known, and a user's file has no say."""
    config = files.load("[rootfs]\npodman='image'\ncontainerd='snapshotter'\n").config
    assert [config.rootfs.of(name) for name in ("podman", "containerd", "docker", "runc")] == [
        "image",
        "snapshotter",
        "own",
        "own",
    ]
    assert config.origin("rootfs.podman").endswith("system.toml:2")
    assert "write 'own' or 'image'".replace("'", "") in files.refusal("[rootfs]\ndocker='snapshotter'\n")[0]
    assert "decides for everybody" in files.refusal("", "[rootfs]\ndocker='image'\n")[0]


def test_a_misspelled_variable_is_said(files: Files) -> None:
    """Other programs may use the prefix; what is nearly one of ours is not passed over."""
    loaded = files.load("", "", FORGEYARD_MINIMUM_ISOLATON="container", FORGEYARD_JOB_ID="7")
    assert loaded.notes == ("env FORGEYARD_MINIMUM_ISOLATON: not known; did you mean FORGEYARD_MINIMUM_ISOLATION?",)


def test_a_file_that_others_can_write_is_refused(files: Files) -> None:
    """Who may write the system's file decides for everybody."""
    files.load("", "")
    files.system.chmod(0o664)
    with pytest.raises(InvalidConfig, match="others may write it: chmod go-w"):
        load_config(system=files.system, user=files.user, env={})


def test_a_checked_file_has_to_be_there(tmp_path: Path) -> None:
    """Only the two usual places may be empty."""
    with pytest.raises(InvalidConfig, match="does not exist"):
        check_file(tmp_path / "config.toml", system=True)


def test_bytes_that_are_no_text_have_a_line(files: Files) -> None:
    """A file of another encoding is named by its first bad line."""
    files.system.write_bytes(b"a=1\nb='\xff'\n")
    with pytest.raises(InvalidConfig, match=r"system.toml:2 not UTF-8"):
        load_config(system=files.system, user=files.user, env={})


def leaves(model: Any, prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Key paths of the schema's scalar and list fields."""
    found: set[tuple[str, ...]] = set()
    for name, info in model.model_fields.items():
        inner = info.annotation
        if hasattr(inner, "model_fields"):
            found |= leaves(inner, (*prefix, name))
        else:
            found.add((*prefix, name))
    return found


def test_the_environment_has_every_key_but_tables() -> None:
    """A new key of the schema gets a variable, or stands here."""
    tables = {
        ("user_namespace",),
        ("endpoints",),
        ("rootfs",),
        ("uid_block",),
        ("approved_host_paths",),
        ("retention",),
        ("watermarks",),
        ("caches",),
        ("network",),
        ("serve",),
    }
    assert leaves(ConfigFile) - tables == set(ENVIRONMENT.values())


def test_the_docs_name_every_key_and_variable() -> None:
    """docs/configuration.md is whole."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
    names = {key[-1] for key in leaves(ConfigFile)} | {"base", "size", "source", "destination", "read_only"}
    names |= {"images", "caches", "outputs", "gc_below", "refuse_below"}
    names |= {"key_size", "total_size", "every_profile"}
    assert sorted(name for name in names if f"`{name}`" not in text and f"{name} =" not in text) == []
    assert all(name in text for name in ("FORGEYARD_STATE_DIR", "FORGEYARD_LIMITS_MAXIMUM_MEMORY"))


def toml_of(value: Any) -> str:
    """An inline TOML value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return json.dumps(value) if not isinstance(value, float) else repr(value)


WORDS = st.sampled_from(
    ["runc", "/srv", "..", "unlimited", "1g", "2GiB", "10m", "container", "none", "a b", "*", "", "\x7f", "é", "9" * 30]
) | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
VALUES = st.recursive(
    st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [*ConfigFile.model_fields, "limits.default.memory", "limits.maximum.pids", "limits.default", "uid_block.base"]
) | st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(KEYS, VALUES), max_size=5))
def test_any_values_are_a_configuration_or_our_error(files: Files, pairs: list[tuple[str, Any]]) -> None:
    """Whatever stands in a file, it is used or refused at a line that is there; nothing else is raised."""
    text = "".join(f"{key} = {toml_of(value)}\n" for key, value in pairs)
    text = text.replace("NaN", "nan").replace("Infinity", "inf")
    problems: tuple[ConfigProblem, ...] = ()
    try:
        files.load(text)
    except InvalidConfig as error:
        problems = error.problems
    assert all(1 <= problem.line <= text.count("\n") + 1 for problem in problems)
    assert all(problem.cure and "\n" not in problem.text() for problem in problems)


@settings(max_examples=300)
@given(st.binary(max_size=80) | st.text("[]{}=.\"'#\\\nab1,- ", max_size=40).map(str.encode))
def test_any_bytes_are_toml_or_our_error(data: bytes) -> None:
    """No file makes the reader fail in another way, or be wrong about how many lines there are."""
    problems: tuple[ConfigProblem, ...] = ()
    lines: set[int] = set()
    try:
        toml = parse_toml(data, "config.toml")
        lines = set(toml.lines.values())
        assert set(toml.values) <= {key[0] for key in toml.lines}
    except InvalidConfig as error:
        problems = error.problems
    assert all(problem.cure for problem in problems)
    assert all(1 <= line <= data.count(b"\n") + 1 for line in lines)
