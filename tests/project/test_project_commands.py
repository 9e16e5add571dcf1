"""The entry point: what ./dev answers without setting anything up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("dev", ".ci/run")


def dev(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ./dev with /bin/sh."""
    return subprocess.run(
        ["/bin/sh", "./dev", *args],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_posix_sh(script: str) -> None:
    """Scripts parse under sh, ask for no other shell, and can be executed."""
    path = ROOT / script
    assert path.read_text().startswith("#!/bin/sh\n")
    assert os.access(path, os.X_OK)
    run = subprocess.run(["/bin/sh", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_help_names_every_command() -> None:
    """Every command that the script dispatches is explained, and the reverse."""
    text = (ROOT / "dev").read_text()
    dispatched = set(re.findall(r"^    (\w+)(?: \|[^)]*)?\)", text[text.rindex("case $command in") :], re.MULTILINE))
    explained = set(re.findall(r"^  (\w+) ", dev("help").stdout, re.MULTILINE))
    assert dispatched == explained
    assert {"setup", "demo", "test", "lint", "bench"} <= explained


def test_no_command_is_help() -> None:
    """A bare ./dev explains itself and succeeds."""
    run = dev()
    assert run.returncode == 0
    assert run.stdout == dev("help").stdout


def test_unknown_command_is_a_usage_error() -> None:
    """A mistyped command ends with 2 and its name."""
    run = dev("tset")
    assert run.returncode == 2
    assert run.stderr.endswith("dev: no command tset\n")


def test_unusable_python_is_refused_with_a_cure() -> None:
    """A PYTHON that is no Python is named in one line that says what to do, and .venv stays as it was."""
    before = (ROOT / ".venv").stat().st_ino if (ROOT / ".venv").exists() else None
    run = dev("lint", PYTHON="/bin/false")
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "PYTHON=/bin/false" in run.stderr
    assert "unset PYTHON" in run.stderr
    assert before == ((ROOT / ".venv").stat().st_ino if (ROOT / ".venv").exists() else None)


def test_ci_runs_the_command_of_the_readme() -> None:
    """CI and people run the same thing."""
    assert "exec ./dev test\n" in (ROOT / ".ci" / "run").read_text()
    assert "./dev test" in (ROOT / "README.md").read_text()
