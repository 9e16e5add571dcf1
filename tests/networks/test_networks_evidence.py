"""Counting connections into a result, and a policy out of a result."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_host.netfilter import Flow, LoggedPacket
from forgeyard_model.errors import FailureClass, InvalidRequest
from forgeyard_model.jobfile import JobFile
from forgeyard_model.network import DestinationRecord, DestinationVerdict, NetworkEvidence
from forgeyard_model.policy import IsolationLevel, NetworkMode, NetworkPolicy
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.result import (
    EndCause,
    Evidence,
    ExecutionResult,
    Outcome,
    OutputSummary,
    Provenance,
    ResourceUsage,
)
from forgeyard_networks.evidence import Traffic, names_by_address
from forgeyard_networks.from_audit import sufficient_policy
from forgeyard_networks.resolver_audit import DnsRecord, DnsVerdict

INSIDE = IPv4Network("10.213.0.0/28")
JOB = "10.213.0.2"
SERVER = "203.0.113.2"
ALLOWED, REFUSED = DestinationVerdict.ALLOWED, DestinationVerdict.REFUSED


def packet(prefix: str, destination: str = SERVER, port: int = 443, protocol: str = "tcp") -> LoggedPacket:
    return LoggedPacket(prefix, protocol, JOB, destination, port)


def flow(destination: str = SERVER, port: int = 443, sent: int = 100, received: int = 200) -> Flow:
    return Flow("tcp", JOB, destination, port, 40000, sent, received)


def test_packets_and_flows_make_one_row_for_each_destination() -> None:
    """Counts are of connections, not of packets; bytes come with the flows; names from the resolver's answers."""
    traffic = Traffic(INSIDE)
    traffic.logged([packet("A0"), packet("A0"), packet("A0"), packet("R", port=22), packet("R", port=22)])
    traffic.ended([flow(), flow(sent=1, received=2)])
    names = names_by_address(
        [
            DnsRecord("a.example", "A", DnsVerdict.ANSWERED, (SERVER,), 1),
            DnsRecord("b.example", "A", DnsVerdict.ANSWERED, (SERVER, "192.0.2.1"), 3),
            DnsRecord("c.example", "A", DnsVerdict.REBINDING, (SERVER,), 1),
        ]
    )
    assert traffic.records(names) == (
        DestinationRecord("a.example", SERVER, 443, "tcp", ALLOWED, 2, 101, 202, ("a.example", "b.example")),
        DestinationRecord("a.example", SERVER, 22, "tcp", REFUSED, 2, 0, 0, ("a.example", "b.example")),
    )


def test_what_stays_inside_is_no_destination() -> None:
    """A question to the resolver and a probe of a service are no way out."""
    traffic = Traffic(INSIDE)
    traffic.ended([flow("10.213.0.1", 53), flow("10.213.0.3", 5432)])
    assert traffic.records({}) == ()


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=200))
def test_rows_are_bounded_and_nothing_goes_missing(events: list[tuple[int, bool]]) -> None:
    """Whatever comes: no more rows than the bound, and each event is in a row or in the count of those without."""
    traffic = Traffic(INSIDE, most=10)
    traffic.logged([packet("A" if allowed else "R", port=port) for port, allowed in events])
    rows = traffic.records({})
    assert len(rows) <= 10
    assert sum(row.count for row in rows) + traffic.truncated == len(events)


def test_a_copy_is_apart() -> None:
    """Looking at a running attempt changes nothing of it."""
    traffic = Traffic(INSIDE)
    traffic.ended([flow()])
    seen = traffic.copy()
    seen.ended([flow()])
    assert [row.count for row in traffic.records({})] == [1]


def evidence(*rows: DestinationRecord, audit: bool = True) -> NetworkEvidence:
    return NetworkEvidence(NetworkMode.ALLOW, "iptables-legacy", audit=audit, destinations=rows)


def row(
    address: str, port: int, protocol: str = "tcp", *names: str, verdict: DestinationVerdict = ALLOWED
) -> DestinationRecord:
    return DestinationRecord(next(iter(names), ""), address, port, protocol, verdict, 1, names=names)


