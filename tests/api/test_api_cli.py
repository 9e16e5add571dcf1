"""The command as a process: usage errors, help, what is imported, job files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgeyard_api import main

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("asyncio", "pydantic", "pydantic_core", "grpc", "docker", "podman", "rich", "yaml", "forgeyard_executor")


@dataclass(frozen=True)
class Ended:
    """One command line: its exit code and what it said."""

    returncode: int
    stdout: str
    stderr: str


Forgeyard = Callable[..., Ended]


@pytest.fixture
def forgeyard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Forgeyard:
    """Run a command line in this process: what a new one adds is shown by the tests that use `process`."""

    def call(*args: str, cwd: Path | None = None) -> Ended:
        with monkeypatch.context() as patch:
            patch.chdir(cwd or Path.cwd())
            capsys.readouterr()
            code = main.run(list(args))
            out, err = capsys.readouterr()
            return Ended(code, out, err)

    return call


def process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "forgeyard_api", *args],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def imported(code: str, **env: str) -> list[str]:
    """Heavy modules in memory after `code` in a fresh interpreter."""
    script = f"import sys\n{code}\nsys.stderr.write('HEAVY ' + ' '.join(m for m in {HEAVY} if m in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True, timeout=30, check=False
    )
    assert "HEAVY " in run.stderr, run.stderr
    return run.stderr.rpartition("HEAVY ")[2].split()


def test_help_imports_nothing_heavy() -> None:
    """No pydantic, asyncio or client is loaded to print help, the version, or a usage error."""
    lines = [["--help"], ["run", "--help"], ["bundle", "generate", "-h"], ["job", "--help"], ["--version"]]
    code = f"from forgeyard_api.main import run\nassert [run(line) for line in {lines}] == [0] * 5\n"
    # typer's own reader of values would load pydantic here.
    assert imported(code + "assert run(['run', '--memory', '0', '--', 'a']) == 2") == []


def test_completion_imports_nothing_heavy() -> None:
    """A shell that completes a word does not wait for a client."""
    code = "from forgeyard_api.main import run\ntry: run([])\nexcept SystemExit: pass"
    env = {"_FORGEYARD_COMPLETE": "complete_bash", "COMP_WORDS": "forgeyard run --profile ", "COMP_CWORD": "3"}
    assert imported(code, **env) == []


def test_the_package_itself_imports_nothing_heavy() -> None:
    """Names are loaded when they are asked for."""
    assert imported("import forgeyard_api, forgeyard_model.request") == []


def test_completion_knows_the_profiles() -> None:
    """Values of choices are completed."""
    run = process(_FORGEYARD_COMPLETE="complete_bash", COMP_WORDS="forgeyard run --profile ", COMP_CWORD="3")
    assert run.stdout.split() == ["development", "standard-ci", "release", "high-assurance"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["run"], "forgeyard: CMD '': give a job file, or a command after --"),
        (["run", "--memory", "0", "--", "a"], "forgeyard: --memory '0': must be more than 0"),
        (["run", "--profile", "x", "--", "a"], "forgeyard: --profile 'x': write development"),
        (["run", "absent.yaml"], "forgeyard: job file 'absent.yaml': can't be read: No such file"),
        (["run", "a.yaml", "b.yaml"], "forgeyard: Got unexpected extra argument(s) (b.yaml)"),
        (["run", "--bogus", "--", "a"], "forgeyard: No such option: --bogus"),
        (["run", "--output", "/etc", "--", "a"], "forgeyard: --output '/etc': is not an empty directory"),
        (["run", "--result", "/nowhere/x", "--", "a"], "forgeyard: --result '/nowhere/x': name a file"),
        (["bundle", "generate", "--", "a"], "forgeyard: Missing option '--to'"),
        (["bundle", "generate", "--to", "/etc", "--", "a"], "forgeyard: --to '/etc': is not an empty directory"),
        (["ps", "x"], "forgeyard: Got unexpected extra argument(s) (x)"),
        (["nope"], "forgeyard: No such command 'nope'"),
    ],
)
def test_usage_errors_are_one_line_and_2(forgeyard: Forgeyard, args: list[str], line: str, tmp_path: Path) -> None:
    """What the user has to write differently, no traceback, no usage screen."""
    run = forgeyard(*args, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith(line)
    assert run.stderr.count("\n") == 1
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["run", "--secret", "A=env:B", "--", "a"], "forgeyard: --secret: not supported"),
    ],
)
def test_refusals_are_one_line_and_125(forgeyard: Forgeyard, args: list[str], line: str) -> None:
    """The text was fine, the answer is no."""
    run = forgeyard(*args)
    assert run.returncode == 125
    assert run.stderr.startswith(line)
    assert run.stderr.count("\n") == 1


def test_a_refusal_stands_in_the_result_file(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """An older result is not left for a reader to find."""
    target = tmp_path / "result.json"
    target.write_text("an older result")
    run = forgeyard("run", "--secret", "A=env:B", "--result", str(target), "--", "a")
    found = json.loads(target.read_text())
    assert (run.returncode, found["exit_code"]) == (125, 125)
    assert (found["error"]["kind"], found["error"]["reason"]) == ("unsupported", "secret_unsupported")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_help_shows_the_dashes(forgeyard: Forgeyard) -> None:
    """How a command is given stands in the usage line."""
    run = forgeyard("run", "--help")
    assert run.returncode == 0
    assert "forgeyard run [OPTIONS] [JOBFILE] [-- CMD...]" in run.stdout


def test_no_arguments_is_help(forgeyard: Forgeyard) -> None:
    """And a usage error, as with git and docker."""
    run = forgeyard()
    assert run.returncode == 2
    assert "Commands:" in run.stdout + run.stderr


def test_version() -> None:
    """One line with the program's name."""
    run = process("--version")
    assert (run.returncode, run.stdout.split()[0]) == (0, "forgeyard")


