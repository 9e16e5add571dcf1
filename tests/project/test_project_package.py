"""What the built wheel and sdist hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
AREAS = PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]
CACHE = re.compile(r"(^|/)(__pycache__|\.venv|\.[a-z_]*cache|\.hypothesis|\.git|dist)(/|$)|\.pyc$")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist of the tree, built as a packager would: (wheel, sdist)."""
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.xdist_group("package")
def test_wheel_holds_every_area_typed(built: tuple[Path, Path]) -> None:
    """All nine packages are in the wheel, each with its py.typed, and nothing else beside the metadata."""
    names = zipfile.ZipFile(built[0]).namelist()
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {f"forgeyard_{area}" for area in AREAS}
    assert {f"forgeyard_{area}/py.typed" for area in AREAS} <= set(names)


@pytest.mark.xdist_group("package")
def test_wheel_holds_the_compiled_shim(built: tuple[Path, Path]) -> None:
    """The shim is in the wheel as a static executable, so that an installed forgeyard needs no compiler."""
    with zipfile.ZipFile(built[0]) as wheel:
        found = [info for info in wheel.infolist() if info.filename.startswith("forgeyard_process_shim/bin/")]
        assert len(found) == 1
        content = wheel.read(found[0])
    assert content[:4] == b"\x7fELF"
    assert (found[0].external_attr >> 16) & 0o111 == 0o111
    assert b"/ld-linux" not in content


@pytest.mark.xdist_group("package")
def test_wheel_is_of_this_platform(built: tuple[Path, Path]) -> None:
    """A wheel with machine code in it does not claim to run anywhere."""
    assert not built[0].name.endswith("-any.whl")


@pytest.mark.xdist_group("package")
def test_archives_hold_no_caches(built: tuple[Path, Path]) -> None:
    """No cache, environment or build product of this machine is shipped."""
    with tarfile.open(built[1]) as sdist:
        names = sdist.getnames() + zipfile.ZipFile(built[0]).namelist()
    assert [name for name in names if CACHE.search(name)] == []


@pytest.mark.xdist_group("package")
def test_sdist_can_build_itself(built: tuple[Path, Path]) -> None:
    """The sdist has the sources, the texts and the shim's C file, but no binary."""
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "hatch_build.py"} <= names
    assert any(re.fullmatch(r"process_shim/forgeyard_process_shim/.*\.c", name) for name in names)
    assert not any("/forgeyard_process_shim/bin/" in name for name in names)


@pytest.mark.xdist_group("package")
def test_installed_wheel_needs_no_compiler(built: tuple[Path, Path], tmp_path: Path) -> None:
    """An installed wheel finds and runs its own shim with nothing on PATH."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*pip, str(built[0])], check=True, capture_output=True, timeout=30)
    # PYTHONPATH stands before the editable install; the other dependencies come from this environment.
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/nonexistent"}
    find = "from forgeyard_process_shim.binary import shim_binary; print(shim_binary())"
    found = subprocess.run([sys.executable, "-c", find], env=env, capture_output=True, text=True, check=True)
    shim = Path(found.stdout.strip())
    assert shim.is_relative_to(tmp_path)
    assert os.access(shim, os.X_OK)
    # It refuses to be anything but PID 1 (EX_USAGE): it ran.
    assert subprocess.run([shim], env={}, check=False).returncode == 64
    tool = subprocess.run(
        [tmp_path / "bin" / "forgeyard", "--version"], env=env, capture_output=True, text=True, check=True
    )
    assert PYPROJECT["project"]["version"] in tool.stdout
