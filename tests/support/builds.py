"""How the tests of builds run a script and where they find the host's toolchains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from jobs import run

from forgeyard_executor import ApprovedHostPath, ExecutionResult, Job, Outcome, Step

PYTHON = f"{sys.base_prefix}/bin/python3"
"""In a job with `PYTHON_PATHS`: the interpreter that runs the tests, without its virtual environment."""


def build(state: Path, script: str, *, source: Path | None = None, **job: Any) -> str:
    """Run `script` with ``sh -e`` on the host rootfs unless `job` names an image; it must succeed. Its output."""
    result, out, err = attempt(state, script, source=source, **job)
    assert result.outcome is Outcome.SUCCEEDED, f"{result.message}\n{out.decode()}\n{err.decode()}"
    return out.decode()


def attempt(
    state: Path, script: str, *, source: Path | None = None, **job: Any
) -> tuple[ExecutionResult, bytes, bytes]:
    """Run `script` as `build` does, whatever becomes of it."""
    if "image" not in job:
        job["rootfs"] = "host"
    options = {} if source is None else {"source": source}
    return run(state, Job(steps=(Step.shell(f"cd {job.pop('at', '.')}\n{script}"),), **job), **options)


BY_SETUP = frozenset(("flock", "g++", "gcc", "gdb", "git", "make", "python3", "script", "strace", "unzip", "zip"))
"""Programs that ./dev setup or Debian's base brings; the others of these tests (node, java, ...) are optional."""


def host_tool(name: str) -> None:
    """Skip when the host's /usr, which is what a job sees, has no program `name`; in CI fail if setup installs it."""
    found = shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin")
    if found is None or not os.path.realpath(found).startswith("/usr/"):
        missing(f"the host's /usr has no {name}", fails=name in BY_SETUP)


def missing(what: str, *, fails: bool) -> None:
    """Skip the test, or under CI=true fail it when `fails`."""
    if fails and os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def python_paths() -> tuple[ApprovedHostPath, ...]:
    """The tests' own interpreter at its own path, since a shared libpython is found by it, and pytest in /site."""
    site = ApprovedHostPath(sysconfig.get_paths()["purelib"], "/site")
    if sys.base_prefix == "/usr":
        return (site,)
    return (ApprovedHostPath(sys.base_prefix, sys.base_prefix), site)


def toolchain(program: str, *, version: tuple[str, ...]) -> ApprovedHostPath:
    """The tree that holds bin/`program`, as an approval at /toolchains/`program`.

    :param version: a command that prints the tree, for a program behind a launcher.
    """
    if shutil.which(version[0]) is None:
        pytest.skip(f"{program} is not installed")
    answer = subprocess.run(version, capture_output=True, text=True)
    root = answer.stdout.strip()
    if answer.returncode != 0 or not os.path.isdir(f"{root}/bin"):
        pytest.skip(f"{' '.join(version)} names no tree: {answer.stderr.strip()[:200]}")
    return ApprovedHostPath(root, f"/toolchains/{program}")
