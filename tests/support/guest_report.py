"""Run tests of this suite in the guest, and read what became of each."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parents[2]
GUEST: Final = ROOT / "tests" / "guest"
PYTEST: Final = (
    # Plugins cost seconds each here. --assert=plain: rewriting the tests' modules does, too.
    *("-m", "pytest", "-p", "pytest_timeout", "-p", "guest_plugin", "-p", "no:cacheprovider", "--assert=plain"),
    *("--tb=short", "-o", "timeout=100", "-v", "-m", "guest", "--durations=12", "--junitxml=/run/report.xml"),
)
# Stdout is the report's alone; what pytest prints goes to stderr, as it comes.
SCRIPT: Final = 'export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1; "$@" >&2; status=$?; cat /run/report.xml; exit $status'
TOOLS: Final = ("qemu-system-x86_64", "mke2fs", "runc", "crun", "busybox")
"""What the guest needs of this machine, beside its kernel."""


@dataclass(frozen=True)
class Report:
    """What the guest said. `tests`: module and name, with "" for passed or else what went wrong."""

    status: int
    seconds: float
    tests: dict[tuple[str, str], str]
    log: str

    def problem(self, module: str, name: str) -> str:
        """What went wrong with a test; empty when it passed."""
        return self.tests.get((module, name), f"did not run; status {self.status}\n{self.log[-4000:]}")


def run_in_guest(
    tests: Sequence[str], log: Path, *, deadline: float, environment: Mapping[str, str] | None = None
) -> Report:
    """Boot, run `tests` (files, or ids of single tests) that are marked `guest`, and read the report.

    :param log: for what the guest prints, which is shown with a failure.
    :param deadline: seconds, boot included.
    """
    runner = [sys.executable, str(GUEST / "run_guest.py"), "--deadline", str(deadline), "--"]
    settings = [f"{name}={value}" for name, value in {"PYTHONPATH": str(GUEST), **(environment or {})}.items()]
    inside = ["env", *settings, "sh", "-c", SCRIPT, "sh", sys.executable, *PYTEST, *tests]
    began = time.monotonic()
    with log.open("wb") as errors:
        run = subprocess.run([*runner, *inside], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, check=False)
    text = log.read_text(errors="replace")
    seconds = time.monotonic() - began
    print(text[-20_000:], f"guest: {seconds:.0f} s in all, boot included", sep="\n")
    return Report(run.returncode, seconds, parse(run.stdout), text)


def parse(xml: bytes) -> dict[tuple[str, str], str]:
    """Results of a JUnit report; none when the guest did not come that far."""
    if not xml.strip():
        return {}
    results = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        module = case.get("classname", "").rpartition(".")[2]
        results[module, case.get("name", "")] = "\n".join(child.text or child.get("message", "") for child in bad)
    return results
