"""The security audit: what is recorded, what never is, and sinks that can't be written."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ended_attempts import ended, result
from served import ALICE, JOB, ROOT, socket_over, table_over, within
from served import prepare as table_prepare

from forgeyard_api.client.calls import connected
from forgeyard_api.observe import audit
from forgeyard_api.observe.audit_sinks import AuditLine, FileSink, JournalSink, SyslogSink, open_sink
from forgeyard_api.observe.audit_writer import MAX_LINE, AuditWriter, auditing
from forgeyard_api.observe.follow import Auditor, followed
from forgeyard_api.serve.attempt_types import AttemptState, Caller, Wanted
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.peers import Allowed
from forgeyard_api.serve.requests import request_from
from forgeyard_api.wire.messages import executor as wire
from forgeyard_executor import Job, Outcome, Step
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import ExecutorError, ForgeyardError, InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.policy import ApprovedHostPath, CapabilityGrant, NetworkDestination, NetworkPolicy

SECRET = "hunter2-7f3a"


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    """What is in the audit file, of everything up to now."""
    path = tmp_path / "audit.jsonl"
    with auditing(str(path)) as writer:
        assert writer is not None

        def read() -> list[dict[str, Any]]:
            flushed(writer)
            return [json.loads(line) for line in path.read_text().splitlines()]

        yield read


def flushed(writer: AuditWriter) -> None:
    """Once everything that was recorded is written."""
    assert writer.settled(60)


def events(found: Sequence[dict[str, Any]]) -> list[str]:
    """What happened, in order."""
    return [line["event"] for line in found]


def test_an_attempt_is_recorded_with_what_it_was_granted(lines: Any, tmp_path: Path) -> None:
    """Host paths, network, capabilities, who asked; a repeated Prepare is one; no value of the job's is there."""
    job = Job(
        image="app@sha256:" + "0" * 64,
        steps=(Step("curl", SECRET, env={"TOKEN": SECRET}, stdin=SECRET.encode()), Step.shell(f"echo {SECRET}")),
        env={"PASSWORD": SECRET},
        host_paths=(ApprovedHostPath("/srv/data", "/data", read_only=False),),
        network=NetworkPolicy.restricted(NetworkDestination("pypi.example.org", ports=(443,))),
        capabilities=CapabilityGrant.ROOT_IN_USERNS,
    )
    wanted = Wanted("a", job, tenant="t", labels={"x": SECRET}, source="/srv/tree")

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor(lambda _: FakeRun(holds=True))) as table:
            for _ in range(2):
                await table_prepare(table, ALICE, wanted)
            await table.wait(ALICE, "a", AttemptState.PREPARED)

    within(body())
    (line,) = [line for line in lines() if line["event"] == "prepared"]
    assert (line["uid"], line["pid"], line["attempt_id"], line["tenant"]) == (ALICE.uid, ALICE.pid, "a", "t")
    assert line["host_paths"] == [{"source": "/srv/data", "destination": "/data", "read_only": False}]
    assert line["network"] == {"mode": "restricted", "destinations": [{"to": "pypi.example.org", "ports": [443]}]}
    assert (line["capabilities"], line["source"], line["root"]) == ("root-in-userns", "/srv/tree", job.image)
    assert SECRET not in json.dumps(lines())