def test_an_audit_becomes_the_policy_that_a_job_file_accepts() -> None:
    """Names where the resolver led there, addresses else, the ports that were used; the rest is said."""
    found = sufficient_policy(
        evidence(
            row(SERVER, 443, "tcp", "a.example", "b.example"),
            row(SERVER, 80, "tcp", "a.example"),
            row(SERVER, 443, "udp", "a.example"),
            row("198.51.100.7", 5432),
            row("198.51.100.7", 0, "icmp"),
            row("198.51.100.8", 53, "tcp"),
            row("198.51.100.8", 53, "udp"),
            row("198.51.100.9", 0, "132"),
            row("10.1.1.1", 22, verdict=REFUSED),
            row("198.51.100.10", 1, "tcp", "_odd._tcp.example"),
        )
    )
    network = yaml.safe_load(found.document())["network"]
    assert network["restricted"]["allow"] == [
        {"cidr": "198.51.100.10/32", "ports": [1], "protocols": ["tcp"]},
        {"cidr": "198.51.100.7/32", "protocols": ["icmp"]},
        {"cidr": "198.51.100.7/32", "ports": [5432], "protocols": ["tcp"]},
        {"cidr": "198.51.100.8/32", "ports": [53], "protocols": ["tcp", "udp"]},
        {"host": "a.example", "ports": [80, 443], "protocols": ["tcp"]},
        {"host": "a.example", "ports": [443], "protocols": ["udp"]},
        {"host": "b.example", "ports": [443], "protocols": ["tcp"]},
    ]
    assert [text for text in found.remarks if "10.1.1.1" in text]
    assert [text for text in found.remarks if "132" in text]
    JobFile.model_validate({"version": 1, "rootfs": "host", "steps": [{"run": "true"}], "network": network})


def test_a_job_that_reached_nothing_needs_nothing() -> None:
    """Deny would have sufficed."""
    found = sufficient_policy(evidence())
    assert found.policy == NetworkPolicy.deny()
    assert yaml.safe_load(found.document()) == {"network": "deny"}


def test_only_an_audit_tells_what_is_needed() -> None:
    """What a restricted job was refused may be what it needs."""
    with pytest.raises(InvalidRequest, match="audit"):
        sufficient_policy(evidence(row(SERVER, 443), audit=False))


def test_an_audit_with_missing_rows_says_so() -> None:
    """A policy that is not complete is not passed off as one."""
    found = sufficient_policy(replace(evidence(row(SERVER, 443)), truncated=3))
    assert "not complete" in found.document()


def test_the_command_prints_the_policy_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the file that --result wrote; a file that is none is refused with the cure."""
    from forgeyard_api.main import UnusableInput
    from forgeyard_api.policy_commands import from_audit
    from forgeyard_model.result_json import result_json

    path = tmp_path / "result.json"
    path.write_bytes(result_json(result_with(evidence(row(SERVER, 443, "tcp", "a.example")))))
    assert from_audit(path) == 0
    assert yaml.safe_load(capsys.readouterr().out)["network"]["restricted"]["allow"] == [
        {"host": "a.example", "ports": [443], "protocols": ["tcp"]}
    ]
    for wrong in (b"{}", result_json(result_with(None))):
        path.write_bytes(wrong)
        with pytest.raises(UnusableInput):
            from_audit(path)
    with pytest.raises(UnusableInput):
        from_audit(tmp_path / "absent")


def result_with(network: NetworkEvidence | None) -> ExecutionResult:
    """A result of a job that did nothing else."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return ExecutionResult(
        sandbox_id="01j0000000000000000000000a",
        attempt_id="a",
        name="job",
        outcome=Outcome.SUCCEEDED,
        failure_class=FailureClass.NONE,
        exit_code=0,
        message="",
        end_cause=EndCause.EXITED,
        cancellation=None,
        exit=None,
        steps=(),
        started_at=now,
        finished_at=now,
        evidence=Evidence(),
        usage=ResourceUsage(),
        output=OutputSummary(),
        outputs=(),
        provenance=Provenance(
            ExecutionProfile.STANDARD_CI, IsolationLevel.NAMESPACE, True, NetworkMode.ALLOW, "s", "runc", "r", "p", "b"
        ),
        network=network,
    )
