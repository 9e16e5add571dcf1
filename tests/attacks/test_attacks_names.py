"""Names as a way out: tunnels, rebinding, other resolvers, and what a name opens. From inside of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from egress_host import RESOLVER, Attacked, EgressHost, as_user, attack, finished, service
from jobs import sh
from net_host import METADATA, NEAR, OTHER, PRIVATE, SERVER

from forgeyard_executor import Executor, ExecutorConfig, Job, Network
from forgeyard_model.config import NetworkConfig
from forgeyard_model.network import DestinationVerdict
from forgeyard_model.policy import NetworkDestination

pytestmark = pytest.mark.kernel

NOERROR, NXDOMAIN, REFUSED = 0, 3, 5
A, NS, TXT, AAAA, ANY = 1, 2, 16, 28, 255
ZONE = {
    "www.example.org": [f"60 IN A {SERVER}"],
    "deep.below.example.org": [f"60 IN A {OTHER}"],
    "same.example.net": [f"60 IN A {SERVER}"],
    "example.org": [f"60 IN A {OTHER}"],
    "wwwexample.org": [f"60 IN A {OTHER}"],
    "www.example.org.evil.example": [f"60 IN A {OTHER}"],
    "exact.example.com": [f"60 IN A {OTHER}"],
    "loop.example.org": ["60 IN A 127.0.0.1"],
    "inner.example.org": [f"60 IN A {PRIVATE}"],
    "meta.example.org": [f"60 IN A {METADATA}"],
    "host.example.org": [f"60 IN A {NEAR}"],
    "jobs.example.org": ["60 IN A 10.213.0.2"],
    "zero.example.org": ["60 IN A 0.0.0.0"],
    "alias.example.org": ["60 IN CNAME inside.corp.example.", f"inside.corp.example. 60 IN A {PRIVATE}"],
    "mixed.example.org": [f"60 IN A {PRIVATE}", f"60 IN A {OTHER}"],
    "text.example.org": ['60 IN TXT "secret orders"'],
}
WILDCARD = NetworkDestination(host="*.example.org", ports=(443,))
EXACT = NetworkDestination(host="exact.example.com", ports=(80,))
CONFIG = ExecutorConfig(network=NetworkConfig(fetch=(EXACT,)))
REBOUND = ("loop", "inner", "meta", "host", "jobs", "zero", "alias")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EgressHost]:
    """A host with an outside."""
    with closing(EgressHost(tmp_path)) as made:
        yield made
        made.wait_clean()


def asked_by(host: EgressHost, state: Path, network: Network, attacks: list[list[Any]], **job: Any) -> Attacked:
    """One job that attacks by names."""
    return Attacked(host, state, network, attacks, zone=ZONE, config=CONFIG, **job)


@pytest.mark.acceptance("Restricted egress blocks unauthorized destinations.")
def test_a_name_opens_its_address_and_port_once_it_was_asked(host: EgressHost, shared_state: Path) -> None:
    """Shut before the answer, open after it, on the port that the policy names and on no other; with its bytes."""
    head = "GET / HTTP/1.0\r\n\r\n"
    attacks = [
        ["tcp", SERVER, 443],
        ["dns", "GATEWAY", "www.example.org"],
        ["tcp", SERVER, 443, head],
        ["tcp", SERVER, 80],
        ["udp", SERVER, 53],
        ["tcp", OTHER, 80],
        ["lookup", "exact.example.com"],
        ["tcp", OTHER, 80, head],
        ["tcp", OTHER, 443],
    ]
    asked = asked_by(host, shared_state, Network.restricted(WILDCARD, EXACT), attacks)
    before, answer, first, port, datagram, other, exact, second, crossed = asked.answers
    assert (before, port, datagram, other, crossed) == (
        *("ECONNREFUSED", "ECONNREFUSED", "EHOSTUNREACH", "ECONNREFUSED", "ECONNREFUSED"),
    )
    assert (answer, exact) == ([NOERROR, [SERVER]], [OTHER])
    assert first.endswith("hello\n")
    assert second.endswith("hello\n")
    assert set(asked.outside.seen) == {("tcp", SERVER, 443), ("tcp", OTHER, 80)}
    row = asked.rows(DestinationVerdict.ALLOWED)[SERVER, 443]
    assert (row.name, row.count) == ("www.example.org", 1)
    assert row.bytes_sent > len(head)
    assert row.bytes_received > len("hello\n")
    refused = asked.rows(DestinationVerdict.REFUSED)
    assert set(refused) == {(SERVER, 443), (SERVER, 80), (SERVER, 53), (OTHER, 80), (OTHER, 443)}
    assert asked.named("answered") == {("www.example.org", "A"): 1, ("exact.example.com", "A"): 1}


def test_a_wildcard_covers_what_is_below_it(host: EgressHost, shared_state: Path) -> None:
    """Not its own top, not a name that ends or begins alike, and no other name of an address that is open."""
    allowed = ("www.example.org", "deep.below.example.org", "WWW.eXample.ORG", "www.example.org.")
    others = (
        "example.org",
        "wwwexample.org",
        "www.example.org.evil.example",
        "same.example.net",
        "org",
        "corp.example",
    )
    attacks = [["dns", "GATEWAY", name] for name in (*allowed, *others)] + [["lookup", name] for name in others]
    asked = asked_by(host, shared_state, Network.restricted(WILDCARD), attacks)
    assert [answer[0] for answer in asked.answers[:4]] == [NOERROR] * 4
    assert all(answer[1] for answer in asked.answers[:4])
    assert asked.answers[4:10] == [[NXDOMAIN, []]] * 6
    assert asked.answers[10:] == ["EAI_NONAME"] * 6
    assert {name for name, *_ in asked.dns.seen} == {"www.example.org", "deep.below.example.org"}
    assert {name for name, _ in asked.named("refused")} == set(others)
    assert all(count >= 2 for count in asked.named("refused").values())


def test_no_name_leads_inside(host: EgressHost, shared_state: Path) -> None:
    """Rebinding: an allowed name that leads to loopback, a private range, the host or other jobs has no address."""
    attacks = [["dns", "GATEWAY", f"{name}.example.org"] for name in REBOUND]
    attacks += [["dns", "GATEWAY", "mixed.example.org"]]
    where = (PRIVATE, METADATA, NEAR, "127.0.0.1", "10.213.0.2")
    attacks += [["tcp", address, 443] for address in where] + [["tcp", OTHER, 443]]
    asked = asked_by(host, shared_state, Network.restricted(WILDCARD), attacks)
    assert [answer[1] for answer in asked.answers[: len(REBOUND)]] == [[]] * len(REBOUND)
    assert asked.answers[len(REBOUND)] == [NOERROR, [OTHER]]
    assert asked.answers[len(REBOUND) + 1 :] == ["ECONNREFUSED"] * len(where) + ["ok"]
    assert {name for name, _ in asked.named("rebinding")} == {f"{name}.example.org" for name in (*REBOUND, "mixed")}
    assert set(asked.outside.seen) == {("tcp", OTHER, 443)}


def test_allow_has_no_rebinding_either(host: EgressHost, shared_state: Path) -> None:
    """Every outside name is asked for, and none leads inside."""
    attacks = [["dns", "GATEWAY", f"{name}.example.org"] for name in REBOUND]
    attacks += [["dns", "GATEWAY", "same.example.net"], ["dns", "GATEWAY", "www.example.org", AAAA]]
    asked = asked_by(host, shared_state, Network.allow(), attacks)
    *rebound, same, six = asked.answers
    assert [answer[1] for answer in rebound] == [[]] * len(REBOUND)
    assert (same, six) == ([NOERROR, [SERVER]], [NOERROR, []])


def tunnels() -> list[tuple[str, int]]:
    """Names and types that carry data out, or fetch it."""
    label = "a2d4" * 15 + "xyz"
    return [
        (f"{label}.{label}.{label}.evil.example", A),
        *((f"{number:08x}-chunk.evil.example", A) for number in range(20)),
        ("orders.evil.example", TXT),
        ("text.example.org", TXT),
        ("www.example.org", NS),
        ("www.example.org", ANY),
        (f"{label}.example.org", TXT),
        ("www.example.org", 251),
        ("x.evil.example", 65399),
    ]


@pytest.mark.parametrize("mode", ["deny", "fetch-only", "restricted"])
def test_tunnels_end_at_the_resolver(host: EgressHost, shared_state: Path, busybox_image: str, mode: str) -> None:
    """By UDP and TCP: refused at once, counted in the result, and never asked of anybody outside."""
    network = {"deny": Network.deny(), "fetch-only": Network.fetch_only(), "restricted": Network.restricted(WILDCARD)}
    attacks = [["dns", "GATEWAY", name, kind, way] for name, kind in tunnels() for way in ("udp", "tcp")]
    beside = (service(busybox_image),) if mode == "deny" else ()
    asked = asked_by(host, shared_state, network[mode], attacks, services=beside)
    assert {answer[0] for answer in asked.answers} <= {NXDOMAIN, REFUSED}
    assert asked.dns.seen == []
    assert asked.outside.seen == []
    refused = asked.named("refused")
    assert {name for name, _ in refused} == {name for name, _ in tunnels()}
    assert set(refused.values()) == {2}


def test_malformed_and_endless_questions_end_nothing(host: EgressHost, shared_state: Path) -> None:
    """Garbage, empty names and a connection that says nothing: the resolver answers the next question as ever."""
    attacks: list[list[Any]] = [
        ["tcp", "GATEWAY", 53, "\xff\xff" + "x" * 100],
        ["tcp", "GATEWAY", 53, "\x00\x00"],
        ["tcp", "GATEWAY", 53, "\x00\x02xx"],
        ["dns", "GATEWAY", "", TXT],
        ["dns", "GATEWAY", "\xff\xfe\x00.example.org"],
        ["dns", "GATEWAY", "www.example.org"],
    ]
    asked = asked_by(host, shared_state, Network.restricted(WILDCARD), attacks)
    assert asked.answers[-1] == [NOERROR, [SERVER]]
    assert {name for name, *_ in asked.dns.seen} == {"www.example.org"}


@pytest.mark.parametrize("text", ["nameserver 127.0.0.53\n", "", "nameserver fe80::1\n", None])
def test_a_host_without_a_server_says_so(host: EgressHost, shared_state: Path, text: str | None) -> None:
    """C16: jobs are never given the host's own server, nor one that nobody named; a lookup ends at once."""
    if text is None:
        host.resolv_conf.unlink()
        host.resolv_conf.symlink_to("nowhere")
    else:
        host.resolv_conf.write_text(text)
    attacks = [["read", "/etc/resolv.conf"], ["lookup", "www.example.org"], ["lookup", "localhost"]]
    asked = asked_by(host, shared_state, Network.restricted(WILDCARD), attacks)
    assert asked.answers[0].split()[:2] == ["nameserver", asked.gateway]
    assert RESOLVER not in asked.answers[0]
    assert asked.answers[1] == "EAI_AGAIN"
    assert asked.result.network is not None
    notes = " ".join(asked.result.network.notes)
    assert ("no usable name server" in notes) is (text is None or "127" not in text), notes


