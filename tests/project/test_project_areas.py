"""The areas are the same everywhere they are listed: folders, wheel, editable install, mypy, ruff, import-linter."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOL: dict[str, Any] = PYPROJECT["tool"]
AREAS = tuple(TOOL["hatch"]["build"]["dev-mode-dirs"])
"""In the order of their imports: each may import those before it."""


def test_folders_hold_the_packages_that_are_listed() -> None:
    """Every folder at the root with a package of ours in it is a listed area, and the reverse."""
    folders = {path.parent.name for path in ROOT.glob("[!.]*/forgeyard_*") if path.is_dir()}
    assert folders == set(AREAS)
    for area in AREAS:
        assert [path.name for path in (ROOT / area).glob("forgeyard_*")] == [f"forgeyard_{area}"]


def test_every_list_of_areas_agrees() -> None:
    """An area that one list forgets would go unpacked, unchecked or unordered in silence."""
    linter = TOOL["importlinter"]
    layers = next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    packages = [f"forgeyard_{area}" for area in AREAS]
    assert list(AREAS) == TOOL["mypy"]["files"]
    assert list(AREAS) == TOOL["ruff"]["src"]
    assert [f"{area}/forgeyard_{area}" for area in AREAS] == TOOL["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == linter["root_packages"]
    assert packages[::-1] == layers


def test_only_host_is_free_to_talk_to_the_kernel() -> None:
    """The contract that forbids ctypes names every area but host."""
    forbidden = next(c for c in TOOL["importlinter"]["contracts"] if "ctypes" in c.get("forbidden_modules", ()))
    assert set(forbidden["source_modules"]) == {f"forgeyard_{area}" for area in AREAS} - {"forgeyard_host"}


@pytest.mark.parametrize("area", AREAS)
def test_area_imports_and_is_typed(area: str) -> None:
    """Each area's package imports from its own folder and ships its types."""
    package = importlib.import_module(f"forgeyard_{area}")
    folder = ROOT / area / f"forgeyard_{area}"
    assert package.__file__ == str(folder / "__init__.py")
    assert (folder / "py.typed").is_file()


@pytest.mark.parametrize("area", AREAS)
def test_exported_names_exist(area: str) -> None:
    """Every name of a package's __all__ can be had from it, once."""
    package = importlib.import_module(f"forgeyard_{area}")
    names: list[str] = list(getattr(package, "__all__", ()))
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(package, name)] == []


def test_imports_go_one_way() -> None:
    """import-linter keeps its contracts on the tree as it is."""
    linter = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
