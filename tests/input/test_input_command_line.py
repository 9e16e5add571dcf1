"""Nonsense on the command line: exit 2, one line, and nothing made on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forgeyard_api import main
from forgeyard_api.cli_flags import RUNTIMES
from forgeyard_runtimes.find import COMMAND_LINES, DAEMONS

NONSENSE = {
    "--memory": ["", "0", "-1", "1KiB", "x", "1 2", "9" * 5000, "١", "NaN", "64MB MB"],
    "--disk": ["", "0", "-5g", "1", "disk"],
    "--cpus": ["", "0", "-1", "nan", "inf", "1e99999", "two", "0.001", "9" * 5000],
    "--pids": ["", "0", "-1", "3", "1.5", "x", "9" * 5000],
    "--timeout": ["", "0", "0s", "90", "-5s", "5x", "999999h", "9" * 5000 + "h"],
    "--grace": ["", "10", "-1s", "soon"],
    "--env": ["", "=x", "A B=c", "\n=x", "\x7f=x"],
    "--env-file": ["", "absent", "."],
    "--workdir": [""],
    "--user": [""],
    "--image": [""],
    "--entrypoint": ["x"],
    "--source": ["", "absent", "file", "a\udcff", "x" * 5000],
    "--source-mode": ["", "rx", "RO", "ro"],
    "--profile": ["", "Standard-CI", "none"],
    "--network": ["", "none", "DENY"],
    "--runtime": ["", "rkt", "../runc", "/usr/sbin/runc"],
    "--output": ["", "file", "full", "x" * 5000],
    "--result": ["", ".", "absent/x", "x" * 5000, "\0"],
    "--state-dir": [""],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file, and a directory that is not empty."""
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "f").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGEYARD_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def files(here: Path) -> list[str]:
    """Everything below `here`."""
    return sorted(str(path.relative_to(here)) for path in here.rglob("*"))


def assert_refused(capsys: pytest.CaptureFixture[str], here: Path, *args: str) -> str:
    """Run the command line in this process; returns its one line."""
    before = files(here)
    code = main.run(args)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "internal error" not in err
    assert err.startswith("forgeyard: ")
    assert err.rstrip("\n").isprintable()
    assert len(err) < 500
    assert files(here) == before
    return err


@pytest.mark.parametrize(
    ("flag", "value"),
    [(flag, value) for flag, values in NONSENSE.items() for value in values],
    ids=lambda text: repr(text)[:30],
)
def test_a_flag_with_a_nonsense_value(capsys: pytest.CaptureFixture[str], here: Path, flag: str, value: str) -> None:
    """The flag is named and the cure told; no directory appears, not even the state's."""
    line = assert_refused(capsys, here, "run", f"{flag}={value}", "--", "true")
    assert flag in line or str(here / value) in line


@pytest.mark.parametrize("command", [["bundle", "show"], ["bundle", "generate", "--to=to"]])
@pytest.mark.parametrize("flag", ["--memory=0", "--profile=x", "--source=", "--runtime=x", "--state-dir="])
def test_commands_that_share_the_flags(
    capsys: pytest.CaptureFixture[str], here: Path, command: list[str], flag: str
) -> None:
    """The same answers from `bundle`."""
    assert flag.partition("=")[0] in assert_refused(capsys, here, *command, flag, "--", "true")


@pytest.mark.parametrize(
    "args",
    [
        ["gc", "--runtime=x"],
        ["gc", "--state-dir="],
        ["ps", "--state-dir="],
        ["job", "validate", ""],
        ["job", "init", ""],
        ["job", "init", "absent/job.yaml"],
        ["job", "validate", "absent"],
        ["job", "validate", "."],
        ["run", ""],
        ["run", "--", ""],
        ["run", "--"],
        ["run", "full"],
        ["bundle", "generate", "--to=", "--", "true"],
        ["bundle", "generate", "--to=full", "--", "true"],
        ["bundle", "generate", "--to=" + "x" * 300, "--", "true"],
    ],
    ids=" ".join,
)
def test_other_commands(capsys: pytest.CaptureFixture[str], here: Path, args: list[str]) -> None:
    """An empty path is never the working directory, and a file that is none is said to be."""
    assert_refused(capsys, here, *args)


def test_names_of_runtimes_are_those_of_the_adapter() -> None:
    """The command line's list, which needs no import, and the adapter's table are one."""
    assert set(RUNTIMES) == {*COMMAND_LINES, *DAEMONS}


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    """Shown escaped, also where the terminal's encoding is strict or ASCII; found under its real name."""
    name = os.fsencode(tmp_path) + b"/j\xff\n\xc3\xbc.yaml"
    for locale in ("utf-8:strict", "ascii:strict"):
        for command in ("init", "validate"):
            run = subprocess.run(
                [sys.executable, "-m", "forgeyard_api", "job", command, name],
                env=os.environ | {"PYTHONIOENCODING": locale},
                capture_output=True,
                timeout=30,
                check=False,
            )
            assert (run.returncode, run.stderr) == (0, b""), (locale, command, run.stderr)
        assert Path(os.fsdecode(name)).exists()
        Path(os.fsdecode(name)).unlink()
