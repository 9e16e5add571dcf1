"""examples/container_pool.py: all jobs run, in their slots, and nothing of them stays."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

EXAMPLE = Path(__file__).parents[2] / "examples" / "container_pool.py"


def command(image: str, state: Path, *words: str) -> list[str]:
    """The command line of the example."""
    return [sys.executable, str(EXAMPLE), image, "--state-dir", str(state), *words]


@pytest.mark.timeout(180)
def test_fifty_jobs_pass(busybox_image: str, state_dir: Path, leaks: object) -> None:
    """Each finds its own server; a line for each, and a summary. `leaks` sees that nothing is left."""
    done = subprocess.run(command(busybox_image, state_dir), capture_output=True, text=True, check=False, timeout=170)
    *jobs, summary = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split(maxsplit=4)[0] for line in jobs) == [f"job-{number:02}" for number in range(1, 51)]
    for line in jobs:
        number, found = re.fullmatch(r"job-(\d\d) +[\d.]+ s  passed  (.*)", line).groups()
        assert found == f"{int(number)} found web"
    assert summary.startswith("50 passed, 0 failed in ")
    assert not list((state_dir / "sandboxes").iterdir())


def test_a_job_that_fails_does_not_end_the_runner(state_dir: Path, tmp_path: Path, leaks: object) -> None:
    """An image that is not there: every job is refused by itself, the summary counts them, the exit code is 1."""
    image = f"oci:{tmp_path}/absent@sha256:{'0' * 64}"
    done = subprocess.run(
        command(image, state_dir, "--jobs", "3"), capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stdout.count("absent")) == (1, 3), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("0 passed, 3 failed in ")


def test_an_interrupt_cleans_up(busybox_image: str, state_dir: Path, leaks: object) -> None:
    """As the example says of itself: what runs is cancelled, and nothing of it is left."""
    with subprocess.Popen(
        command(busybox_image, state_dir), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert "passed" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(40) != 0
    assert not list((state_dir / "sandboxes").iterdir())
