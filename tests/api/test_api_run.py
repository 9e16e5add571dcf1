"""`forgeyard run` to its end, on a real kernel with a real runtime: bytes, exit codes, signals, results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


def command(*args: str) -> list[str]:
    """The command line of the program."""
    return [sys.executable, "-m", "forgeyard_api", *args]


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    """One state directory for all tests here: a fresh one costs a second each, for the skeleton of the host rootfs.

    `leaks` looks at it after each test all the same.
    """
    path = Path(tempfile.mkdtemp(prefix="fy-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    assert f" {path}/" not in mounts
    shutil.rmtree(path)


@pytest.fixture
def environment(state_dir: Path, require_tool: Callable[[str], str], leaks: object) -> dict[str, str]:
    """An environment whose executor keeps its state in this test's directory, and leaves nothing behind."""
    require_tool("runc")
    return os.environ | {"FORGEYARD_STATE_DIR": str(state_dir)}


@pytest.fixture
def forgeyard(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run a command line in an empty directory."""

    def call(*args: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command(*args), env=environment, cwd=tmp_path, capture_output=True, timeout=50, check=False, **more
        )

    return call


def started(environment: dict[str, str], *args: str) -> subprocess.Popen[bytes]:
    """A run whose job has said `ready` on stdout."""
    process = subprocess.Popen(command("run", *args), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_output_is_exact_and_the_exit_is_the_jobs(forgeyard: Run) -> None:
    """Any bytes, on the stream they were written to; the summary is on stderr, after them."""
    run = forgeyard("run", "--", "sh", "-c", r"printf 'a\000\377\r\n\033[31m'; printf 'err\n' >&2; exit 7")
    assert run.returncode == 7
    assert run.stdout == b"a\0\xff\r\n\x1b[31m"
    assert run.stderr.startswith(b"err\nforgeyard: failed")


@pytest.mark.parametrize(
    ("script", "code", "outcome", "exited"),
    [
        ("exit 137", 137, "failed", {"code": 137, "signal": None}),
        ("kill -9 $$", 137, "failed", {"code": None, "signal": 9}),
        ("exit 159", 159, "failed", {"code": 159, "signal": None}),
    ],
)
def test_three_ways_to_137_stay_apart(
    forgeyard: Run, tmp_path: Path, script: str, code: int, outcome: str, exited: dict[str, int | None]
) -> None:
    """The number is the same, the result says which it was."""
    run = forgeyard("run", "-q", "--result", "r.json", "--", "sh", "-c", script)
    found = json.loads((tmp_path / "r.json").read_text())
    assert (run.returncode, found["exit_code"], found["outcome"]) == (code, code, outcome)
    assert {key: found["exit"][key] for key in exited} == exited


@pytest.mark.parametrize(("program", "code"), [("/absent", 127), ("/etc/passwd", 126)])
def test_programs_that_do_not_start(forgeyard: Run, program: str, code: int) -> None:
    """127 not found, 126 not executable, as a shell has it."""
    assert forgeyard("run", "--", program).returncode == code


def test_out_of_memory_says_what_to_do(forgeyard: Run, tmp_path: Path) -> None:
    """137, evidence in the result, and the cure on stderr."""
    run = forgeyard("run", "--memory", "32MiB", "--result", "r.json", "--", "python3", "-c", "x = bytearray(256 << 20)")
    found = json.loads((tmp_path / "r.json").read_text())
    assert (run.returncode, found["outcome"]) == (137, "out_of_memory")
    assert found["evidence"]["memory"]["limit"] == 32 << 20
    assert found["evidence"]["memory"]["oom_kills"] >= 1
    assert b"32 MiB: ask for more" in run.stderr


def test_a_time_out_is_124(forgeyard: Run) -> None:
    """With the cure in the summary."""
    run = forgeyard("run", "--timeout", "200ms", "--grace", "0s", "--", "sleep", "60")
    assert run.returncode == 124
    assert b"timed out" in run.stderr
    assert b"--timeout" in run.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_with_grace(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The job gets its soft signal and may tidy up; exit code and result say what it was."""
    script = "trap 'echo tidied; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    result = tmp_path / "r.json"
    process = started(environment, "--result", str(result), "--", "sh", "-c", script)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    found = json.loads(result.read_text())
    assert process.returncode == found["exit_code"] == code
    assert (found["outcome"], found["cancellation"]) == ("cancelled", "user")
    assert out == b"tidied\n"
    assert b"once more to kill it at once" in err


def test_the_second_signal_kills_at_once(environment: dict[str, str]) -> None:
    """A job that ignores the soft signal does not get its minute of grace; nothing is left of it."""
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"
    process = started(environment, "--grace", "60s", "--", "sh", "-c", script)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"heard\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_reader_that_goes_away_does_not_end_the_job(environment: dict[str, str], tmp_path: Path) -> None:
    """`| head -1`: the rest of the output is dropped, the job goes on to its end."""
    output = tmp_path / "out"
    script = "echo ready; yes | head -c 3000000; echo finished > /work/output/done"
    process = started(environment, "--output", str(output), "--", "sh", "-c", script)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=30) == 0
    assert (output / "done").read_text() == "finished\n"
    assert b"succeeded" in err
    process.stderr.close()


