"""examples/rust-agent against a server: `./dev nightly rustagent`, which builds it before and names it.

Not collected by the tests of every change, which have no cargo.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from server_process import served

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

AGENT = os.environ["FORGEYARD_TEST_RUST_AGENT"]


def agent(socket: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run one command as a job."""
    return subprocess.run([AGENT, str(socket), *command], capture_output=True, text=True, timeout=300, check=False)


def test_it_runs_jobs_at_a_server(state_dir: Path) -> None:
    """Both streams arrive whole, in bytes and in the right place; the exit code and the outcome are the job's."""
    with served(state_dir) as server:
        script = "i=0; while [ $i -lt 500 ]; do echo line $i; echo note $i >&2; i=$((i+1)); done; exit 3"
        done = agent(server.socket, "sh", "-c", script)
        assert done.returncode == 3
        assert done.stdout.splitlines() == [f"line {number}" for number in range(500)]
        notes, said = done.stderr.partition("rust-agent: ")[::2]
        assert notes.splitlines() == [f"note {number}" for number in range(500)]
        assert said.startswith("failed, exit code 3, sandbox ")
        assert agent(server.socket, "true").returncode == 0
        # Each was forgotten at its end.
        server.end()
        server.assert_nothing_left()
        server.assert_calm()


def test_errors_are_typed(state_dir: Path, tmp_path: Path) -> None:
    """A refusal is named by its kind, reason and cure; a server that is not there is one line."""
    with served(state_dir, 'memory = "16MiB"') as server:
        refused = agent(server.socket, "true")
        assert refused.returncode == 125
        assert "memory" in refused.stderr
        assert refused.stderr.startswith("rust-agent: ")
        assert refused.stderr.count("\n") == 1
    absent = agent(tmp_path / "absent.sock", "true")
    assert absent.returncode == 125
    assert absent.stderr.startswith("rust-agent: ")
    assert absent.stderr.count("\n") == 1


def test_a_command_line_without_a_command_is_explained() -> None:
    """Usage, and 2."""
    done = subprocess.run([AGENT, "/run/x.sock"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: rust-agent SOCKET COMMAND [ARGUMENT...]\n")
