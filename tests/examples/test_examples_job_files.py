"""The job files that stand in examples/ by themselves: each runs and succeeds, as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("warm_rootfs")]

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {"hello": "Hello from forgeyard on ", "steps": "prepared\ntested\n", "build-c": "Forgeyard"}


def test_every_job_file_is_here() -> None:
    """A new one gets a line of its output in SAYS."""
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_a_job_file_runs(name: str, state_dir: Path, tmp_path: Path, leaks: object) -> None:
    """It exits with 0, says what it has to, and leaves the outputs that it declares."""
    output = tmp_path / "out"
    words = ["--state-dir", str(state_dir), "--output", str(output), str(EXAMPLES / f"{name}.yaml")]
    done = subprocess.run(
        [sys.executable, "-m", "forgeyard_api", "run", *words], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    left = {path.name for path in output.iterdir()} if output.exists() else set()
    assert left == {"hello": set(), "steps": {"report.txt"}, "build-c": {"greet"}}[name]
