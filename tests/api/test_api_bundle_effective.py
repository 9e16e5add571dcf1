"""`forgeyard bundle diff --runtime X JOB`: rows, JSON, exit codes, and one line for what can't be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from weakened import WeakRuntime

from forgeyard_api import main
from forgeyard_runtimes.applied import Applied, AppliedRow, Declared, Source, spec_rows

RunsHere = Callable[..., tuple[int, str, str]]


@pytest.fixture
def forgeyard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunsHere:
    """Run a command line in this process, in the test's directory: exit code, stdout, stderr."""
    monkeypatch.delenv("FORGEYARD_RUNTIME", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main.run(list(args)), *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "B '': name a second bundle to compare with, or a job and --runtime NAME"),
        (("a",), "B '': name a second bundle to compare with, or a job and --runtime NAME"),
        (("--runtime", "runc"), "CMD '': give a job file, or a command after --"),
        (("--runtime", "runk", "job.yaml"), "--runtime 'runk': write runc, crun, "),
        (("--runtime", "runc", "a"), "JOBFILE 'a': is a bundle: name a second one to compare with, or a job file"),
        (("--runtime", "runc", "absent.yaml"), "absent.yaml"),
        (("a", "a", "--memory", "1GiB"), "B 'a': two bundles are compared as they are"),
        (("a", "a", "--", "true"), "B 'a': two bundles are compared as they are"),
        (("a", "a", "--runtime", "runc"), "--runtime 'runc': goes with a job"),
    ],
)
def test_what_can_not_be_used(forgeyard: RunsHere, tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    """One line that says what to write, exit 2."""
    (tmp_path / "a").mkdir()
    code, out, err = forgeyard("bundle", "diff", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_two_bundles_whatever_the_environment_says(
    forgeyard: RunsHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime in the environment is a habit, not a part of this command line."""
    monkeypatch.setenv("FORGEYARD_RUNTIME", "podman")
    (tmp_path / "config.json").write_text("{}")
    assert forgeyard("bundle", "diff", ".", "config.json") == (0, "", "")


@pytest.mark.kernel
def test_a_table(forgeyard: RunsHere, shared_state: Path) -> None:
    """A row for each field, by spec and by kernel, and a verdict; exit 0."""
    code, out, err = forgeyard("bundle", "diff", "--runtime", "runc", "--state-dir", str(shared_state), "--", "true")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["APPLIED", "FIELD", "BY", "WHAT"]
    assert ["equal", "process.noNewPrivileges", "kernel", "on"] in [line.split() for line in lines]
    assert ["equal", "process.noNewPrivileges", "spec", "on"] in [line.split() for line in lines]
    assert lines[-3].endswith(" equal")
    assert lines[-1].startswith("runc ")
    assert lines[-1].endswith(" applies no less than the bundle says")


@pytest.mark.kernel
def test_json(forgeyard: RunsHere, shared_state: Path, tmp_path: Path) -> None:
    """All of it, for programs, of a job file with flags over it."""
    (tmp_path / "job.yaml").write_text("version: 1\nrootfs: host\nsteps: [{run: exit 3}]\n")
    words = ("bundle", "diff", "--json", "--runtime", "runc", "--state-dir", str(shared_state), "--memory", "64MiB")
    code, out, err = forgeyard(*words, "job.yaml")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["weaker"], [item["name"] for item in found["containers"]]) == (False, ["job"])
    assert found["containers"][0]["bundle_digest"].startswith("sha256:")
    row = {"field": "linux.resources.memory.limit", "applied": "equal", "by": "kernel", "declared": False}
    assert {**row, "what": str(64 << 20)} in found["containers"][0]["rows"]


@pytest.mark.kernel
def test_a_daemon_that_is_not_there(
    forgeyard: RunsHere, shared_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal in one line, exit 125, as everywhere."""
    monkeypatch.setenv("CONTAINERD_ADDRESS", f"unix://{tmp_path}/nosuch.sock")
    words = ("bundle", "diff", "--runtime", "containerd", "--state-dir", str(shared_state), "--", "true")
    code, out, err = forgeyard(*words)
    assert (code, out, err.count("\n")) == (125, "", 1)
    assert err.startswith("forgeyard: ")


@pytest.mark.kernel
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_a_weakened_runtime_is_1(state_dir: Path, require_tool: Callable[[str], str]) -> None:
    """What runc leaves out of a bundle stands first, and the exit code says so."""
    runc = os.path.realpath(require_tool("runc"))
    here = state_dir / "weak"
    here.mkdir()
    shutil.copy(runc, here / "real-runc")
    weak = WeakRuntime(here, str(here / "real-runc"))
    weak.leave_out("capability_added")
    script = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", str(weak.program), runc]
    command += [sys.executable, "-m", "forgeyard_api", "bundle", "diff", "--runtime", "runc"]
    command += ["--state-dir", str(state_dir), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1][:3] == ["weaker", "process.capabilities.bounding", "kernel"]
    assert lines[2] == ["weaker", "process.capabilities.bounding", "spec", "CAP_SYS_ADMIN", "not", "intended"]
    assert done.stdout.endswith(" applies less than the bundle says\n")


SPEC: dict[str, Any] = {
    "process": {"noNewPrivileges": True, "user": {"uid": 1, "gid": 1}, "args": ["x"], "cwd": "/"},
    "root": {"path": "/r", "readonly": True},
    "mounts": [],
    "linux": {"rootfsPropagation": "private", "readonlyPaths": ["/proc/sys"], "resources": {"pids": {"limit": 9}}},
}


def test_each_field_is_in_one_row() -> None:
    """A field is equal, or has its differences; what is declared says so."""
    linux = {**SPEC["linux"], "rootfsPropagation": "rslave", "readonlyPaths": ["/proc/sys", "/proc/asound"]}
    effective = {**SPEC, "process": {**SPEC["process"], "noNewPrivileges": False}, "linux": linux}
    declared = Declared(frozenset({"linux.rootfsPropagation"}), frozenset())
    found = {row.field: row for row in spec_rows(SPEC, effective, declared)}
    assert len(found) == len(list(spec_rows(SPEC, effective, declared)))
    assert found["process.noNewPrivileges"] == AppliedRow("process.noNewPrivileges", Applied.WEAKER, Source.SPEC, "off")
    assert found["linux.rootfsPropagation"].declared
    assert found["linux.readonlyPaths"].applied is Applied.STRICTER
    assert not found["linux.readonlyPaths"].declared
    assert found["linux.resources.pids.limit"] == AppliedRow(
        "linux.resources.pids.limit", Applied.EQUAL, Source.SPEC, "9"
    )
