"""Job files from disk: every error where it stands, and nothing but our errors for any bytes at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_api.jobfile_reader import InvalidJobFile, load_job_file, parse_tree
from forgeyard_api.yaml_tree import MAX_BYTES, MAX_DEPTH, YamlProblem, read_tree
from forgeyard_model.errors import InvalidRequest

GOOD = "version: 1\nrootfs: host\nsteps:\n  - run: echo\n"


def problems(tmp_path: Path, text: str | bytes) -> list[str]:
    """``line:col field: value: cure`` of each finding in a file of `text`."""
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidJobFile) as caught:
        load_job_file(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:") for line in lines]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1 the file is empty: `forgeyard job init` writes an example"),
        ("# only words\n", "1:1 the file is empty: `forgeyard job init` writes an example"),
        ("just text", "1:1 'just text': write a mapping of fields"),
        ("- a", "1:1 write a mapping of fields"),
        (GOOD.replace("version: 1\n", ""), "1:1 version: (missing): write version: 1"),
        (GOOD.replace("1", "2", 1), "1:10 version: '2': write version: 1, the format this program reads"),
        (GOOD + "tiemout: 15m\n", "5:1 tiemout: '15m': unknown field; did you mean timeout?"),
        (GOOD + "memory: 1g\n", "5:1 memory: '1g': unknown field; did you mean resources.memory?"),
        (GOOD + "resources: {mem: 1g}\n", "5:13 resources.mem: '1g': unknown field; did you mean memory?"),
        (
            GOOD + "source: {path: ., zz: 1}\n",
            "5:19 source.zz: '1': unknown field; known here: path, mode",
        ),
        (
            GOOD + "resources:\n  memory: 0\n",
            "6:11 resources.memory: '0': must be more than 0; leave it out for the profile's default",
        ),
        (GOOD + "timeout: 90\n", "5:10 timeout: '90': a bare number has no unit: write 90s"),
        (GOOD + "env: {PORT: 5432}\n", "5:13 env.PORT: '5432': write it in quotes: \"5432\""),
        (GOOD + "env: {V: 1.10}\n", "5:10 env.V: '1.1': write it in quotes: \"1.10\""),
        (GOOD + "env: {D: true}\n", '5:10 env.D: true: write it in quotes: "true"'),
        (GOOD + "env:\n  D:\n", '6:5 env.D: null: write a string; "" for an empty one'),
        (
            GOOD + "env: {'A=B': x}\n",
            "5:7 env.A=B: 'A=B': write a variable's name: no '=', spaces or control characters",
        ),
        (GOOD + "merge_output: yes\n", "5:15 merge_output: 'yes': write true or false"),
        (GOOD + "network: {restrict: x}\n", "5:11 network.restrict: 'x': unknown field; did you mean restricted?"),
        (
            GOOD + "network:\n  restricted:\n    allow: [{host: a, ports: [80, 99999]}]\n",
            "7:35 network.restricted.allow[0].ports[1]: '99999': must be less than or equal to 65535",
        ),
        (GOOD + "steps: []\n", "5:1 steps: stands twice, first in line 3: keep one"),
        (GOOD + "env: {A: x, A: y}\n", "5:13 env.A: stands twice, first in line 5: keep one"),
        (GOOD.replace("run: echo", "run: 5"), "4:10 steps[0].run: '5': write it in quotes: \"5\""),
        (GOOD.replace("run: echo", "argv: [sleep, 10]"), "4:19 steps[0].argv[1]: '10': write it in quotes: \"10\""),
        (
            GOOD.replace("run: echo", "when: never"),
            "4:11 steps[0].when: 'never': write on_success, on_failure or always",
        ),
        (GOOD.replace("run: echo", "when: always"), "4:5 steps[0]: give exactly one of run and argv"),
        (
            GOOD.replace("run: echo", "{run: a, when: never}"),
            "4:20 steps[0].when: 'never': write on_success, on_failure or always",
        ),
        (
            GOOD + "outputs: [{path: ../x}]\n",
            "5:18 outputs[0].path: '../x': write a path relative to /work/output, without '..'",
        ),
        (GOOD + "profile: fast\n", "5:10 profile: 'fast': write development, standard-ci, release or high-assurance"),
        (
            GOOD + "a: !!python/object:os.system x\n",
            "5:4 'tag:yaml.org,2002:python/object:os.system': tags are not read: write the value itself",
        ),
        (GOOD + "env: !mine {A: b}\n", "5:6 '!mine': tags are not read: write the value itself"),
        (GOOD + "env: *nowhere\n", "5:6 '*nowhere': no finished value above has this anchor"),
        (GOOD + "env: &a {A: *a}\n", "5:13 '*a': no finished value above has this anchor"),
        (GOOD + "env: {<<: {A: b}}\n", "5:7 env.<<: merge keys are not read: write the fields out"),
        (GOOD + "env: {[a]: b}\n", "5:7 a key must be a plain word"),
        (GOOD + "---\n" + GOOD, "5:1 '---': a second document: a job file holds one"),
        (GOOD + "env: {A: b\n", "6:1 not YAML"),
        (GOOD + "\tenv: x\n", "5:1 not YAML"),
        (GOOD.encode() + b"name: \xff\n", "5:7 byte 0xff: not UTF-8: save the file as UTF-8"),
    ],
)
def test_each_mistake_has_its_line_and_column(tmp_path: Path, text: str | bytes, expected: str) -> None:
    """``line:col field: value: cure``, for mistakes of the text, of YAML and of the format."""
    assert problems(tmp_path, text)[0].startswith(expected)


def test_all_mistakes_come_at_once_and_in_order(tmp_path: Path) -> None:
    """Nobody has to run the check five times."""
    found = problems(tmp_path, "version: 1\nrootfs: moon\ntimeout: 5\nsteps:\n  - {run: 1}\n  - {argv: []}\nx: y\n")
    assert [line.split(" ")[0] for line in found] == ["2:9", "3:10", "5:11", "6:12", "7:1"]


def test_a_refused_item_does_not_also_make_its_list_too_short(tmp_path: Path) -> None:
    """One mistake, one line."""
    assert len(problems(tmp_path, GOOD.replace("run: echo", "run: 5"))) == 1


def test_an_alias_points_at_the_value_it_stands_for(tmp_path: Path) -> None:
    """The place to correct is where the value is written."""
    text = GOOD.replace("run: echo", "{run: a, env: &e {A: 5}}") + "env: *e\n"
    assert [line.split(" ")[0] for line in problems(tmp_path, text)] == ["4:26", "4:26"]


def test_words_are_what_they_look_like() -> None:
    """YAML 1.1's truth values, octals, base 60 and dates are strings."""
    text = "{a: yes, b: on, c: 012, d: 12:30, e: 2024-01-01, f: 0x1f, g: 1_000, h: NO, i: y}"
    assert read_tree(text).value == {
        **{"a": "yes", "b": "on", "c": "012", "d": "12:30", "e": "2024-01-01"},
        **{"f": "0x1f", "g": "1_000", "h": "NO", "i": "y"},
    }


def test_plain_values_have_their_types() -> None:
    """Quoted ones and tagged strings are strings."""
    text = "{a: 1, b: -1.5, c: true, d: null, e: ~, f: '1', g: !!str 1, h: \"true\", 8: 1e3}"
    values = {"a": 1, "b": -1.5, "c": True, "d": None, "e": None, "f": "1", "g": "1", "h": "true", "8": 1000.0}
    assert read_tree(text).value == values


def test_anchors_work(tmp_path: Path) -> None:
    """A value may be written once and used twice."""
    path = tmp_path / "job.yaml"
    path.write_text("version: 1\nrootfs: host\nsteps:\n  - {run: a, env: &e {A: b}}\n  - {run: c, env: *e}\n")
    first, second = load_job_file(path).file.steps
    assert first.env == second.env == {"A": "b"}


def bomb(levels: int) -> str:
    """Ten aliases of ten aliases of …"""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_an_alias_bomb_is_counted_not_built() -> None:
    """Nine short lines that stand for a thousand million values end at the bound."""
    with pytest.raises(YamlProblem, match="values once aliases are written out"):
        read_tree(bomb(9))


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_depth_is_bounded(opening: str) -> None:
    """Ten thousand open brackets are an error with a place, not a crash."""
    with pytest.raises(YamlProblem, match=f"deeper than {MAX_DEPTH} levels|not YAML"):
        read_tree(opening * 10_000)


def test_depth_through_aliases_is_bounded() -> None:
    """Nesting hidden in anchors counts as well."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 40)]
    with pytest.raises(YamlProblem, match="deeper than"):
        read_tree("\n".join(lines))


def test_size_is_bounded(tmp_path: Path) -> None:
    """More than 1 MiB is not read."""
    path = tmp_path / "job.yaml"
    path.write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(InvalidRequest, match="larger than 1 MiB"):
        load_job_file(path)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_can_not_be_read(tmp_path: Path, name: str) -> None:
    """One line with the reason."""
    with pytest.raises(InvalidRequest, match="can't be read"):
        load_job_file(tmp_path / name)


def test_hostile_names_stay_on_their_line(tmp_path: Path) -> None:
    """Escapes and newlines in keys and values can't steer a terminal or forge a line."""
    found = problems(tmp_path, GOOD + '"a\\n\\e[31m": "x\\e[0m\\ny"\n')
    assert len(found) == 1
    assert found[0].isprintable()


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Some editors write one."""
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_job_file(path).file.version == 1


def test_a_relative_file_has_an_absolute_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths start where it lies, wherever the program goes."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "job.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    loaded = load_job_file(Path("sub/job.yaml"))
    assert (loaded.shown, loaded.base) == ("sub/job.yaml", str(tmp_path / "sub"))


def only_our_errors(text: str) -> None:
    """Read `text` as a job file; anything but our own findings is a bug."""
    found: InvalidJobFile | None = None
    try:
        parse_tree(read_tree(text), "job.yaml")
    except YamlProblem:
        return
    except InvalidJobFile as error:
        found = error
    if found is not None:
        assert all(line.startswith("job.yaml:") for line in str(found).splitlines())
        assert all(item.line >= 1 and item.column >= 1 and item.cure for item in found.problems)


@given(st.text())
def test_any_text_is_a_job_or_an_error_of_ours(text: str) -> None:
    """Random characters."""
    only_our_errors(text)


@given(st.text(alphabet="ab:-[]{},&*!|>'\"#% \n\t?0<~", max_size=60))
def test_any_yaml_like_text_is_a_job_or_an_error_of_ours(text: str) -> None:
    """Random punctuation of YAML."""
    only_our_errors(text)


FIELDS = ["version", "rootfs", "steps", "run", "argv", "env", "network", "restricted", "allow", "host", "services"]
FIELDS += ["resources", "memory", "timeout", "secrets", "name", "image", "health", "cmd", "user", "source", "path"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(FIELDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
def test_any_shape_is_a_job_or_an_error_of_ours(data: dict[str, object]) -> None:
    """The right words in the wrong places, of any type."""
    import json

    only_our_errors(json.dumps(data))
