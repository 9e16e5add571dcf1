"""Builds inside a source tree: git, and the caches that tools put beside the code."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builds import PYTHON, attempt, build, host_tool, python_paths

from forgeyard_executor import Outcome, SourceMode

pytestmark = pytest.mark.kernel

CHECKOUT = """
git init -q . && git config user.email a@example.org && git config user.name A
mkdir pkg && printf 'def add(a, b):\\n    return a + b\\n' > pkg/__init__.py
printf 'import pkg\\n\\n\\ndef test_add():\\n    assert pkg.add(1, 2) == 3\\n' > test_add.py
git add -A && git commit -qm one
"""


@contextmanager
def project_of(owner: int, mode: int) -> Iterator[Path]:
    """A git work tree of uid `owner`, its top directory with `mode`."""
    host_tool("git")
    path = Path(tempfile.mkdtemp(prefix="fy-git-", dir="/var/tmp"))
    subprocess.run(["sh", "-ec", f"{CHECKOUT}\nchown -R {owner}:{owner} ."], cwd=path, check=True)
    path.chmod(mode)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def project() -> Iterator[Path]:
    """A git work tree of some other user's."""
    with project_of(4242, 0o755) as path:
        yield path


@pytest.fixture(params=[(4242, 0o755), (0, 0o700)], ids=["another user's", "root's, closed"])
def checkout(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A git work tree whose owner is not the job, and one that only root may enter."""
    with project_of(*request.param) as path:
        yield path


def test_git_in_a_cow_source(shared_state: Path, checkout: Path) -> None:
    """status, commit, worktree and clone work without safe.directory; the host's tree stays as it was."""
    script = """
git status --short; echo more > new; git add new; git commit -qm two
git worktree add -q /work/build/tree; git clone -q . /work/build/clone; git gc -q
git -C /work/build/clone log --format=%s"""
    assert build(shared_state, script, source=checkout, source_mode=SourceMode.COW) == "two\none\n"
    assert not (checkout / "new").exists()


def test_git_in_a_read_only_source(shared_state: Path, checkout: Path) -> None:
    """What only reads works; a commit says that the file system is read-only; a clone into /work/build can commit."""
    script = """
git status --short; git log --format=%s; git describe --always > /dev/null
if git commit -q --allow-empty -m no 2> /work/tmp/why; then exit 1; fi; grep -o 'Read-only file system' /work/tmp/why
git clone -q . /work/build/c; cd /work/build/c
git -c user.email=a@example.org -c user.name=A commit -q --allow-empty -m yes; git log -1 --format=%s"""
    out = build(shared_state, script, source=checkout, source_mode=SourceMode.RO)
    assert out == "one\nRead-only file system\nyes\n"


@pytest.mark.parametrize("mode", [SourceMode.COW, SourceMode.RO])
def test_caches_beside_the_code(shared_state: Path, project: Path, mode: SourceMode) -> None:
    """pytest and Python write their caches into a cow source and do without in a read-only one; neither fails."""
    script = f"PYTHONPATH=/site {PYTHON} -m pytest -q; ls -A . pkg"
    out = build(shared_state, script, source=project, source_mode=mode, host_paths=python_paths())
    assert "1 passed" in out
    listed = out.splitlines()
    assert (".pytest_cache" in listed, "__pycache__" in listed) == ((mode is SourceMode.COW,) * 2)
    assert not (project / ".pytest_cache").exists()


def test_a_build_in_the_source(shared_state: Path, project: Path) -> None:
    """make builds in a cow source, and names the read-only file system otherwise."""
    host_tool("make")
    (project / "Makefile").write_text("out: test_add.py\n\tcp test_add.py out\n")
    build(shared_state, "make -s && test -f out", source=project)
    result, _, err = attempt(shared_state, "make -s", source=project, source_mode=SourceMode.RO)
    assert result.outcome is Outcome.FAILED
    assert b"Read-only file system" in err


def test_a_source_belongs_to_root_where_the_job_is_root(shared_state: Path, project: Path, busybox_image: str) -> None:
    """Most images run as root: the tree is root's then, and can be written although root has no capabilities."""
    out = build(
        shared_state, "stat -c %u . .git pkg; echo x > pkg/new; rm test_add.py", source=project, image=busybox_image
    )
    assert set(out.split()) == {"0"}
