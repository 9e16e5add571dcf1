"""Job files with hostile values in every field: read and planned, or refused at a line and column."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgeyard_api.jobfile_reader import InvalidJobFile, load_job_file
from forgeyard_executor.request_checks import check_request
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.identity import AttemptContext
from forgeyard_model.jobfile import JobFile
from forgeyard_model.request import PreparedWorkspace, request_from_job

WHOLE: dict[str, Any] = {
    "version": 1,
    "name": "job",
    "profile": "development",
    "rootfs": "host",
    "user": 1000,
    "env": {"A": "b"},
    "workdir": "sub",
    "source": {"path": ".", "mode": "cow"},
    "toolchains": [{"path": "t", "name": "python"}],
    "resources": {"cpus": 1, "memory": "64MiB", "pids": 64, "disk": "64MiB", "nofile": 64, "shm": "1MiB"},
    "timeout": "1m",
    "grace": "1s",
    "prepare_timeout": "1m",
    "finally_timeout": "1s",
    "network": {"restricted": {"allow": [{"host": "example.org", "ports": [443]}, {"cidr": "10.0.0.0/8"}]}},
    "secrets": [{"name": "T", "as": "file", "path": "/run/secrets/t", "steps": ["s"]}],
    "devices": ["vendor.com/gpu=0"],
    "caches": [{"key": "pip", "path": "/c", "mode": "rw"}],
    "services": {
        "db": {
            "image": "x",
            "aliases": ["pg"],
            "files": [{"from": "a", "to": "/b"}],
            "health": {"cmd": ["x"], "interval": "1s", "retries": 3},
            "resources": {"memory": "64MiB"},
            "depends_on": {"other": {"condition": "service_started"}},
        },
        "other": {"image": "y"},
    },
    "steps": [{"name": "s", "run": "true", "shell": "sh", "env": {"B": "c"}, "workdir": "x", "when": "always"}],
    "outputs": [{"path": "r", "optional": True}],
    "merge_output": True,
    "output_cap": "1MiB",
}
STRANGE = (
    (
        "",
        ".",
        "..",
        "../x",
        "/a/../b",
        "a/../../b",
        "relative",
        "/",
        "//",
        "a\0b",
        "x" * 200_000,
        "-1",
        "0",
        "unlimited",
    ),
    ("日本", "\N{PILE OF POO}", "a b,c:d=ü", "name\n", "10.0.0.0/33", "10.0.0.1/8", "::/0", "*.", "*.*", "localhost"),
    ("1e999", "9" * 5000, "0x10", "1_000", "NaN", "inf", "64 MiB", "1h1h", "1d"),
)
TEXTS = st.text(st.characters(codec=None), max_size=12) | st.sampled_from([text for row in STRANGE for text in row])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(10**300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)


def places(node: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [here, *(place for key, value in items for place in places(value, (*here, key)))]


def replaced(node: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """`node` with another value at `place`; a place of a dict that is not there is added."""
    if not place:
        return value
    if isinstance(node, list):
        return [replaced(item, place[1:], value) if key == place[0] else item for key, item in enumerate(node)]
    return {**node, place[0]: replaced(node.get(place[0], {}), place[1:], value)}


def at(place: tuple[str | int, ...]) -> Any:
    """What WHOLE holds at `place`."""
    node: Any = WHOLE
    for part in place:
        node = node[part]
    return node


PLACES = places(WHOLE)
NAMED_FREELY = (("env",), ("services",), ("depends_on",))
MAPPINGS = [place for place in PLACES if isinstance(at(place), dict) and place[-1:] not in NAMED_FREELY]
NOT_RUN_YET = ("network", "secrets", "devices", "services")
RUNNABLE = {key: value for key, value in WHOLE.items() if key not in NOT_RUN_YET}


def check(path: Path) -> None:
    """Read the file at `path` and take it as far as nothing on the host is touched."""
    refusal = ""
    try:
        loaded = load_job_file(path)
        job = loaded.file.to_job(base=loaded.base)
        check_request(request_from_job(job, context=AttemptContext("a"), workspace=PreparedWorkspace()))
    except InvalidJobFile as error:
        for line in str(error).splitlines():
            assert re.match(rf"{re.escape(str(path))}:\d+:\d+ .", line), line
            assert line.isprintable(), line
            assert len(line) < 500, line
    except ForgeyardError as error:
        refusal = str(error)
    assert "\n" not in refusal


@settings(max_examples=250, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(whole=st.sampled_from([WHOLE, RUNNABLE]), place=st.sampled_from(PLACES), value=VALUES)
def test_any_value_at_any_place(
    tmp_path: Path, whole: dict[str, Any], place: tuple[str | int, ...], value: object
) -> None:
    """A job, or lines of ``file:line:col field: value: cure``; nothing of Python's own."""
    file = tmp_path / "job.yaml"
    # JSON is YAML, and says exactly what it means; half surrogates stay as the escapes that YAML reads.
    file.write_text(json.dumps(replaced(whole, place, value)))
    check(file)


