"""House rules that no linter keeps: sizes, docstrings, and words that have no place in the project."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
SKIPPED = {".git", ".venv", "dist", "build", "__pycache__"}

# Put together from parts, so that this file does not hold what it looks for.
FORBIDDEN = tuple(
    "".join(parts)
    for parts in (
        ("/work", "/main"),
        ("/work", "/shared"),
        ("/work", "/."),
        ("/root", "/.pyenv"),
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("crates", ".io"),
        ("proxy.", "golang.org"),
        ("registry.", "npmjs"),
        ("repo1.", "maven"),
        ("deb.", "debian.org"),
    )
)


def project_files() -> list[Path]:
    """Files of the project: tracked, or new and not ignored. Outside a git tree: everything but caches."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        files = [ROOT / name for name in run.stdout.split("\0") if name]
    else:
        files = [path for path in ROOT.rglob("*") if not SKIPPED & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in files if path.is_file())


FILES = project_files()
PYTHON = [path for path in FILES if path.suffix == ".py"]
CODE = [path for path in PYTHON if any(part.startswith("forgeyard_") for part in path.relative_to(ROOT).parts)]


def where(path: Path, node: ast.AST | None = None) -> str:
    """``path:line``, from the project's root."""
    return str(path.relative_to(ROOT)) + (f":{getattr(node, 'lineno', 0)}" if node else "")


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Classes and functions that others may use: no leading underscore, not inside a function."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def is_overload(node: Definition) -> bool:
    """An overload's words stand at its implementation."""
    return any(isinstance(item, ast.Name) and item.id == "overload" for item in node.decorator_list)


def test_there_is_code_to_look_at() -> None:
    """The lists that the other tests go through are not empty."""
    assert len(CODE) > 10
    assert len(FILES) > len(PYTHON) > len(CODE)


def test_no_file_is_too_long() -> None:
    """A Python file over 500 lines holds more than one reason to change."""
    lengths = {where(path): len(path.read_text().splitlines()) for path in PYTHON}
    assert {name: count for name, count in lengths.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_too_long() -> None:
    """A function over 60 lines can't be read without scrolling."""
    found = {}
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    found[f"{where(path, node)} {node.name}"] = length
    assert found == {}


def test_everything_public_has_a_docstring() -> None:
    """Each module, public class, method and function of the areas says what it is."""
    missing = []
    for path in CODE:
        tree = ast.parse(path.read_text())
        if path.read_text().strip() and ast.get_docstring(tree) is None:
            missing.append(where(path))
        missing += [
            f"{where(path, node)} {node.name}"
            for node in public_definitions(tree.body)
            if ast.get_docstring(node) is None and not is_overload(node)
        ]
    assert missing == []


def test_every_test_says_what_it_shows() -> None:
    """Each test function has a docstring that states the behaviour."""
    missing = []
    for path in PYTHON:
        if not path.name.startswith("test_"):
            continue
        missing += [
            f"{where(path, node)} {node.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
            and ast.get_docstring(node) is None
        ]
    assert missing == []


def test_test_files_have_names_of_their_own() -> None:
    """Two test files of one name break a mypy run over both; the area in the name keeps them apart."""
    for path in PYTHON:
        parts = path.relative_to(ROOT).parts
        if parts[0] == "tests" and path.name.startswith("test_"):
            assert path.name.startswith(f"test_{parts[1]}_"), where(path)


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_word_that_belongs_elsewhere(word: str) -> None:
    """No file names a place on the machine it was written on, or the host of a package registry."""
    found = [where(path) for path in FILES if word.encode() in path.read_bytes()]
    assert found == []


def test_ignores_carry_a_reason() -> None:
    """A silenced check of ruff or mypy has its reason beside it."""
    markers = ("# no" + "qa", "# type: " + "ignore")
    bare = []
    for path in PYTHON:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for marker in markers:
                _, found, rest = line.partition(marker)
                # ": S108" or "[attr-defined]" is the code; a word of explanation has to follow it.
                if found and not rest.lstrip(": ").partition("]" if "[" in rest else " ")[2].strip(" #"):
                    bare.append(f"{where(path)}:{number}")
    assert bare == []


def test_the_shim_stays_reviewable() -> None:
    """PID 1 of every job is one C file of at most 400 lines, so that SECURITY.md can vouch for it."""
    sources = [path for path in FILES if path.suffix in (".c", ".h") and not {"examples", "tests"} & {*path.parts}]
    assert [path.parent.name for path in sources] == ["forgeyard_process_shim"]
    assert len(sources[0].read_text().splitlines()) <= 400
