"""A result as JSON, and as the summary people read."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import pytest

from forgeyard_api.result_file import check_target, error_json, write_result
from forgeyard_api.summary import cure_of, summary_lines
from forgeyard_model.errors import (
    ExecutorError,
    FailureClass,
    ForgeyardError,
    InvalidRequest,
    SandboxError,
    SandboxErrorKind,
)
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.result import (
    CollectedOutput,
    DiskEvidence,
    EndCause,
    Evidence,
    ExecutionOutcome,
    ExecutionResult,
    MemoryEvidence,
    OutputSummary,
    PidsEvidence,
    ProcessExit,
    Provenance,
    ResourceUsage,
    StepResult,
)
from forgeyard_model.result_json import read_result, result_json

START = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
KILLED = ProcessExit.from_wait_status(9)
RESULT = ExecutionResult(
    sandbox_id="01j00000000000000000000000",
    attempt_id="caller's own / name",
    name="api-tests",
    outcome=ExecutionOutcome.OUT_OF_MEMORY,
    failure_class=FailureClass.RESOURCE,
    exit_code=137,
    message="step 'test' was killed for want of memory",
    end_cause=EndCause.EXITED,
    cancellation=None,
    exit=KILLED,
    steps=(
        StepResult("test", KILLED, START, 2.5, leftovers=2),
        StepResult("tidy", ProcessExit.from_wait_status(0), START, 0.01),
        StepResult("publish", None, skipped=True),
    ),
    started_at=START,
    finished_at=START + timedelta(seconds=3.25),
    evidence=Evidence(MemoryEvidence(64 << 20, 64 << 20, 1, 8 << 20), PidsEvidence(128, 3, 0), DiskEvidence()),
    usage=ResourceUsage(cpu_time=1.5, peak_memory=64 << 20),
    output=OutputSummary(stdout_bytes=10),
    outputs=(CollectedOutput("report.xml", missing=True),),
    provenance=Provenance(
        profile=ExecutionProfile.STANDARD_CI,
        isolation=IsolationLevel.NAMESPACE,
        user_namespace=True,
        network=NetworkMode.DENY,
        seccomp="general-build@1",
        runtime="runc 1.1.5",
        rootfs="host:sha256:00",
        plan_digest="sha256:01",
        bundle_digest="sha256:02",
        impure=("host rootfs",),
        uid_base=1 << 30,
    ),
    startup=MappingProxyType({"plan": 0.001, "prepare": 0.012}),
    notes=("nofile clamped to 20000",),
)


def lines(result: ExecutionResult) -> list[str]:
    """The summary's text."""
    return [text for _, text in summary_lines(result)]


def test_a_result_survives_the_round_trip() -> None:
    """Every field, to the microsecond and the byte."""
    assert read_result(result_json(RESULT)) == RESULT


def test_json_speaks_the_contracts_words() -> None:
    """snake_case outcomes, profile as written, RFC 3339 times, None as null, one line."""
    data = result_json(RESULT)
    found = json.loads(data)
    assert data.count(b"\n") == 1
    assert found["outcome"] == "out_of_memory"
    assert found["provenance"]["profile"] == "standard-ci"
    assert found["provenance"]["network"] == "deny"
    assert found["started_at"] == "2030-01-02T03:04:05.678901Z"
    assert found["exit"] == {"raw": 9, "code": None, "signal": 9, "core_dumped": False}
    assert found["usage"]["io_read"] is None
    assert found["startup"] == {"plan": 0.001, "prepare": 0.012}


def test_bytes_that_are_no_text_do_not_break_the_json() -> None:
    """A step named by bytes that are not UTF-8 is still written, and the file is still UTF-8."""
    odd = replace(RESULT, steps=(StepResult("a\udcff", None),))
    assert json.loads(result_json(odd).decode())["steps"][0]["name"]


def test_writing_is_atomic_and_leaves_nothing_else(tmp_path: Path) -> None:
    """The file is whole or not there; its mode is what the umask says."""
    target = tmp_path / "result.json"
    write_result(target, b"first")
    write_result(target, b"second")
    assert target.read_bytes() == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_target_that_is_no_file_is_written_to(tmp_path: Path) -> None:
    """/dev/null and a FIFO stay what they are."""
    write_result(Path("/dev/null"), b"x")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("target", ["/nowhere/result.json", "/etc"])
def test_a_target_that_can_not_be_written_is_found_before_the_job(target: str) -> None:
    """Not after an hour of work."""
    with pytest.raises(InvalidRequest):
        check_target(target)


def test_a_refusal_has_a_document_of_its_own() -> None:
    """Kind, reason and words, so that a program need not read stderr."""
    inner = SandboxError(
        SandboxErrorKind.MOUNT_FAILED, "no_overlay", "no overlay", details="EPERM", resolution="load it"
    )
    found = json.loads(error_json(ExecutorError.prepare(inner), 125))
    assert found == {
        "error": {
            "type": "ExecutorError",
            "kind": "prepare",
            "reason": "no_overlay",
            "brief": "no overlay",
            "details": "EPERM",
            "resolution": "load it",
            "failure_class": "infrastructure",
        },
        "exit_code": 125,
    }
    assert json.loads(error_json(InvalidRequest("network", "host", "no"), 125))["error"]["field"] == "network"
    assert json.loads(error_json(ForgeyardError("x"), 125))["error"]["type"] == "ForgeyardError"


