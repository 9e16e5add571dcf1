"""`forgeyard runner sandbox doctor | capabilities | test`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forgeyard_api.sandbox_doctor import _claims_text, _report_text
from forgeyard_executor.capabilities_probe import SandboxSight
from forgeyard_executor.doctor import DoctorReport, isolation_checks
from forgeyard_host.probes_conditions import HostCondition, Status
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe, ResourceControls
from forgeyard_model.policy import IsolationLevel, NetworkMode

FORGEYARD = Path(sys.executable).parent / "forgeyard"


def command(*words: str, state: Path) -> tuple[int, str, str]:
    """Run one of the three commands: exit code, stdout, stderr."""
    run = subprocess.run(
        [FORGEYARD, "runner", "sandbox", *words, "--state-dir", state],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.kernel
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_doctor_on_a_good_host(state_dir: Path) -> None:
    """The host is fit, exit 0, with a probe for each feature and what it saw."""
    code, out, err = command("doctor", "--json", state=state_dir)
    assert (code, err) == (0, ""), out
    report = json.loads(out)
    assert (report["healthy"], report["missing"]) == (True, [])
    probes = {probe["feature"]: probe for probe in report["capabilities"]["probes"]}
    assert probes["oom_evidence"]["works"] is True
    assert {"feature", "works", "by", "details", "cure", "seen"} == set(probes["seccomp"])
    assert {item["status"] for item in report["conditions"]} <= {"ok", "warning"}
    names = {item["name"] for item in report["conditions"]}
    assert names >= {
        "uid block",
        "inotify",
        "keyrings",
        "conntrack",
        "shim",
        "compiler",
        "clock",
        "secrets in view",
        "executor",
    }


@pytest.mark.kernel
def test_doctor_where_no_executor_opens(tmp_path: Path) -> None:
    """What keeps an executor from opening is a row with its whole cure, and exit 1; the rest is looked at as well."""
    (tmp_path / "state").mkdir(mode=0o700)
    code, out, err = command("doctor", state=tmp_path / "state")
    assert (code, err) == (1, "")
    row = next(line for line in out.splitlines() if line.startswith("executor "))
    assert "problem" in row
    assert "chmod o+x" in row
    assert "secrets in view" in out
    assert out.splitlines()[-1].startswith("jobs can't run here; missing: ")


@pytest.mark.kernel
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_capabilities(state_dir: Path) -> None:
    """Claims as JSON, in a fixed order."""
    code, out, err = command("capabilities", "--json", state=state_dir)
    claims = json.loads(out)
    assert (code, err) == (0, "")
    assert claims["isolation_levels"] == ["process", "namespace", "container"]
    assert claims["resource_controls"] == {"cpu": True, "memory": True, "pids": True, "disk": True}
    assert claims["cgroup"] in ("v1", "v2")


@pytest.mark.kernel
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_isolation_test(state_dir: Path) -> None:
    """The benign attacks all fail, each with what the job met."""
    code, out, err = command("test", state=state_dir)
    assert (code, err) == (0, ""), out
    assert "FAILED" not in out
    assert out.splitlines()[-1] == "14 of 14 held"
    assert "Read-only file system" in out


PROBES = (
    Probe(Feature.SECCOMP, works=False, details="no filter", cure="c" * 100),
    Probe(Feature.REFLINK, works=False, details="not here", cure="optional"),
    Probe(Feature.PID_NAMESPACE, works=False, details="not seen", cure="c", seen=False),
    Probe(Feature.MEMORY_LIMIT, works=True, by="cgroup v2", details="killed"),
)
CLAIMS = ExecutorCapabilities(
    runtime="runc 1",
    isolation_levels=frozenset({IsolationLevel.NAMESPACE, IsolationLevel.PROCESS}),
    network_modes=frozenset({NetworkMode.DENY}),
    resource_controls=ResourceControls(cpu=False, memory=True, pids=True, disk=False),
    user_namespace=True,
    seccomp=False,
    probes=PROBES,
)


def test_texts() -> None:
    """What is missing stands out, is optional or was not seen; a cure is never cut off."""
    lines = _report_text(DoctorReport(CLAIMS, ())).splitlines()
    assert lines[0].split() == ["FEATURE", "WORKS", "BY", "DETAILS", "CURE"]
    rows = {line.split()[0]: line for line in reversed(lines) if line}
    assert " NO " in rows["seccomp"]
    assert "c" * 100 in rows["seccomp"]
    assert "no (optional)" in rows["reflink"]
    assert "unseen" in rows["pid_namespace"]
    assert " yes " in rows["memory_limit"]
    assert "seccomp" in lines[-1]
    claims = dict(line.split(None, 1) for line in _claims_text(CLAIMS).splitlines())
    assert claims["isolation"] == "process, namespace"
    assert claims["limits"] == "memory, pids"
    assert claims["missing"] == "pid_namespace, reflink, seccomp"


def test_a_sandbox_that_lets_everything_through_holds_nothing() -> None:
    """Each check can fail."""
    words = ("shadow", "connect", "root", "usr", "chown", "unshare", "mount", "mknod")
    seen = dict.fromkeys(words, "done ") | {"namespaces": "pid:[1] mnt:[2]", "processes": "200", "after": "9"}
    assert not any(check.held for check in isolation_checks(SandboxSight(seen), {"pid": 1, "mnt": 2}))


def test_a_report_with_problems_is_not_healthy() -> None:
    """Without capabilities everything is missing; a warning alone is no reason."""
    warning = HostCondition("inotify", Status.WARNING, "few", "more")
    report = DoctorReport(None, (warning,))
    assert not report.healthy
    assert len(report.missing) > 15
