"""Compiling the init, and the wheel that carries it."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forgeyard_model.errors import SandboxError
from forgeyard_process_shim import build as builder
from forgeyard_process_shim.binary import shim_binary

ROOT = Path(__file__).parents[2]


def program_header_types(binary: Path) -> list[int]:
    """p_type of each program header of a 64-bit ELF file."""
    image = binary.read_bytes()
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    return [struct.unpack_from("<I", image, offset + size * index)[0] for index in range(count)]


def test_source_stays_small_enough_to_review() -> None:
    """The init is one file of at most 400 lines."""
    assert len(builder.SOURCE.read_text().splitlines()) <= 400


def test_compiles_only_when_something_changed(tmp_path: Path) -> None:
    """A second build does nothing; a lost binary or another stamp builds again; the result is a static program."""
    binary = tmp_path / "bin" / "init"
    assert builder.build(binary)
    made = binary.stat()
    assert not builder.build(binary)
    assert binary.stat().st_ino == made.st_ino
    assert stat.S_IMODE(made.st_mode) == 0o555
    binary.with_name("init.sha256").write_text("another source")
    assert builder.build(binary)
    assert 3 not in program_header_types(binary)  # PT_INTERP: no dynamic loader is asked for
    assert sorted(path.name for path in binary.parent.iterdir()) == ["init", "init.sha256"]


@pytest.mark.parametrize("compiler", ["musl-gcc", "clang"])
def test_compiles_with_other_compilers(tmp_path: Path, compiler: str) -> None:
    """The source is no one compiler's; those that are not installed are skipped by name."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    assert builder.build(tmp_path / "init", compiler=compiler)


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    """Without a compiler the error says what to install, and nothing is left behind."""
    with pytest.raises(builder.ShimBuildError, match="install gcc"):
        builder.build(tmp_path / "bin" / "init", compiler="no-such-compiler")
    assert not list(tmp_path.iterdir())


def test_refusing_compiler_is_quoted(tmp_path: Path) -> None:
    """A compiler's own complaint reaches the reader, and no half-made binary does."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho cannot find -lc >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(builder.ShimBuildError, match="cannot find -lc"):
        builder.build(tmp_path / "bin" / "init", compiler=str(compiler))
    assert list((tmp_path / "bin").iterdir()) == []


def test_missing_binary_names_the_command_that_builds_it(tmp_path: Path) -> None:
    """shim_binary refuses with a typed error and a cure."""
    with pytest.raises(SandboxError) as caught:
        shim_binary(tmp_path / "init")
    assert caught.value.reason == "shim_missing"
    assert "python -m forgeyard_process_shim.build" in caught.value.resolution


def test_wheel_carries_an_executable_init(tmp_path: Path) -> None:
    """The wheel is for this platform and holds the binary; installed, it is executable and needs no compiler."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "py3-none-linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo("forgeyard_process_shim/bin/init").external_attr >> 16
    assert mode & 0o111 == 0o111
    target = tmp_path / "site"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    done = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    source = "from forgeyard_process_shim.binary import shim_binary; print(shim_binary())"
    env = {**os.environ, "PYTHONPATH": str(target), "PATH": "/nowhere"}
    found = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True)
    installed = Path(found.stdout.strip())
    assert installed.is_relative_to(target)
    assert subprocess.run([installed], check=False).returncode == 64