@settings(max_examples=100, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    """A file that is no text, or no YAML."""
    file = tmp_path / "job.yaml"
    file.write_bytes(data)
    check(file)


@pytest.mark.parametrize("place", MAPPINGS, ids=str)
def test_an_unknown_field_is_refused_wherever_it_stands(tmp_path: Path, place: tuple[str | int, ...]) -> None:
    """A typing mistake is an error at its place, never a setting that silently does nothing."""
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(replaced(WHOLE, (*place, "no_such_field"), 1), indent=1))
    with pytest.raises(InvalidJobFile) as caught:
        load_job_file(file)
    (problem,) = caught.value.problems
    assert problem.field.endswith("no_such_field")
    assert "unknown field" in problem.cure
    assert file.read_text().splitlines()[problem.line - 1][problem.column - 1 :].startswith('"no_such_field"')


@pytest.mark.parametrize(
    ("place", "value", "cure"),
    [
        (("resources", "memory"), "0", "more than 0"),
        (("resources", "memory"), "1KiB", "at least 4MiB"),
        (("resources", "memory"), "99999999999 TiB", "larger than any machine"),
        (("resources", "pids"), -1, "whole number from 4"),
        (("resources", "nofile"), 10**30, "whole number from 16"),
        (("resources", "cpus"), "1e999", "from 0.01 to 8192"),
        (("timeout",), "999999h", "longer than a year"),
        (("grace",), -1, "no unit"),
        (("workdir",), "../..", "without '..'"),
        (("outputs", 0, "path"), "../x", "without '..'"),
        (("outputs", 0, "path"), "/x", "relative to /work/output"),
        (("secrets", 0, "path"), "x", "absolute path inside the sandbox"),
        (("services", "db", "files", 0, "from"), "../x", "relative to the source"),
        (("env", "A"), "a\0b", "NUL"),
        (("env", "A"), "x" * (128 << 10), "longer than Linux takes"),
        (("toolchains", 0, "name"), "../x", "lower-case letters"),
        (("name",), "a\nb", "control character"),
        (("name",), "x" * 129, "1 to 128 characters"),
        (("network", "restricted", "allow", 0, "ports", 0), 0, "greater than or equal to 1"),
        (("network", "restricted", "allow", 1, "cidr"), "10.0.0.1/8", "no bits set past the prefix"),
        (("network", "restricted", "allow", 0, "host"), "10.0.0.1", "for an address use cidr"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_cure_is_told(tmp_path: Path, place: tuple[str | int, ...], value: object, cure: str) -> None:
    """Field, value and what to write, on one line."""
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(replaced(WHOLE, place, value), indent=1))
    with pytest.raises(InvalidJobFile) as caught:
        load_job_file(file)
    (line,) = str(caught.value).splitlines()
    assert cure in line
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    assert re.match(rf"{re.escape(str(file))}:\d+:\d+ {re.escape(shown)}: ", line), line


def test_the_file_these_tests_change_is_right() -> None:
    """Or they would prove nothing."""
    JobFile.model_validate(WHOLE)
    JobFile.model_validate(RUNNABLE).to_job()
