"""The documentation: its site builds whole, every command in it is one, and no error kind is left unexplained."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from forgeyard_api.cli import command
from forgeyard_api.main import UnusableInput, run
from forgeyard_api.reference_errors import KINDS, known_errors
from forgeyard_model.errors import ExecutorErrorKind

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = sorted((ROOT / "examples").rglob("*.md"))
TEXTS = sorted([*DOCS.glob("*.md"), *(ROOT / name for name in ("README.md", "SECURITY.md")), *EXAMPLES])
QUICK = ("--version", "job init", "job schema", "job validate", "config check", "config show")
"""What needs neither root nor a runtime nor a server, and is over at once."""
FILES = {
    "job.yaml": "version: 1\nrootfs: host\nsteps: [{run: 'true'}]\n",
    "new.toml": "",
    "result.json": "{}",
    "RESULT.json": "{}",
}
"""What lines in the texts name as their files."""


class Line(NamedTuple):
    """A command that a text shows."""

    text: Path
    number: int
    words: str

    def __str__(self) -> str:
        return f"{self.text.relative_to(ROOT)}:{self.number} {self.words}"


def shown(text: Path) -> Iterator[Line]:
    """Lines of code blocks that begin with our command, without what stands beside them for the reader."""
    for number, line in enumerate(text.read_text().splitlines(), start=1):
        found = re.match(r"^(?: {4}|\$ )?forgeyard ", line)
        if found:
            words = re.split(r"\s{2,}(?=#)|(?<=\S)\s{3,}", line.strip().removeprefix("$ "))[0].removesuffix(" &")
            yield Line(text, number, words.removeprefix("forgeyard "))


def named(text: Path) -> Iterator[Line]:
    """Commands in the middle of a sentence."""
    for number, line in enumerate(text.read_text().splitlines(), start=1):
        for words in re.findall(r"`forgeyard ([^`]+)`", line):
            yield Line(text, number, words)


SHOWN = [line for text in TEXTS for line in shown(text)]
NAMED = [line for text in TEXTS for line in named(text)]


def variants(words: str) -> Iterator[list[str]]:
    """The command lines that a synopsis stands for: with what is in brackets, and without; each of what `|` parts."""
    if " | " in words and "'" not in words:
        head, *others = words.split(" | ")
        first = shlex.split(head)
        yield from ([*first[:-1], *shlex.split(other)] for other in (first[-1], *others))
    elif "[" in words:
        without = words
        while "[" in without:  # the innermost first
            without = re.sub(r"\[[^\[\]]*\]", "", without)
        yield shlex.split(without)
        yield shlex.split(words.replace("[", "").replace("]", ""))
    else:
        yield shlex.split(words)


@cache
def tree() -> Any:
    """The command tree, made once."""
    return command()


def leaf(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` call, and the rest of them."""
    found, rest = tree(), list(words)
    while rest and rest[0] in getattr(found, "commands", {}):
        found = found.commands[rest.pop(0)]
    return found, rest


