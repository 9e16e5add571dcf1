"""Replay mode: a bundle that runs under plain `runc run`, and the init under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import shim_sandbox

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import When
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.build import SOURCE, build
from forgeyard_process_shim.fifos import place_init
from forgeyard_process_shim.protocol import StepCommand
from forgeyard_process_shim.replay import REPLAY_ARGV, STEPS_FILE, ReplayStep, encode_replay

ENV = {"PATH": "/usr/bin:/bin"}


def sh(number: int, script: str, *, mask: bool = False, when: When = When.ON_SUCCESS, **more: bool) -> ReplayStep:
    """A step that runs `script`."""
    return ReplayStep(StepCommand(number, ("/bin/sh", "-c", script), ENV, "/tmp", **more), mask, when)


PROGRAMS: list[tuple[list[ReplayStep], int, bytes]] = [
    ([sh(1, "echo a"), sh(2, "echo b")], 0, b"a\nb\n"),
    ([sh(1, "exit 3"), sh(2, "echo no")], 3, b""),
    ([sh(1, "exit 3", mask=True), sh(2, "echo yes")], 0, b"yes\n"),
    ([sh(1, "exit 3"), sh(2, "echo f", when=When.ON_FAILURE), sh(3, "exit 4", when=When.ALWAYS)], 3, b"f\n"),
    ([sh(1, "true"), sh(2, "echo f", when=When.ON_FAILURE), sh(3, "kill -9 $$", when=When.ALWAYS)], 137, b""),
    ([ReplayStep(StepCommand(1, ("nope",), ENV)), sh(2, "echo no")], 127, b""),
    ([ReplayStep(StepCommand(1, ("/tmp",), ENV))], 126, b""),
    ([sh(1, "sleep 600", background=True), sh(2, "setsid sleep 600 & echo x")], 0, b"x\n"),
    ([sh(1, "echo e >&2; cat", merge_output=True)], 0, b"e\n"),
]


@pytest.fixture(scope="module")
def sanitized() -> Iterator[Path]:
    """The init with address and undefined-behaviour checks."""
    directory = Path(tempfile.mkdtemp(prefix="fy-shim-san-", dir="/var/tmp"))
    binary = directory / "init"
    flags = ["-g", "-O1", "-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, "-o", str(binary), str(SOURCE)], check=True)
    yield binary
    shutil.rmtree(directory)


def run_replay(binary: Path, steps: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run `steps` as PID 1 of a pid namespace with a /proc of its own."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(steps)
        file.flush()
        command = ["unshare", "--pid", "--fork", "--mount-proc", str(binary), "replay", file.name]
        env = {"ASAN_OPTIONS": "detect_leaks=0", **ENV}
        return subprocess.run(command, capture_output=True, env=env, stdin=subprocess.DEVNULL, timeout=30, check=False)


@pytest.mark.kernel
@pytest.mark.parametrize("case", range(len(PROGRAMS)))
def test_replay_applies_the_rules_of_steps(sanitized: Path, case: int) -> None:
    """continue_on_error, when, background and merge_output as the executor has them; no sanitizer complains."""
    steps, code, out = PROGRAMS[case]
    done = run_replay(sanitized, encode_replay(steps))
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert b"runtime error" not in done.stderr
    assert b"Sanitizer" not in done.stderr


@pytest.mark.kernel
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20, 21, 30, -1])
def test_damaged_steps_file_is_refused(sanitized: Path, cut: int) -> None:
    """A file cut anywhere ends with the init's own code and message, never with a crash or a success."""
    done = run_replay(sanitized, encode_replay([sh(1, "echo a")])[:cut])
    assert done.returncode == 70, done.stderr
    assert b"Sanitizer" not in done.stderr


@pytest.mark.kernel
@pytest.mark.parametrize("at", range(0, 40, 3))
def test_flipped_bytes_never_crash_the_init(sanitized: Path, at: int) -> None:
    """Wrong lengths and counts are refused, or run into an error of exec or of the shell, and break no bound."""
    frame = bytearray(encode_replay([sh(1, "true")]))
    frame[at] ^= 0xFF
    done = run_replay(sanitized, bytes(frame))
    assert done.returncode in (0, 2, 70, 126, 127), done.stderr
    assert b"Sanitizer" not in done.stderr


@pytest.mark.kernel
def test_plain_runc_runs_a_replay_bundle() -> None:
    """A bundle with a steps file needs no executor: runc's exit code is the first unmasked failure's."""
    build()
    box = shim_sandbox.Sandbox(Path(tempfile.mkdtemp(prefix="fy-shim-", dir="/var/tmp")))
    try:
        box.lay_out(REPLAY_ARGV)
        place_init(box.control, shim_binary())
        steps = [sh(1, "id -u; pwd"), sh(2, "exit 42"), sh(3, "echo last", when=When.ALWAYS)]
        (box.control / STEPS_FILE).write_bytes(encode_replay(steps))
        box.run(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out, _ = box.runc.communicate(timeout=20)
        assert (box.runc.returncode, out) == (42, b"1000\n/tmp\nlast\n")
    finally:
        box.dispose()


def test_init_refuses_to_run_outside_a_namespace_of_its_own() -> None:
    """As anything but PID 1 it does nothing: its kill(-1) is meant for a namespace that is the job's alone."""
    build()
    for argv in (("fifo",), ("replay", "/dev/null"), ()):
        assert subprocess.run([shim_binary(), *argv], check=False).returncode == 64


def test_no_steps_are_refused() -> None:
    """An empty job has no steps file."""
    with pytest.raises(InvalidRequest):
        encode_replay([])