def test_init_writes_an_example_that_is_valid_and_never_overwrites(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """The first job file is one command away, and safe to ask for twice."""
    first = forgeyard("job", "init", cwd=tmp_path)
    text = (tmp_path / "job.yaml").read_text()
    second = forgeyard("job", "init", cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 2)
    assert second.stderr == "forgeyard: FILE 'job.yaml': is there already: name another file\n"
    assert (tmp_path / "job.yaml").read_text() == text
    valid = forgeyard("job", "validate", cwd=tmp_path)
    assert (valid.returncode, valid.stdout) == (0, "job.yaml: ok\n")
    assert forgeyard("job", "init", "-").stdout == text


def test_validate_shows_every_error_at_its_place(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """``file:line:col field: value: cure``, one a line, exit 2."""
    (tmp_path / "j.yaml").write_text("version: 1\nrootfs: host\ntimeout: 5\nsteps: [{run: 1}]\n")
    run = forgeyard("job", "validate", "j.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "j.yaml:3:10 timeout: '5': a bare number has no unit: write 5s",
        "j.yaml:4:15 steps[0].run: '1': write it in quotes: \"1\"",
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("network: host", "4:10 network: 'host': profile standard-ci allows deny"),
        ("source: {path: ., mode: rw}", "4:25 source.mode: 'rw': profile standard-ci allows ro, cow"),
        ("resources: {memory: unlimited}", "4:21 resources.memory: 'unlimited': profile standard-ci needs a limit"),
        ("capabilities: root-in-userns", "4:15 capabilities: 'root-in-userns': needs image mode"),
    ],
)
def test_validate_knows_the_files_profile(forgeyard: Forgeyard, tmp_path: Path, line: str, found: str) -> None:
    """What the profile does not allow is an error at its place."""
    (tmp_path / "j.yaml").write_text(f"version: 1\nrootfs: host\nsteps: [{{run: a}}]\n{line}\n")
    run = forgeyard("job", "validate", "j.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith(f"j.yaml:{found}")


def test_validate_says_what_this_version_can_not_run(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """The file is right, so it is ok; running it will be refused, so that is said."""
    (tmp_path / "j.yaml").write_text("version: 1\nrootfs: host\nsteps: [{run: a}]\ndevices: [a.b/c=0]\n")
    run = forgeyard("job", "validate", "j.yaml", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "j.yaml: ok\n")
    assert run.stderr.splitlines() == [
        "forgeyard: note: devices: not supported in this version",
    ]
    assert forgeyard("run", "j.yaml", cwd=tmp_path).returncode == 125


def test_a_job_file_that_is_wrong_is_a_usage_error_of_run(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """The same lines as validate has, and 2."""
    (tmp_path / "j.yaml").write_text("version: 1\n")
    run = forgeyard("run", "j.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr == "j.yaml:1:1 steps: (missing): add it\n"


def test_schema_is_printed(forgeyard: Forgeyard) -> None:
    """The file in docs/, byte for byte."""
    assert forgeyard("job", "schema").stdout == (ROOT / "docs" / "job.schema.json").read_text()


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    """`forgeyard job schema | true` says nothing."""
    command = f"{sys.executable} -m forgeyard_api job schema | true"
    run = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert run.stderr == ""


def test_an_unforeseen_error_is_one_line(tmp_path: Path) -> None:
    """No traceback reaches a user; the variable brings it back."""
    (tmp_path / "forgeyard_executor.py").write_text("raise RuntimeError('broken\\nbadly')\n")
    run = process("ps", PYTHONPATH=str(tmp_path))
    assert run.returncode == 125
    assert run.stderr == (
        "forgeyard: internal error: RuntimeError: broken badly (set FORGEYARD_DEBUG=1 to see where)\n"
    )
    assert "Traceback" in process("ps", PYTHONPATH=str(tmp_path), FORGEYARD_DEBUG="1").stderr