def test_callers_and_what_they_do(lines: Any, tmp_path: Path) -> None:
    """Through the socket: who connected, what was refused and why, exec, an operator's cancel, drain."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: FakeRun(holds=True))
        # Whose attempt it is decides who its owner is: the other one is taken in by hand.
        async with (
            socket_over(tmp_path, executor, checks=Checks({}, ("/srv",))) as (target, table),
            connected(target, reconnect=0.0) as calls,
        ):
            await table_prepare(table, ALICE, Wanted("other", JOB, start=True))
            job = replace(JOB, steps=())
            await calls.call("Prepare", request_from(Wanted("own", job, start=True)), seconds=60)
            await table.wait(ROOT, "own", AttemptState.RUNNING)
            forbidden = request_from(Wanted("bad", JOB, source=f"/etc/{SECRET}"))
            with pytest.raises(InvalidRequest):
                await calls.call("Prepare", forbidden, seconds=60)
            step = wire.ExecRequest(attempt_id="own")
            step.step.CopyFrom(
                request_from(Wanted("x", Job(rootfs="host", steps=(Step("id", name="look"),)))).job.steps[0]
            )
            await calls.call("Exec", step, seconds=60)
            for attempt in ("own", "other"):
                await calls.call("Cancel", wire.CancelRequest(attempt_id=attempt, kill=True), seconds=60)
            await calls.call("Drain", wire.DrainRequest(drain=True), seconds=60)

    within(body())
    found = lines()
    by_event = {line["event"]: line for line in found}
    assert by_event["connected"]["uid"] == os.getuid()
    assert by_event["connected"]["pid"] == os.getpid()
    refused = by_event["refused"]
    assert (refused["call"], refused["field"], refused["attempt_id"]) == ("Prepare", "source", "bad")
    assert by_event["exec"]["step"] == "look"
    (cancelled,) = [line for line in found if line["event"] == "cancelled"]  # one's own is nobody's business
    assert (cancelled["attempt_id"], cancelled["owner_uid"], cancelled["uid"]) == ("other", ALICE.uid, os.getuid())
    assert "drain" in by_event
    assert SECRET not in json.dumps(found)


def test_a_refused_connection(lines: Any, tmp_path: Path) -> None:
    """By uid and pid, as the kernel has them."""

    async def body() -> None:
        nobody = Allowed(frozenset({os.getuid() + 1}), frozenset())
        async with (
            socket_over(tmp_path, FakeExecutor(), allowed=nobody) as (target, _),
            connected(target, reconnect=0.0) as calls,
        ):
            with pytest.raises(ForgeyardError):
                await calls.call("ListSandboxes", wire.ListSandboxesRequest(), seconds=60)

    within(body())
    refused = [line for line in lines() if line["event"] == "connection_refused"]
    assert refused
    assert (refused[0]["uid"], refused[0]["pid"], refused[0]["severity"]) == (os.getuid(), os.getpid(), "warning")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ended(result(outcome=Outcome.SANDBOX_VIOLATION, message="made a raw socket")), ["violation"]),
        (ended(result(notes=("cleanup: mount busy", "other"))), ["cleanup_failed"]),
        (ended(None, SandboxError(SandboxErrorKind.UNSUPPORTED_ISOLATION, "userns", "none here")), ["policy_refused"]),
        (ended(None, SandboxError(SandboxErrorKind.DEVICE_ATTACH_FAILED, "dev", "no")), ["helper_failed"]),
        (
            ended(
                None, ExecutorError.prepare(SandboxError(SandboxErrorKind.SECURITY_VIOLATION, "mounts", "not as asked"))
            ),
            ["violation"],
        ),
        (ended(None, InvalidRequest("image", "x", "no")), []),
        (ended(result()), []),
    ],
)
def test_ends_that_are_security_events(lines: Any, event: Any, expected: list[str]) -> None:
    """Section 262: violations, failures of what holds privileges, refused downgrades; an ordinary end is none."""
    Auditor().saw(event, {})
    found = lines()
    assert events(found) == expected
    assert all(line["attempt_id"] == "attempt-1" and line["sandbox"] == "01SANDBOX" for line in found)


def test_ends_are_recorded_beside_the_attempts(lines: Any, tmp_path: Path) -> None:
    """From the table's own events, the last of them too when the server ends at once."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: FakeRun(outcome=Outcome.SANDBOX_VIOLATION))
        async with table_over(tmp_path, executor) as table, followed(table.events_hub, [Auditor()]):
            await table_prepare(table, ALICE, Wanted("a", JOB, start=True))
            await table.wait(ALICE, "a")

    within(body())
    assert "violation" in events(lines())


def test_what_runtimes_refuse_at_the_gate(lines: Any, tmp_path: Path) -> None:
    """Records of theirs become events; a keeper records those alone."""
    only = tmp_path / "gate.jsonl"
    with auditing(str(only), gate_only=True):
        audit.record(audit.Event.EXEC, "somebody runs something")
        logging.getLogger("forgeyard.audit").error("job at docker: a mount is missing", extra={"container": "c-1"})
    (line,) = [json.loads(text) for text in only.read_text().splitlines()]
    assert (line["event"], line["container"], line["message"]) == (
        "gate_refused",
        "c-1",
        "job at docker: a mount is missing",
    )
    assert events(lines()) == ["exec", "gate_refused"]


def test_the_file(tmp_path: Path) -> None:
    """Mode 0600 whatever it was, only ever appended to, and begun anew when it was moved away."""
    path = tmp_path / "audit.jsonl"
    path.write_text("before\n")
    path.chmod(0o644)
    sink = FileSink(path)
    sink.write([AuditLine("one", "e", False), AuditLine("two", "e", False)])
    assert path.read_text() == "before\none\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.rename(tmp_path / "old")
    sink.write([AuditLine("three", "e", False)])
    assert path.read_text() == "three\n"
    path.unlink()
    sink.write([AuditLine("four", "e", False)])
    assert path.read_text() == "four\n"
    sink.close()
    sink.close()