def test_a_job_file_runs_with_its_source_and_outputs(forgeyard: Run, tmp_path: Path) -> None:
    """Paths start at the file; writes to the source are discarded; `-e` wins over a step's own variable."""
    (tmp_path / "p" / "src").mkdir(parents=True)
    (tmp_path / "p" / "src" / "in.txt").write_text("from source\n")
    (tmp_path / "p" / "job.yaml").write_text(
        "version: 1\nrootfs: host\nsource: {path: src}\nsteps:\n"
        "  - run: echo $WHO >> in.txt; cat in.txt > /work/output/out.txt\n    env: {WHO: step}\n"
        "outputs: [{path: out.txt}]\n"
    )
    run = forgeyard("run", "p/job.yaml", "-e", "WHO=flag", "--output", "got")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "got" / "out.txt").read_text() == "from source\nflag\n"
    assert (tmp_path / "p" / "src" / "in.txt").read_text() == "from source\n"


def test_a_missing_output_fails_the_job(forgeyard: Run, tmp_path: Path) -> None:
    """Exit 1, and the summary names it."""
    (tmp_path / "job.yaml").write_text(
        "version: 1\nrootfs: host\nsteps: [{run: 'true'}]\noutputs: [{path: report.xml}]\n"
    )
    run = forgeyard("run", "job.yaml")
    assert run.returncode == 1
    assert b"report.xml is missing" in run.stderr


@pytest.mark.parametrize("name", ["hello.yaml", "steps.yaml", "build-c.yaml"])
def test_examples_run(forgeyard: Run, require_tool: Callable[[str], str], name: str) -> None:
    """Each example succeeds as it stands."""
    if name == "build-c.yaml":
        require_tool("gcc")
    run = forgeyard("run", str(ROOT / "examples" / name))
    assert run.returncode == 0, run.stderr


def test_a_profile_refuses_with_125(forgeyard: Run) -> None:
    """The flag was read, the answer is no; one line, nothing started."""
    run = forgeyard("run", "--network", "host", "--", "true")
    assert run.returncode == 125
    assert run.stderr.startswith(b"forgeyard: network 'host': profile standard-ci allows")
    assert run.stderr.count(b"\n") == 1


def test_the_result_comes_after_the_output_on_stdout(forgeyard: Run) -> None:
    """`--result -`: the last line is the JSON."""
    run = forgeyard("run", "--result", "-", "--", "echo", "out")
    first, last = run.stdout.splitlines()
    assert (first, json.loads(last)["outcome"]) == (b"out", "succeeded")


def test_ps_shows_a_running_attempt_and_gc_leaves_it_alone(environment: dict[str, str], forgeyard: Run) -> None:
    """While it runs it is there; afterwards it is gone."""
    process = started(environment, "--", "sh", "-c", "echo ready; exec sleep 60")
    (found,) = json.loads(forgeyard("ps", "--json").stdout)
    assert (found["state"], found["name"]) == ("running", "sh")
    assert json.loads(forgeyard("gc", "--json").stdout) == {"removed": [], "alive": 1, "engines": [], "errors": []}
    assert found["sandbox_id"].encode() in forgeyard("ps").stdout
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert json.loads(forgeyard("ps", "--json").stdout) == []


def test_gc_removes_what_a_killed_executor_left(environment: dict[str, str], forgeyard: Run) -> None:
    """After `kill -9` of the program: orphaned, then removed by name, then nothing to remove."""
    process = started(environment, "--", "sh", "-c", "echo ready; exec sleep 60")
    process.kill()
    process.communicate(timeout=30)
    (orphan,) = json.loads(forgeyard("ps", "--json").stdout)
    assert orphan["state"] == "orphaned"
    first, second = (json.loads(forgeyard("gc", "--json").stdout) for _ in range(2))
    assert first == {"removed": [orphan["sandbox_id"]], "alive": 0, "engines": [], "errors": []}
    assert second == {"removed": [], "alive": 0, "engines": [], "errors": []}


def test_bundle_show_prints_the_config(forgeyard: Run) -> None:
    """The exact bytes, the same each time, with nothing started."""
    first, second = (forgeyard("bundle", "show", "--", "true") for _ in range(2))
    assert first.returncode == 0, first.stderr
    config = json.loads(first.stdout)
    assert config["process"]["noNewPrivileges"] is True
    assert sorted(config) == sorted(json.loads(second.stdout))


def test_a_generated_bundle_runs_with_plain_runc(
    forgeyard: Run, require_tool: Callable[[str], str], state_dir: Path
) -> None:
    """What anyone can read, anyone can run."""
    bundle = state_dir / "bundle"
    made = forgeyard("bundle", "generate", "--to", str(bundle), "--", "echo", "from the bundle")
    assert made.returncode == 0, made.stderr
    name = f"fy-test-{os.getpid()}"
    root = state_dir / "runc"
    run = subprocess.run(
        [require_tool("runc"), "--root", str(root), "run", "-b", str(bundle), name],
        capture_output=True, timeout=30, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, b"from the bundle\n"), run.stderr
