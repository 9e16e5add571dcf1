"""What the project says of itself: links lead somewhere, versions agree, commands and code exist."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: Path) -> set[str]:
    """Anchors of a file's headings, as code hosts make them."""
    headings = re.findall(r"^#+ +(.+)$", text.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(text: Path) -> None:
    """Every relative link names a file that is there, and a heading of it."""
    broken = []
    for link in LINK.findall(text.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = text.parent / name if name else text
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_changelog_has_the_version() -> None:
    """CHANGELOG.md has a dated section for the version that pyproject.toml builds."""
    version = re.escape(PROJECT["version"])
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_license_is_the_one_that_is_declared() -> None:
    """The licence text belongs to the licence that the package's metadata names."""
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text().splitlines()[0]


def test_readme_names_the_commands_that_exist() -> None:
    """Every ``./dev`` command of the texts is one that ./dev knows."""
    known = set(re.findall(r"^  (\w+) ", (ROOT / "dev").read_text(), flags=re.MULTILINE))
    named = {word for text in TEXTS for word in re.findall(r"\./dev (\w+)", text.read_text())}
    assert {"demo", "test"} <= named <= known


def python_blocks() -> list[ast.Module]:
    """The Python examples of the README; a bare `async with` stands inside a coroutine."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    return [ast.parse(block) for block in blocks]


def test_readme_python_imports_what_exists() -> None:
    """Names that the README imports can be imported; the example itself is run by the executor's tests."""
    imports = [node for block in python_blocks() for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_readme_lists_every_area() -> None:
    """The table of areas is whole."""
    readme = (ROOT / "README.md").read_text()
    areas = [path.parent.name for path in ROOT.glob("[!.]*/forgeyard_*")]
    assert [area for area in areas if f"`{area}`" not in readme] == []