@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "missing", "journald", "syslog"])
def test_a_sink_that_cannot_be_written_refuses_the_start(kind: str, tmp_path: Path) -> None:
    """In one line, with the cure; a link and a FIFO are no audit files."""
    path = tmp_path / "audit"
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "missing":
        path = tmp_path / "none" / "audit"
    elif Path("/run/systemd/journal/socket" if kind == "journald" else "/dev/log").exists():
        pytest.skip("this host has one")
    with pytest.raises(ExecutorError) as caught:
        open_sink(kind if kind in ("journald", "syslog") else str(path))
    assert caught.value.reason == "audit_sink"
    assert "serve.audit" in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()


def test_the_journal(tmp_path: Path) -> None:
    """One datagram of fields each; a newline in a value makes no field of its own; a restarted journal is found."""
    address = str(tmp_path / "journal")
    line = AuditLine('{"a": "x\\nPRIORITY=0"}\nPRIORITY=0', "prepared", True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(address)
        sink = JournalSink(address)
        sink.write([line])
        fields = journal_fields(journal.recv(1 << 16))
        assert fields == [
            ("MESSAGE", line.text),
            ("PRIORITY", "4"),
            ("SYSLOG_IDENTIFIER", "forgeyard-audit"),
            ("FORGEYARD_EVENT", "prepared"),
        ]
    os.unlink(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(address)
        sink.write([line])
        assert journal_fields(journal.recv(1 << 16)) == fields
    sink.close()


def journal_fields(data: bytes) -> list[tuple[str, str]]:
    """Fields with their lengths, as the journal reads them."""
    found = []
    while data:
        name, _, rest = data.partition(b"\n")
        size = int.from_bytes(rest[:8], "little")
        found.append((name.decode(), rest[8 : 8 + size].decode()))
        data = rest[8 + size + 1 :]
    return found


def test_syslog(tmp_path: Path) -> None:
    """A message of the authentication facility, with its severity; one that is gone is an error, never silence."""
    address = str(tmp_path / "log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(address)
        sink = SyslogSink(address)
        sink.write([AuditLine('{"event": "refused"}', "refused", True)])
        assert syslog.recv(1 << 16).rstrip(b"\0") == b'<84>forgeyard-audit: {"event": "refused"}'
    os.unlink(address)
    with pytest.raises(OSError):
        sink.write([AuditLine("{}", "e", False)])
    sink.close()


class Failing:
    """A sink whose disk is full until it is not."""

    def __init__(self) -> None:
        self.full = threading.Event()
        self.full.set()
        self.tried = threading.Event()
        self.taken: list[AuditLine] = []

    def write(self, lines: Sequence[AuditLine]) -> None:
        self.tried.set()
        if self.full.is_set():
            raise OSError(28, "No space left on device")
        self.taken += lines

    def close(self) -> None:
        """Nothing to give back."""


def test_a_sink_that_fails_is_loud_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is held up, nothing is lost within the bound, and what is lost beyond is counted and recorded."""
    sink = Failing()
    writer = AuditWriter(sink, "the sink", backlog=5)
    with caplog.at_level(logging.ERROR, "forgeyard.serve"):
        writer.emit(record("first"))
        assert sink.tried.wait(60)
        for number in range(8):
            writer.emit(record(str(number)))
        assert writer.lost == 3
        sink.full.clear()
        flushed(writer)
    writer.close()
    messages = [json.loads(line.text) for line in sink.taken]
    assert [line["message"] for line in messages] == ["first", *"01234", "security events were lost"]
    assert (messages[-1]["event"], messages[-1]["count"]) == ("audit_lost", 3)
    said = [entry.getMessage() for entry in caplog.records]
    assert [text for text in said if "No space left" in text] == [
        "security events can't be written to the sink: [Errno 28] No space left on device"
    ]


def record(message: str, **facts: Any) -> logging.LogRecord:
    """One of the audit's."""
    return logging.makeLogRecord(
        {"name": "forgeyard.audit", "msg": message, "levelno": logging.INFO, "audit": {"event": "exec", **facts}}
    )


def test_a_long_event_is_cut(tmp_path: Path) -> None:
    """To its plain facts: a caller can't fill the disk with one Prepare, nor hide behind its size."""
    path = tmp_path / "audit.jsonl"
    with auditing(str(path)) as writer:
        assert writer is not None
        writer.emit(record("much", uid=7, host_paths=[{"source": "/x" * 100}] * 1000, name="n" * 100_000))
    (text,) = path.read_text().splitlines()
    line = json.loads(text)
    assert len(text) < MAX_LINE
    assert (line["uid"], line["truncated"], "host_paths" in line) == (7, True, False)


def test_hostile_names_stay_in_their_line(lines: Any) -> None:
    """What a caller chose holds no newline in the file."""
    wanted = Wanted('x\n{"event": "drain"}\u2028\x1b[2J', JOB)
    audit.prepared(Caller(1, 1, 1), wanted)
    (line,) = lines()
    assert line["attempt_id"] == wanted.attempt_id