def test_a_stub_of_the_host_works(host: EgressHost, shared_state: Path) -> None:
    """C16: a server at 127.0.0.1 is of use, though the job could not reach it: the resolver asks it from the host."""
    attacks = [["lookup", "www.example.org"], ["dns", "127.0.0.1", "www.example.org"]]
    asked = asked_by(host, shared_state, Network.restricted(WILDCARD), attacks)
    assert asked.answers == [[SERVER], "ECONNREFUSED"]


def test_deny_with_services_looks_nothing_up(host: EgressHost, shared_state: Path, busybox_image: str) -> None:
    """C16: names of services work, others end at once; the host's servers are not asked, though they are there."""
    attacks = [["lookup", "web"], ["lookup", "www.example.org"], ["dns", "GATEWAY", "web"], ["tcp", "web", 80]]
    asked = asked_by(host, shared_state, Network.deny(), attacks, services=(service(busybox_image),))
    address = asked.result.services[0].address
    assert asked.answers == [[address], "EAI_NONAME", [NOERROR, [address]], "ok"]
    assert asked.dns.seen == []


def test_names_of_another_job_are_nobodys(host: EgressHost, shared_state: Path, busybox_image: str) -> None:
    """C02: two jobs at the same time, each with a service and a common name: each has its own and no other."""
    own = as_user(host.directory / "attack")
    attacks = [["lookup", name] for name in ("same", "left", "right")]

    async def main() -> list[tuple[str, list[Any]]]:
        async with Executor.open(shared_state, config=CONFIG) as executor:
            both = asyncio.Barrier(2)

            async def one(name: str) -> tuple[str, list[Any]]:
                job = Job(steps=(), services=(service(busybox_image, name, aliases=("same",)),), **own)
                async with executor.run(job) as execution:
                    await execution.exec(sh("true"))
                    await both.wait()
                    await execution.exec(attack(own, attacks))
                    await both.wait()
                    result, answers = await finished(execution)
                    return result.services[0].address, answers

            return await asyncio.gather(one("left"), one("right"))

    (left, from_left), (right, from_right) = host.play(main)
    assert left != right
    assert from_left == [[left], [left], "EAI_NONAME"]
    assert from_right == [[right], "EAI_NONAME", [right]]