def unknown_flags(words: list[str]) -> list[str]:
    """What `words` have that the command has not: a subcommand, or flags."""
    found, rest = leaf(words)
    if hasattr(found, "commands") and rest and not rest[0].startswith("-"):
        return rest[:1]
    known = {flag for parameter in found.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    before = rest[: rest.index("--")] if "--" in rest else rest
    flags = [word.partition("=")[0] for word in before if re.match(r"--?[a-zA-Z]", word)]
    return [flag for flag in flags if flag not in known | {"-h", "--help", "--install-completion"}]


def accepted(words: list[str]) -> None:
    """Let the real parser read `words`, down to the arguments of the last command; nothing is run."""
    found, rest = leaf(words)
    try:
        found.make_context(f"forgeyard {' '.join(words)}", list(rest))
    except UnusableInput as error:
        raise AssertionError(str(error)) from error


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the texts speak of."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name in [name for name in os.environ if name.startswith("FORGEYARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_texts_show_commands() -> None:
    """The lists that the other tests go through are not empty, and hold what one sees in the texts."""
    assert len(SHOWN) > 40
    assert len(NAMED) > 60
    assert "run --memory 512MiB --timeout 10m --source . -- make test" in {line.words for line in SHOWN}


@pytest.mark.parametrize("line", SHOWN, ids=str)
def test_shown_commands_are_accepted(line: Line, somewhere: Path) -> None:
    """The command tree takes each of them as it stands, with every flag and argument."""
    for words in variants(line.words):
        assert unknown_flags(words) == []
        if "..." not in words and words != ["--version"] and " | " not in line.words:
            accepted(words)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_commands_exist(text: Path) -> None:
    """A command in a sentence may leave its arguments out; itself and its flags are there."""
    assert {
        str(line): bad for line in named(text) for words in variants(line.words) if (bad := unknown_flags(words))
    } == {}


@pytest.mark.parametrize("line", [line for line in SHOWN if line.words.startswith(QUICK)], ids=str)
def test_quick_commands_work(line: Line, somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What needs nothing is run, and succeeds."""
    for words in variants(line.words):
        (somewhere / "FILE").write_text("" if "config" in words else FILES["job.yaml"])
        if words[:2] == ["job", "init"]:
            (somewhere / (words[2] if len(words) > 2 else "job.yaml")).unlink()
        assert run(words) == 0, capsys.readouterr().err
        assert capsys.readouterr().err == ""


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_the_quick_start_works(state_dir: Path, tmp_path: Path) -> None:
    """Its commands, one after another in an empty directory; what needs the internet or a server is left out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGEYARD_")}
    environment |= {"FORGEYARD_STATE_DIR": str(state_dir)}
    ran = []
    for line in shown(DOCS / "quick-start.md"):
        words = shlex.split(line.words)
        if words[0] not in ("run", "job", "plan", "runner") or "--image" in words:
            continue
        # Doctor says 1 where something of this machine is a problem, which is no fault of the page.
        fine = (0, 1) if words[0] == "runner" else (0,)
        done = subprocess.run(
            [sys.executable, "-m", "forgeyard_api", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode in fine, f"{line}: {done.stderr}"
        ran.append(words[0])
    assert ran.count("run") == 2
    assert {"job", "plan", "runner"} <= set(ran)
    assert (tmp_path / "result.json").is_file()


@pytest.mark.timeout(180)
def test_the_site_builds(tmp_path: Path) -> None:
    """Every link leads to a page and a heading that is there, and every page is in the navigation."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    made = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {"index.html", "security.html", "api-reference.html", "examples.html"} <= made
    assert not list((tmp_path / "site").rglob("*.py"))


def test_a_broken_link_fails_the_site(tmp_path: Path) -> None:
    """Strict is strict: a page that is not there, and a heading that is not, end the build."""
    (tmp_path / "docs").mkdir()
    settings = (ROOT / "mkdocs.yml").read_text()
    plain = settings[: settings.index("\nnav:")].replace("hooks:\n  - docs/site_hooks.py\n", "")
    (tmp_path / "mkdocs.yml").write_text(plain)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    for text, code in (("[here](#title)", 0), ("[x](absent.md)", 1), ("[x](#absent)", 1), ("[x](../up.md)", 1)):
        (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, (text, done.stderr)


def test_the_navigation_names_pages_once() -> None:
    """No page has two places."""
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    sections = yaml.safe_load(text)["nav"]
    pages = [page for section in sections for entries in section.values() for page in entries]
    names = [next(iter(page.values())) if isinstance(page, dict) else page for page in pages]
    assert len(names) == len(set(names)) > 20


@pytest.mark.parametrize("type_", sorted(KINDS))
def test_every_kind_is_explained(type_: str) -> None:
    """docs/troubleshooting.md has a part for each, and none for what is no kind."""
    text = (DOCS / "troubleshooting.md").read_text()
    part = re.split(r"^## ", text[text.index(f"## Kinds of {type_}\n") + 3 :], flags=re.MULTILINE)[0]
    assert re.findall(r"^### (\w+)$", part, re.MULTILINE) == [kind.value for kind in KINDS[type_]]


def test_reasons_are_found_where_they_are_made() -> None:
    """The list of reasons has those that stand in a call, come through a function, or are chosen in a branch."""
    found = {(item.kind, item.reason): item for item in known_errors()}
    assert found["unsupported", "not_root"].cure == "run it as root; the jobs themselves never are"
    assert found["io_failed", "registry_unreachable"].brief == "registry … can't be reached"
    assert found["privilege_drop_failed", "gate_seccomp"].type == "SandboxError"
    assert found["lost", "docker_permission"].brief.startswith("no permission")
    assert ("unsupported", "call_deadline") not in found
    assert len(found) > 250
    assert {item.kind for item in found.values() if item.type == "ExecutorError"} <= set(ExecutorErrorKind)
