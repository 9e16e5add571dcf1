"""packaging/: the unit is one that systemd reads, keeps its promises, and leaves jobs able to run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "forgeyard.service"
PROMISED = {
    "Type": "notify",
    "NotifyAccess": "main",
    "KillMode": "process",
    "Delegate": "yes",
    "ExecReload": "/bin/kill -HUP $MAINPID",
    "RuntimeDirectoryPreserve": "yes",
    "NoNewPrivileges": "yes",
}
BREAKS_JOBS = {
    *(
        "ProtectSystem",
        "ProtectHome",
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "PrivateUsers",
        "PrivateNetwork",
    ),
    *("ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups", "ProtectProc"),
    *("ProtectHostname", "ProtectClock", "ReadOnlyPaths", "InaccessiblePaths", "MountFlags", "DevicePolicy"),
    *("RestrictNamespaces", "RestrictAddressFamilies", "RestrictSUIDSGID", "SystemCallFilter"),
    *("SystemCallArchitectures", "MemoryDenyWriteExecute", "LockPersonality", "OOMScoreAdjust", "UMask"),
}


def directives(section: str = "Service") -> dict[str, list[str]]:
    """The lines of a section, by name."""
    found: dict[str, list[str]] = {}
    here = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            here = line.strip("[]")
        elif line and not line.startswith("#") and here == section:
            name, sign, value = line.partition("=")
            assert sign, f"no directive: {line}"
            found.setdefault(name, []).append(value)
    return found


def test_what_the_unit_promises() -> None:
    """Keepers outlive a restart, the watchdog is fed, and nothing is set that would break sandboxes or reach jobs."""
    found = directives()
    assert {name: found[name] for name in PROMISED} == {name: [value] for name, value in PROMISED.items()}
    assert int(found["WatchdogSec"][0]) > 0
    assert found["ExecStart"] == ["/usr/bin/forgeyard serve"]
    assert not BREAKS_JOBS & found.keys()
    assert directives("Install") == {"WantedBy": ["multi-user.target"]}


def test_every_choice_is_explained() -> None:
    """What is left out on purpose is named, with the reason beside it."""
    comments = " ".join(line for line in UNIT.read_text().splitlines() if line.startswith("#"))
    for name in ("ProtectSystem", "PrivateTmp", "RestrictNamespaces", "SystemCallFilter", "RestrictSUIDSGID"):
        assert name in comments


def test_systemd_reads_it(tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say, where it is installed; the test above has parsed it in any case."""
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/bin/forgeyard", sys.executable))
    done = subprocess.run([verify, "verify", "--man=no", str(copy)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "forgeyard.service" in line]
    assert (done.returncode, said) == (0, [])


def test_the_example_configuration(tmp_path: Path) -> None:
    """It is read as it stands, and every line that is commented out is a key that there is."""
    from forgeyard_executor.config_load import load_config

    text = (PACKAGING / "config.toml").read_text()
    path = tmp_path / "config.toml"
    for name, written in (("as it stands", text), ("with everything", uncommented(text))):
        path.write_text(written)
        path.chmod(0o600)
        serve = load_config(system=path).config.serve
        assert serve.audit == "/var/log/forgeyard/audit.jsonl", name
        assert serve.metrics == "/run/forgeyard/metrics.sock", name
    assert serve.slots == 8
    assert serve.tenants["nightly"].slots == 2
    assert serve.roots == {1000: ("/srv/agent",)}


def uncommented(text: str) -> str:
    """With the keys and tables that are commented out."""
    lines = [line.removeprefix("# ") if " = " in line or line.startswith("# [") else line for line in text.splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.kernel
def test_a_job_runs_within_the_units_bounds(state_dir: Path, warm_rootfs: None) -> None:
    """Without new privileges, and without the capabilities that the unit takes: network, disk limit and all."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed here")
    taken = [name for line in directives()["CapabilityBoundingSet"] for name in line.removeprefix("~").split()]
    assert "CAP_SYS_MODULE" in taken
    bounds = ",".join("-" + name.removeprefix("CAP_").lower() for name in taken)
    argv = [setpriv, "--no-new-privs", f"--bounding-set={bounds}", sys.executable, "-m", "forgeyard_api", "run"]
    options = ["--network", "allow", "--disk", "64MiB", "--state-dir", str(state_dir)]
    script = "echo x > /work/build/f && cat /work/build/f"
    done = subprocess.run([*argv, *options, "--", "sh", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr
