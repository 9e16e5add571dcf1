"""The resolver of a job's network, asked over real sockets in a namespace; its upstream is a server of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import wraps
from ipaddress import IPv4Address
from typing import ParamSpec

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import fake_dns
import pytest
from dns_clients import DB, JOB, addresses, resolving
from fake_dns import Zone

from forgeyard_host.netfilter import Flow
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.policy import NetworkDestination, NetworkMode
from forgeyard_networks.resolver_audit import DnsRecord, DnsVerdict
from forgeyard_networks.resolver_upstream import Upstream, UpstreamLimits

pytestmark = pytest.mark.kernel
P = ParamSpec("P")
WILD = NetworkDestination("*.example.org", ports=(443,))
APEX = NetworkDestination("example.org")
QUICK = UpstreamLimits(attempt=0.2, total=0.7)


def loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test in an event loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class World(AsyncExitStack):
    """A zone and the upstream that serves it."""

    async def __aenter__(self) -> World:
        self.zone = Zone()
        self.server = await fake_dns.start(self.zone)
        self.callback(self.server.close)
        self.upstream = Upstream(("127.0.0.1",), port=self.server.port, limits=QUICK)
        return self


def refused(message: dns.message.Message) -> bool:
    """With nothing in it, and the reason (RFC 8914: Prohibited); by a code that every C library takes for an end."""
    kind = message.question[0].rdtype.name
    code = dns.rcode.NXDOMAIN if kind in ("A", "AAAA", "PTR") else dns.rcode.REFUSED
    return message.rcode() == code and not message.answer and reasons(message) == [18]


def reasons(message: dns.message.Message) -> list[int]:
    """The extended errors."""
    return [int(option.code) for option in message.options if isinstance(option, dns.edns.EDEOption)]


@pytest.mark.parametrize("mode", [NetworkMode.DENY, NetworkMode.FETCH_ONLY, NetworkMode.RESTRICTED, NetworkMode.ALLOW])
@loop
async def test_members_are_found_in_every_mode(mode: NetworkMode) -> None:
    """By name, alias and host name, in any case and with the last dot, by UDP and TCP, and back from their address."""
    async with resolving(mode) as kit:
        for name, address in (("db", DB), ("Postgres", DB), ("SANDBOX-1.", JOB), ("localhost", "127.0.0.1")):
            found = await kit.ask(name)
            assert addresses(found) == [str(address)]
            assert 0 < found.answer[0].ttl <= 60
        assert addresses(await kit.ask_tcp("db")) == [str(DB)]
        back = await kit.ask("3.0.213.10.in-addr.arpa", "PTR")
        assert back.answer[0][0].to_text() == "db."
        assert not (await kit.ask("9.0.213.10.in-addr.arpa", "PTR")).answer
        assert not (await kit.ask("nobody")).answer


@loop
async def test_the_mix_of_cases_comes_back() -> None:
    """A client that checks it (0x20) accepts the answer."""
    async with resolving(NetworkMode.DENY) as kit:
        found = await kit.ask("dB")
        assert found.question[0].name.labels[0] == b"dB"
        assert found.answer[0].name.labels[0] == b"dB"


@loop
async def test_other_types_of_a_member_are_empty() -> None:
    """There is no IPv6, but the name exists: a C library must not take it for missing."""
    async with resolving(NetworkMode.DENY) as kit:
        for kind in ("AAAA", "MX", "TXT", "ANY"):
            found = await kit.ask("db", kind)
            assert found.rcode() == dns.rcode.NOERROR
            assert not found.answer


@pytest.mark.parametrize("mode", [NetworkMode.DENY, NetworkMode.FETCH_ONLY])
@loop
async def test_without_a_way_out_nothing_is_asked_upstream(mode: NetworkMode) -> None:
    """Not even a name that destinations cover."""
    async with World() as world, resolving(mode, WILD, upstream=world.upstream) as kit:
        assert refused(await kit.ask("www.example.org"))
        assert refused(await kit.ask("www.example.org", "AAAA"))
        assert world.server.seen == []
        assert kit.resolver.records() == (
            DnsRecord("www.example.org", "A", DnsVerdict.REFUSED, (), 1),
            DnsRecord("www.example.org", "AAAA", DnsVerdict.REFUSED, (), 1),
        )


@loop
async def test_a_restricted_job_gets_allowed_names_and_their_addresses_open_first() -> None:
    """When the answer arrives the address is open, for five minutes at least."""
    order: list[str] = []

    async def slow(index: int, address: IPv4Address, seconds: int) -> None:
        await asyncio.sleep(0)
        order.append(f"open {index} {address} {seconds}")

    async with World() as world:
        world.zone.add("www.example.org", "60 IN A 203.0.113.5", "60 IN A 203.0.113.6")
        both = (APEX, WILD, NetworkDestination("www.example.org", ports=(80,)))
        async with resolving(NetworkMode.RESTRICTED, *both, upstream=world.upstream, open_address=slow) as kit:
            found = await kit.ask("WWW.example.org")
            order.append("answer")
            assert addresses(found) == ["203.0.113.5", "203.0.113.6"]
            assert found.answer[0].ttl == 60
            assert sorted(order[:-1]) == [
                "open 1 203.0.113.5 300",
                "open 1 203.0.113.6 300",
                "open 2 203.0.113.5 300",
                "open 2 203.0.113.6 300",
            ]
            assert order[-1] == "answer"
            assert refused(await kit.ask("other.net"))
            assert world.server.asked("other.net") == 0


@pytest.mark.parametrize(
    ("ttl", "seconds", "passed"), [(0, 300, 0), (300, 300, 290), (3600, 3600, 3590), (604800, 86400, 86390)]
)
@loop
async def test_an_address_stays_open_longer_than_its_answer(ttl: int, seconds: int, passed: int) -> None:
    """A TTL of nothing still gives five minutes; a week is cut to a day."""
    async with World() as world:
        world.zone.add("example.org", f"{ttl} IN A 203.0.113.5")
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            assert (await kit.ask("example.org")).answer[0].ttl == passed
            assert kit.opened == [(0, "203.0.113.5", seconds)]


@loop
async def test_a_chain_of_names_is_passed_on() -> None:
    """With the least of its TTLs; only the name that was asked has to be allowed."""
    async with World() as world:
        world.zone.add(
            "example.org",
            "600 IN CNAME edge.cdn.example.",
            "edge.cdn.example. 20 IN CNAME eu.edge.cdn.example.",
            "eu.edge.cdn.example. 900 IN A 203.0.113.9",
        )
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            found = await kit.ask("example.org")
            assert [(part.name.to_text(), part.rdtype.name, part.ttl) for part in found.answer] == [
                ("example.org.", "CNAME", 20),
                ("edge.cdn.example.", "CNAME", 20),
                ("eu.edge.cdn.example.", "A", 20),
            ]
            assert kit.opened == [(0, "203.0.113.9", 300)]


@loop
async def test_a_loop_of_names_is_a_failure() -> None:
    """Nothing opens, and nothing spins."""
    async with World() as world:
        world.zone.add("example.org", "60 IN CNAME b.example.org.", "b.example.org. 60 IN CNAME example.org.")
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            assert (await kit.ask("example.org")).rcode() == dns.rcode.SERVFAIL
            assert kit.opened == []


@pytest.mark.parametrize("kind", ["TXT", "MX", "SRV", "HTTPS", "SVCB", "ANY", "AXFR", "NULL", "CNAME", "TYPE65280"])
@loop
async def test_a_restricted_job_gets_addresses_alone(kind: str) -> None:
    """Other records carry data: a tunnel for who controls a name below a wildcard."""
    async with World() as world, resolving(NetworkMode.RESTRICTED, WILD, upstream=world.upstream) as kit:
        assert refused(await kit.ask("a.example.org", kind))
        assert world.server.seen == []


@loop
async def test_ipv6_addresses_are_empty_without_asking() -> None:
    """The name may exist, so it is no refusal."""
    async with World() as world, resolving(NetworkMode.RESTRICTED, WILD, upstream=world.upstream) as kit:
        found = await kit.ask("a.example.org", "AAAA")
        assert found.rcode() == dns.rcode.NOERROR
        assert not found.answer
        assert world.server.seen == []


@loop
async def test_allow_passes_other_types_on_but_no_transfers() -> None:
    """MX, TXT and SRV are how some tools find things."""
    async with World() as world:
        world.zone.add("x.test", "60 IN MX 10 mail.x.test.", '60 IN TXT "a b"')
        async with resolving(NetworkMode.ALLOW, upstream=world.upstream) as kit:
            mail = await kit.ask("X.test", "MX")
            assert [str(part).lower() for part in mail.answer] == ["x.test. 60 in mx 10 mail.x.test."]
            text = await kit.ask("x.test", "TXT")
            assert text.answer[0][0].strings == (b"a b",)
            assert (await kit.ask("missing.test")).rcode() == dns.rcode.NXDOMAIN
            for kind in ("ANY", "AXFR", "IXFR"):
                assert refused(await kit.ask("x.test", kind))
            assert kit.opened == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "10.213.0.3",
        "172.16.9.9",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "0.0.0.0",
    ],
)
@pytest.mark.parametrize("mode", [NetworkMode.RESTRICTED, NetworkMode.ALLOW])
@loop
async def test_an_outside_name_leads_to_no_inside_address(mode: NetworkMode, address: str) -> None:
    """Rebinding: filtered, recorded as what it is, and not opened."""
    async with World() as world:
        world.zone.add("example.org", f"60 IN A {address}")
        async with resolving(mode, APEX, upstream=world.upstream) as kit:
            found = await kit.ask("example.org")
            assert (found.rcode(), found.answer, reasons(found)) == (dns.rcode.NOERROR, [], [17])
            assert kit.opened == []
            assert kit.resolver.records() == (DnsRecord("example.org", "A", DnsVerdict.REBINDING, (address,), 1),)


@loop
async def test_inside_addresses_are_removed_from_a_mixed_answer() -> None:
    """Unless a CIDR names them."""
    async with World() as world:
        world.zone.add("example.org", "60 IN A 10.1.2.3", "60 IN A 203.0.113.5", "60 IN A 10.9.9.9")
        named = NetworkDestination(cidr="10.1.0.0/16")
        async with resolving(NetworkMode.RESTRICTED, APEX, named, upstream=world.upstream) as kit:
            assert addresses(await kit.ask("example.org")) == ["10.1.2.3", "203.0.113.5"]
            verdicts = {record.verdict: record.addresses for record in kit.resolver.records()}
            assert verdicts[DnsVerdict.REBINDING] == ("10.9.9.9",)
            assert [address for _, address, _ in kit.opened] == ["10.1.2.3", "203.0.113.5"]


@loop
async def test_a_member_hides_an_outside_name() -> None:
    """A service may stand in for a real host."""
    async with World() as world:
        world.zone.add("api.example.org", "60 IN A 203.0.113.5")
        names = {"api.example.org": DB}
        async with resolving(NetworkMode.ALLOW, upstream=world.upstream, names=names) as kit:
            assert addresses(await kit.ask("api.example.org")) == [str(DB)]
            assert world.server.seen == []


@pytest.mark.parametrize("behaviour", ["wrong-id", "garbage", "wrong-question", "only-wrong"])
@loop
async def test_forged_answers_are_not_taken(behaviour: str) -> None:
    """The right one that follows is; after many wrong ones TCP decides."""
    async with World() as world:
        world.zone.add("example.org", "60 IN A 203.0.113.5")
        world.zone.behaviours["example.org"] = behaviour
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            assert addresses(await kit.ask("example.org")) == ["203.0.113.5"]
            assert ("tcp" in {item[2] for item in world.server.seen}) is (behaviour == "only-wrong")


@loop
async def test_ports_and_ids_of_questions_upstream_vary() -> None:
    """Nobody can guess them."""
    async with World() as world:
        world.zone.add("example.org", "60 IN A 203.0.113.5")
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            for _ in range(20):
                await kit.ask("example.org")
        assert len({item[3] for item in world.server.seen}) > 15
        assert len({item[4] for item in world.server.seen}) > 15


@loop
async def test_a_truncated_answer_is_fetched_by_tcp_and_truncated_for_udp_clients() -> None:
    """40 addresses fit into EDNS's 1232 bytes and not into 512; by TCP all come."""
    async with World() as world:
        world.zone.add("example.org", *(f"60 IN A 203.0.113.{number}" for number in range(1, 41)))
        world.zone.behaviours["example.org"] = "truncate"
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            assert len(addresses(await kit.ask("example.org"))) == 40
            plain = await kit.ask("example.org", edns=False)
            assert plain.flags & dns.flags.TC
            assert not plain.answer
            assert len(addresses(await kit.ask_tcp("example.org"))) == 40
            assert len(set(kit.opened)) == 40


@loop
async def test_a_silent_server_costs_a_bounded_time_and_the_next_is_asked() -> None:
    """And from then on first."""
    async with World() as world:
        world.zone.add("example.org", "60 IN A 203.0.113.5")
        silent = await fake_dns.start(Zone(behaviours={"example.org": "silent"}), "127.0.0.2", port=world.server.port)
        world.callback(silent.close)
        upstream = Upstream(("127.0.0.2", "127.0.0.1"), port=world.server.port, limits=QUICK)
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=upstream) as kit:
            assert addresses(await kit.ask("example.org")) == ["203.0.113.5"]
            assert addresses(await kit.ask("example.org")) == ["203.0.113.5"]
            assert silent.asked("example.org") == 1


@pytest.mark.parametrize("behaviour", ["silent", "servfail"])
@loop
async def test_a_server_that_fails_is_a_failure_that_says_so(behaviour: str) -> None:
    """Never a missing name."""
    async with World() as world:
        world.zone.behaviours["example.org"] = behaviour
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream) as kit:
            assert (await kit.ask("example.org")).rcode() == dns.rcode.SERVFAIL
            assert kit.resolver.stats.verdicts[DnsVerdict.FAILED] == 1
            assert "127.0.0.1" in kit.resolver.problem


@loop
async def test_a_server_that_is_not_there_fails_at_once() -> None:
    """The kernel says so; no time-out is waited for."""
    async with World() as world:
        upstream = Upstream(("127.0.0.1",), port=world.server.port)
        world.server.close()
        await asyncio.sleep(0)
        async with asyncio.timeout(5), resolving(NetworkMode.ALLOW, upstream=upstream) as kit:
            assert (await kit.ask("example.org")).rcode() == dns.rcode.SERVFAIL
            assert "refused" in kit.resolver.problem.lower()


@loop
async def test_a_host_without_servers_fails_at_once_with_the_reason() -> None:
    """Members are found all the same."""
    async with resolving(NetworkMode.ALLOW, upstream=Upstream((), problem="nothing in resolv.conf")) as kit:
        assert (await kit.ask("example.org")).rcode() == dns.rcode.SERVFAIL
        assert kit.resolver.problem == "example.org: nothing in resolv.conf"
        assert addresses(await kit.ask("db")) == [str(DB)]


@loop
async def test_an_address_that_cannot_be_opened_ends_the_resolver() -> None:
    """A rule that can't be set ends the attempt: nobody gets an answer that does not hold."""

    async def broken(index: int, address: IPv4Address, seconds: int) -> None:
        raise SandboxError(SandboxErrorKind.NETWORK_SETUP_FAILED, "netfilter", f"no {index} {address} {seconds}")

    async with World() as world:
        world.zone.add("example.org", "60 IN A 203.0.113.5")
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream, open_address=broken) as kit:
            client = kit.client()
            client.send(dns.message.make_query("example.org", "A").to_wire())
            with pytest.raises(SandboxError, match="no 0"):
                await asyncio.wait_for(kit.resolver.failed, 5)
            client.send(b"is anybody there")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 512), 5)


@loop
async def test_a_defect_is_seen_through_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the attempt learns of it."""
    async with resolving(NetworkMode.DENY) as kit:
        monkeypatch.setattr(kit.resolver._answers, "known", lambda question: 1 / 0)
        kit.client().send(dns.message.make_query("db", "A").to_wire())
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(kit.resolver.failed, 5)


@loop
async def test_addresses_in_use_are_renewed() -> None:
    """Those with a connection, when they would end within five minutes; no others."""
    async with World() as world:
        world.zone.add("a.example.org", "60 IN A 203.0.113.5")
        world.zone.add("b.example.org", "60 IN A 203.0.113.6")
        world.zone.add("c.example.org", "9000 IN A 203.0.113.7")
        async with resolving(NetworkMode.RESTRICTED, WILD, upstream=world.upstream) as kit:
            for name in "abc":
                await kit.ask(f"{name}.example.org")
            kit.opened.clear()
            live = [
                Flow("tcp", str(JOB), address, 443, 40000, 1, 1)
                for address in ("203.0.113.5", "203.0.113.7", "8.8.8.8")
            ]
            assert await kit.resolver.renew(live) == 1
            assert kit.opened == [(0, "203.0.113.5", 300)]
            assert await kit.resolver.renew([]) == 0


@loop
async def test_records_add_up() -> None:
    """Per name, type and verdict; the first of each is told as it comes."""
    told: list[DnsRecord] = []
    async with World() as world:
        world.zone.add("example.org", "60 IN A 203.0.113.5")
        async with resolving(NetworkMode.RESTRICTED, APEX, upstream=world.upstream, audit=told.append) as kit:
            for _ in range(3):
                await kit.ask("example.org")
            await kit.ask("EVIL.net", "TXT")
            assert kit.resolver.records() == (
                DnsRecord("example.org", "A", DnsVerdict.ANSWERED, ("203.0.113.5",), 3),
                DnsRecord("evil.net", "TXT", DnsVerdict.REFUSED, (), 1),
            )
            assert [(record.name, record.count) for record in told] == [("example.org", 1), ("evil.net", 1)]


@loop
async def test_it_ends_with_questions_open() -> None:
    """No task and no socket stays; a second close is fine. `resolving` checks the tasks."""
    async with World() as world:
        world.zone.behaviours["example.org"] = "silent"
        async with resolving(NetworkMode.ALLOW, upstream=world.upstream) as kit:
            reader, writer = await kit.tcp()
            kit.client().send(dns.message.make_query("example.org", "A").to_wire())
            while not world.server.seen:
                await asyncio.sleep(0)
            await kit.resolver.close()
            assert await reader.read() == b""
            writer.transport.abort()
            await kit.resolver.close()
            assert kit.resolver.failed.cancelled()