def test_the_summary_says_what_why_and_what_to_do() -> None:
    """Outcome, steps, times, memory against the limit, the missing output, notes, the cure."""
    assert lines(RESULT) == [
        "forgeyard: out of memory in 3.25s: step 'test' was killed for want of memory (exit 137)",
        "  step      test  signal SIGKILL  2.5s  2 left-over processes killed",
        "  step      tidy  exit 0  10ms",
        "  step      publish  skipped",
        "  time      plan 1ms, prepare 12ms, steps 2.51s",
        "  memory    peak 64 MiB of 64 MiB, 1 killed for want of memory",
        "  output    report.xml is missing",
        "  note      nofile clamped to 20000",
        "  cure      peak 64 MiB of 64 MiB, 8 MiB of it in tmpfs: ask for more with resources.memory or --memory",
    ]


def test_a_good_one_step_job_has_a_short_summary() -> None:
    """Nothing to explain, nothing to cure."""
    good = replace(
        RESULT,
        outcome=ExecutionOutcome.SUCCEEDED,
        exit_code=0,
        message="",
        steps=RESULT.steps[1:2],
        outputs=(),
        notes=(),
        evidence=Evidence(),
    )
    assert lines(good) == ["forgeyard: succeeded in 3.25s", "  time      plan 1ms, prepare 12ms, steps 10ms"]


def test_what_is_stricter_is_one_short_line() -> None:
    """However much it is; the result has all of it."""
    found = replace(RESULT.provenance, runtime="podman 9", stricter=tuple(f"linux.x{n}: y" for n in range(30)))
    told = [line for line in lines(replace(RESULT, provenance=found)) if "stricter" in line]
    assert told == ["  note      podman 9 is stricter than the bundle: see provenance.stricter in the result"]


@pytest.mark.parametrize(
    ("outcome", "evidence", "cure"),
    [
        ("resource_exceeded", Evidence(pids=PidsEvidence(32, 32, 5)), "limit of 32 processes"),
        ("resource_exceeded", Evidence(disk=DiskEvidence(1 << 30, 1 << 30, True)), "disk was full (1 GiB of 1 GiB)"),
        ("timed_out", Evidence(), "more time"),
        ("out_of_memory", Evidence(), "peak unknown"),
        ("failed", Evidence(), ""),
        ("succeeded", Evidence(), ""),
    ],
)
def test_cures_follow_the_evidence(outcome: str, evidence: Evidence, cure: str) -> None:
    """A cure only where there is something to change."""
    found = cure_of(replace(RESULT, outcome=ExecutionOutcome(outcome), evidence=evidence))
    assert (cure in found) if cure else (found == "")


def test_a_jobs_words_can_not_steer_the_terminal() -> None:
    """Names and notes with escapes and newlines stay on their line."""
    bad = "x\x1b]0;owned\x07\nforgeyard: succeeded"
    hostile = replace(RESULT, message=bad, steps=(StepResult(bad, None, error=bad),), notes=(bad,))
    assert all(line.isprintable() for line in lines(hostile))


def test_many_steps_and_notes_are_cut_to_what_matters() -> None:
    """A thousand steps: the ones that went wrong, and how many more there are."""
    good = StepResult("good", ProcessExit.from_wait_status(0))
    many = replace(
        RESULT, steps=(*[good] * 999, StepResult("bad", ProcessExit.from_wait_status(256))), notes=("n",) * 99
    )
    found = lines(many)
    assert len(found) < 40
    assert "  step      bad  exit 1" in found
    assert "  step      999 more" in found
    assert "  note      79 more notes stand in the result" in found


SHOW = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_api_result import RESULT
from forgeyard_api.summary import show_summary
show_summary(RESULT)
"""


def on_terminal(**env: str) -> bytes:
    """What `show_summary` writes to a terminal."""
    leader, follower = pty.openpty()
    try:
        clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
        subprocess.run([sys.executable, "-c", SHOW], env=clean | env, stderr=follower, check=True, timeout=30)
        return os.read(leader, 65536)
    finally:
        os.close(leader)
        os.close(follower)


def test_colour_is_for_terminals_that_want_it() -> None:
    """On a terminal; not with NO_COLOR, not with TERM=dumb."""
    assert b"\x1b[" in on_terminal(TERM="xterm")
    # NO_COLOR is about colour: rich may still write bold.
    assert b"\x1b[1;31m" not in on_terminal(TERM="xterm", NO_COLOR="1")
    assert b"\x1b" not in on_terminal(TERM="dumb")


def test_no_terminal_means_plain_text() -> None:
    """A log file gets no escapes, and rich is not even loaded."""
    code = SHOW + "assert 'rich' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert run.stderr.splitlines() == lines(RESULT)
