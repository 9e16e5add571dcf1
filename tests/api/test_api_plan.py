"""`forgeyard plan`, `config check | show` and `bundle diff` as commands: lines, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_api import main
from forgeyard_api.bundle_diff import differences


@dataclass(frozen=True)
class Ended:
    """One command line: its exit code and what it said."""

    returncode: int
    stdout: str
    stderr: str


Forgeyard = Callable[..., Ended]


@pytest.fixture
def system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /etc/forgeyard/config.toml; the user has no file."""
    monkeypatch.setattr("forgeyard_executor.config_load.SYSTEM_FILE", tmp_path / "etc.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    return tmp_path / "etc.toml"


@pytest.fixture
def forgeyard(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system_file: Path
) -> Forgeyard:
    """Run a command line in this process, in the test's directory."""

    def call(*args: str) -> Ended:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            capsys.readouterr()
            code = main.run(list(args))
            out, err = capsys.readouterr()
            return Ended(code, out, err)

    return call


@pytest.fixture
def on_host(forgeyard: Forgeyard, shared_state: Path, monkeypatch: pytest.MonkeyPatch) -> Forgeyard:
    """Commands that open an executor."""
    monkeypatch.setenv("FORGEYARD_STATE_DIR", str(shared_state))
    return forgeyard


# ---- plan


@pytest.mark.kernel
def test_plan_of_a_job_file(on_host: Forgeyard, tmp_path: Path) -> None:
    """A table, sizes in MiB whatever the file says, exit 0."""
    (tmp_path / "job.yaml").write_text(
        "version: 1\nrootfs: host\nsource: {path: .}\nresources: {memory: 1g}\nsteps: [{run: a}]\n"
    )
    ended = on_host("plan", "job.yaml")
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert lines[0] == ["FIELD", "ASKED", "STATUS", "BY"]
    assert ["resources.memory", "1024", "MiB", "enforced"] in [line[:4] for line in lines]
    assert ended.stdout.endswith("\nthis host can run the job\n")


@pytest.mark.kernel
def test_plan_shows_every_refusal_at_once(on_host: Forgeyard, tmp_path: Path) -> None:
    """What the profile can't have here and what this version can't run, each with a cure; exit 125."""
    (tmp_path / "job.yaml").write_text(
        "version: 1\nrootfs: host\nprofile: high-assurance\ndevices: [a.b/c=0]\nsteps: [{run: a}]\n"
    )
    ended = on_host("plan", "job.yaml", "--json", "--secret", "A=env:B")
    found = json.loads(ended.stdout)
    refused = {row["field"]: row for row in found["fields"] if row["status"] == "refused"}
    assert (ended.returncode, found["runnable"]) == (125, False)
    assert set(refused) == {"isolation", "devices", "--secret"}
    assert all(row["cure"] for row in refused.values())
    assert "A=env" not in ended.stdout


@pytest.mark.kernel
def test_plan_and_run_agree_on_a_network(on_host: Forgeyard) -> None:
    """One row for it, and run's own refusal: nobody configured where the fetch proxy may go."""
    ended = on_host("plan", "--network", "fetch-only", "--json", "--", "true")
    rows = [row for row in json.loads(ended.stdout)["fields"] if row["status"] == "refused"]
    assert (ended.returncode, [row["field"] for row in rows]) == (125, ["network"])
    assert on_host("run", "--network", "fetch-only", "--", "true").returncode == 125


def test_plan_of_bad_input_is_2(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """The same lines as run has, and nothing on stdout."""
    (tmp_path / "job.yaml").write_text("version: 1\n")
    ended = forgeyard("plan", "job.yaml")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "job.yaml:1:1 steps: (missing): add it\n")
    assert forgeyard("plan", "--memory", "0", "--", "a").returncode == 2


@pytest.mark.kernel
def test_the_configuration_binds_the_command_line(on_host: Forgeyard, system_file: Path) -> None:
    """A flag above the organisation's maximum is refused by run, and by plan with the file and line."""
    system_file.write_text("[limits.maximum]\nmemory = '64MiB'\n")
    ended = on_host("run", "--memory", "65MiB", "--", "true")
    assert ended.returncode == 125
    assert ended.stderr == (
        f"forgeyard: resources.memory '65 MiB': the maximum here is 64 MiB ({system_file}:2): ask for that or less\n"
    )
    assert f"({system_file}:2)" in on_host("plan", "--memory", "65MiB", "--", "true").stdout
    assert on_host("run", "-q", "--memory", "64MiB", "--", "true").returncode == 0


# ---- config


def test_show_origin(forgeyard: Forgeyard, system_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key, its value, and the file and line, variable or default it comes from."""
    system_file.write_text("# ours\nminimum_isolation = 'container'\n[limits.maximum]\nmemory = '8g'\n")
    monkeypatch.setenv("FORGEYARD_RUNTIME", "crun")
    found = json.loads(forgeyard("config", "show", "--origin", "--json").stdout)
    assert found["minimum_isolation"] == {"value": "container", "origin": f"{system_file}:2"}
    assert found["limits.maximum.memory"] == {"value": "8192 MiB", "origin": f"{system_file}:4"}
    assert found["runtime"] == {"value": "crun", "origin": "env FORGEYARD_RUNTIME"}
    assert found["allowed_images"] == {"value": None, "origin": "default"}
    table = forgeyard("config", "show").stdout
    assert "ORIGIN" not in table
    assert ["minimum_isolation", "container"] in [line.split() for line in table.splitlines()]


def test_check_shows_every_error_at_its_line(forgeyard: Forgeyard, system_file: Path) -> None:
    """``file:line key: value: cure``, exit 2; the same stops every other command."""
    system_file.write_text("minimum_isolation = 'vm'\n[limits.default]\npids = 1\n")
    ended = forgeyard("config", "check")
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert lines[0].startswith(f"{system_file}:1 minimum_isolation: 'vm': write process, ")
    assert lines[1].startswith(f"{system_file}:3 limits.default.pids: 1: write a whole number from 4")
    assert forgeyard("run", "--", "true") == Ended(2, "", ended.stderr)
    assert forgeyard("ps").returncode == 2


def test_check_of_a_good_file(forgeyard: Forgeyard, system_file: Path, tmp_path: Path) -> None:
    """ok; a file can be checked before it is put in place."""
    assert forgeyard("config", "check") == Ended(0, "ok\n", "")
    (tmp_path / "new.toml").write_text("[retention]\nimages = '24h'\n[uid_block]\nbase = 65536\nsize = 65536\n")
    ended = forgeyard("config", "check", "new.toml")
    assert ended == Ended(0, "new.toml: ok\n", "")
    assert forgeyard("config", "check", "absent.toml") == Ended(2, "", "absent.toml: does not exist\n")


# ---- bundle diff


def bundle(directory: Path, spec: object) -> str:
    """A bundle's directory with this config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(spec))
    return str(directory)


def test_diff_shows_paths_and_both_values(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """Sorted, list items by number, what one side lacks as absent; exit 1."""
    a = bundle(tmp_path / "a", {"process": {"args": [str(n) for n in range(11)], "terminal": True}, "x/y": 1})
    b = bundle(tmp_path / "b", {"process": {"args": [*map(str, range(2)), "z"], "terminal": 1}, "root": {"path": "r"}})
    ended = forgeyard("bundle", "diff", a, f"{b}/config.json")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[::3] == [*(f"/process/args/{n}" for n in range(2, 11)), "/process/terminal", "/root", "/x~1y"]
    assert lines[:3] == ["/process/args/2", '- "2"', '+ "z"']
    assert lines[-6:] == ["/root", "- (absent)", '+ {"path": "r"}', "/x~1y", "- 1", "+ (absent)"]
    found = json.loads(forgeyard("bundle", "diff", "--json", a, b).stdout)
    assert found[-1] == {"path": "/x~1y", "a": {"value": 1}, "b": {"absent": True}}


def test_diff_of_the_same_is_0(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """The order of keys says nothing."""
    a = bundle(tmp_path / "a", {"a": 1, "b": [None]})
    b = bundle(tmp_path / "b", {"b": [None], "a": 1})
    assert forgeyard("bundle", "diff", a, b) == Ended(0, "", "")


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (None, "can't be read: No such file or directory"),
        (b"{", "is no JSON: Expecting property name"),
        (b"\xff\xfe\xfa", "is no JSON: "),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_diff_of_what_is_no_bundle_is_2(forgeyard: Forgeyard, tmp_path: Path, content: bytes | None, cure: str) -> None:
    """Named, in one line."""
    (tmp_path / "a").mkdir()
    if content is not None:
        (tmp_path / "a" / "config.json").write_bytes(content)
    ended = forgeyard("bundle", "diff", "a", "a")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"forgeyard: A 'a/config.json': {cure}")


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_no_difference_means_equal(a: Any, b: Any) -> None:
    """A difference is found exactly when the JSON texts differ, and the other way round mirrors it."""
    found = differences(a, b)
    assert (not found) == (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))
    assert [(item.path, item.b, item.a) for item in found] == [(i.path, i.a, i.b) for i in differences(b, a)]


def test_help_needs_no_schema() -> None:
    """Help of these commands loads no pydantic, and neither does a run without a configuration file."""
    code = (
        "import sys\nfrom forgeyard_api.main import run\n"
        "lines = ['plan --help', 'config --help', 'config show --help', 'bundle diff --help']\n"
        "assert [run(line.split()) for line in lines] == [0] * 4\n"
        "from forgeyard_executor.config_load import load_config\n"
        "from pathlib import Path\n"
        "load_config(system=Path('/nonexistent/a'), user=Path('/nonexistent/b'), env={'FORGEYARD_STATE_DIR': '/x'})\n"
        "sys.exit('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
