"""Ways out of a job's own network, tried from inside in every mode: each is refused at once, and nothing arrives."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attacks import HostFacts
from egress_host import (
    RESOLVER,
    EgressHost,
    advertise,
    as_root,
    as_user,
    attack,
    finished,
    names,
    rules,
    service,
    topology,
)
from jobs import sh
from net_attacker import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER, ETH_P_ALL, ETH_P_ARP, NETLINK_NETFILTER
from net_host import METADATA, NEAR, OTHER, PRIVATE, SERVER

from forgeyard_executor import Execution, ExecutionResult, Executor, ExecutorConfig, Job, Network, Outcome
from forgeyard_host.links import Links
from forgeyard_model.config import NetworkConfig
from forgeyard_model.network import DestinationVerdict
from forgeyard_model.policy import NetworkDestination
from forgeyard_networks.topology import BRIDGE

pytestmark = pytest.mark.kernel

WEB = NetworkDestination(cidr=f"{SERVER}/32", ports=(80,), protocols=("tcp",))
NETWORKS = {
    "deny": Network.deny(),
    "fetch-only": Network.fetch_only(),
    "restricted": Network.restricted(WEB),
    "allow": Network.allow(),
}
CONFIG = ExecutorConfig(network=NetworkConfig(fetch=(NetworkDestination(host="packages.example.org"),)))
TCP, UDP = "ECONNREFUSED", "EHOSTUNREACH"
"""What a refusal looks like: a reset, or an ICMP error."""
WITHIN = 20.0
"""Seconds for all attacks of one sandbox. One that ran into its own bound alone takes 5."""


@dataclass(frozen=True, slots=True)
class Around:
    """Addresses that an attacker knows: of its own network, and of two other jobs."""

    gateway: str
    inside: str
    near: str
    far: str
    neighbour: str
    neighbours_router: str
    open_neighbour: str

    @classmethod
    def of(cls, own: Execution, neighbour: Execution, open_neighbour: Execution) -> Around:
        """As they are on the host."""
        mine, other, third = topology(own).block, topology(neighbour).block, topology(open_neighbour).block
        return cls(
            str(mine.gateway),
            str(mine.inside.network_address),
            *map(str, mine.uplink),
            str(other.member(1)),
            str(other.gateway),
            str(third.member(1)),
        )


# By name: what is tried, how it is refused, and the row that the result then has. What may leave in a mode is below.
def packets(at: Around) -> dict[str, tuple[list[Any], str]]:
    """Attacks with packets that the router sees."""
    return {
        "a neighbour's service": (["tcp", at.neighbour, 80], TCP),
        "a neighbour's service by udp": (["udp", at.neighbour, 80], UDP),
        "a neighbour's resolver": (["tcp", at.neighbours_router, 53], TCP),
        "a neighbour's resolver by udp": (["udp", at.neighbours_router, 53], UDP),
        "a neighbour that may leave": (["tcp", at.open_neighbour, 80], TCP),
        "the router's own ports": (["tcp", at.gateway, 22], TCP),
        "the router by udp": (["udp", at.gateway, 9999], UDP),
        "the router's outer address": (["tcp", at.near, 53], TCP),
        "the host's end of the link": (["tcp", at.far, 8080], TCP),
        "the host by its address": (["tcp", NEAR, 8080], TCP),
        "cloud metadata": (["tcp", METADATA, 80], TCP),
        "a private address": (["tcp", PRIVATE, 80], TCP),
        "a private address by udp": (["udp", PRIVATE, 9999], UDP),
    }


def outward(at: Around) -> dict[str, tuple[list[Any], str]]:
    """Attacks on servers outside; in `allow` none is one, and in `restricted` the first is none."""
    del at
    return {
        "a web server": (["tcp", SERVER, 80, "GET / HTTP/1.0\r\n\r\n"], TCP),
        "another port": (["tcp", SERVER, 8080], TCP),
        "another address": (["tcp", OTHER, 443], TCP),
        "a datagram": (["udp", SERVER, 9999], UDP),
        "a resolver by tcp": (["dns", RESOLVER, "www.example.org", 1, "tcp"], TCP),
        "a resolver by udp": (["dns", RESOLVER, "www.example.org", 1, "udp"], UDP),
        "dns over https": (["tcp", RESOLVER, 443], TCP),
    }


LOCAL: dict[str, tuple[list[Any], object]] = {
    "the host's loopback": (["tcp", "127.0.0.1", 8081], TCP),
    "another loopback address": (["tcp", "127.0.0.53", 53], TCP),
    "everybody": (["shout", "255.255.255.255", 9999], "sent"),
    "ping": (["ping", SERVER], "EACCES"),
    "ipv6 outside": (["tcp", "2001:db8::1", 80], "ENETUNREACH"),
    "ipv6 unique local": (["tcp", "fd00::1", 80], "ENETUNREACH"),
    "ipv6 link-local": (["tcp", "fe80::1%eth0", 80], {"EINVAL", "EADDRNOTAVAIL"}),
    "ipv6 datagram": (["udp", "2001:4860:4860::8888", 53], "ENETUNREACH"),
    "ipv6 mapped": (["tcp", f"::ffff:{PRIVATE}", 80], TCP),
    "ipv6 all nodes": (["udp", "ff02::1%eth0", 9999], {"EINVAL", "EADDRNOTAVAIL"}),
    "ipv6 on a link": (["six"], [[]]),
    "another's source": (["tcp", SERVER, 80, "", "10.213.255.2"], {"EINVAL", "EADDRNOTAVAIL", "ENETUNREACH"}),
    "another's source by udp": (["udp", SERVER, 9999, NEAR], {"EINVAL", "EADDRNOTAVAIL", "ENETUNREACH"}),
    "a raw socket": (["make", "AF_INET", "SOCK_RAW", socket.IPPROTO_RAW], "EPERM"),
    "a raw icmp socket": (["make", "AF_INET", "SOCK_RAW", socket.IPPROTO_ICMP], "EPERM"),
    "a raw ipv6 socket": (["make", "AF_INET6", "SOCK_RAW", socket.IPPROTO_ICMPV6], "EPERM"),
    "a packet socket": (["make", "AF_PACKET", "SOCK_RAW", socket.htons(ETH_P_ALL)], {"EPERM", "EAFNOSUPPORT"}),
    "an arp socket": (["make", "AF_PACKET", "SOCK_DGRAM", socket.htons(ETH_P_ARP)], {"EPERM", "EAFNOSUPPORT"}),
    "a transparent socket": (["option", "transparent"], "EPERM"),
    "a packet mark": (["option", "mark"], "EPERM"),
}
_LINK_DOWN = struct.pack("=BxHiII", 0, 0, 2, 0, 1).hex()
_NO_LINK = struct.pack("=BxHiII", 0, 0, 2, 0, 0).hex()
_NO_ROUTE = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, 254, 0, 0, 1, 0).hex()
_ADDRESS = (struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, 2) + struct.pack("=HH4s", 8, 2, b"\x0a\xd5\xff\x02")).hex()
_BATCH = struct.pack("=BBH", 0, 0, socket.htons(10)).hex()
CHANGES: dict[str, tuple[list[Any], object]] = {
    "eth0 down": (["netlink", 0, 16, 0, _LINK_DOWN], "EPERM"),
    "eth0 gone": (["netlink", 0, 17, 0, _NO_LINK], "EPERM"),
    "no default route": (["netlink", 0, 25, 0, _NO_ROUTE], "EPERM"),
    "an address more": (["netlink", 0, 20, 0x400, _ADDRESS], "EPERM"),
    "nftables": (["netlink", NETLINK_NETFILTER, 0x10, 0, _BATCH], "EPERM"),
    "conntrack": (["netlink", NETLINK_NETFILTER, 0x102, 0, struct.pack("=BBH", 2, 0, 0).hex()], "EPERM"),
    "own namespaces": (["unshare", CLONE_NEWUSER | CLONE_NEWNET], "EPERM"),
    "an own network": (["unshare", CLONE_NEWNET], "EPERM"),
    "an own mount table": (["unshare", CLONE_NEWNS], "EPERM"),
    "into init's network": (["enter", "/proc/1/ns/net"], {"EPERM", "EACCES"}),
    "into its own network": (["enter", "/proc/self/ns/net"], "EPERM"),
    "forwarding": (["write", "/proc/sys/net/ipv4/ip_forward", "1"], {"EROFS", "EACCES"}),
    "ipv6 back": (["write", "/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "0"], {"EROFS", "EACCES"}),
    "own sources": (["write", "/proc/sys/net/ipv4/conf/all/rp_filter", "0"], {"EROFS", "EACCES"}),
    "pings": (["write", "/proc/sys/net/ipv4/ping_group_range", "0 65535"], {"EROFS", "EACCES"}),
    "the resolver": (["write", "/etc/resolv.conf", "nameserver 8.8.8.8"], {"EROFS", "EACCES"}),
    "the hosts": (["write", "/etc/hosts", f"{OTHER} web"], {"EROFS", "EACCES"}),
}
PROGRAMS = {
    "ip": ("ip", "link", "set", "eth0", "down"),
    "ip address": ("ip", "addr", "add", "10.213.255.2/24", "dev", "eth0"),
    "ip netns": ("ip", "link", "add", "x", "type", "veth"),
    "iptables": ("iptables-legacy", "-I", "OUTPUT", "-j", "ACCEPT"),
    "nft": ("nft", "add", "table", "ip", "x"),
}


def programs(prefix: str) -> dict[str, tuple[list[Any], object]]:
    """Administrator's tools of the host's /usr."""
    found = {}
    for name, (tool, *words) in PROGRAMS.items():
        found[name] = (["program", f"{prefix}/sbin/{tool}", *words], "exit")
    return found


class Tried:
    """What came of all attacks in one sandbox, and what the host and the outside saw of it."""

    def __init__(self, host: EgressHost, state: Path, mode: str, job: dict[str, Any], image: str) -> None:
        self.mode, self.image = mode, image
        self._host, self._job = host, job
        prefix = "/toolchains/host" if "image" in job else "/usr"
        self.fixed = {**LOCAL, **CHANGES, **programs(prefix)}
        self.facts = HostFacts.look()
        self.echoes = host.echoes()
        host.play(lambda: self._try(state))
        self.after = HostFacts.look()

    async def _try(self, state: Path) -> None:
        async with (
            Executor.open(state, config=CONFIG) as executor,
            self._host.serving() as self.outside,
            names({"www.example.org": [f"60 IN A {SERVER}"]}) as self.names,
            neighbour(executor, self.image, Network.deny()) as shut,
            neighbour(executor, self.image, Network.allow()) as ajar,
        ):
            beside = (service(self.image),) if self.mode == "deny" else ()
            job = Job(steps=(), network=NETWORKS[self.mode], services=beside, **self._job)
            async with executor.run(job) as execution:
                self.at = Around.of(execution, shut, ajar)
                self.packets, self.outward = packets(self.at), outward(self.at)
                asked = {name: words for name, (words, _) in self._all().items()}
                asked["sweep"] = ["sweep", self.at.inside, 9999]
                advertise(topology(execution).router, BRIDGE)
                self.before = self._look(execution)
                clock = asyncio.get_running_loop().time()
                await execution.exec(attack(self._job, list(asked.values())))
                self.seconds = asyncio.get_running_loop().time() - clock
                self.later = self._look(execution)
                self.result, answers = await finished(execution)
        assert self.result.outcome is Outcome.SUCCEEDED, self.result.message
        self.answers = dict(zip(asked, answers, strict=True))

    def _look(self, execution: Execution) -> tuple[object, ...]:
        """Links and rules of the attempt's router, of the job's namespace, and of the host. ARP comes and goes."""
        where = topology(execution)
        inner = Links.at(where.members[0].fd)
        states = [replace(links.dump(), neighbours=()) for links in (where.links, inner)]
        inner.close()
        return (*states, rules(where.router), rules(where.members[0]), self._host.rules())

    def _all(self) -> dict[str, tuple[list[Any], object]]:
        return {**self.packets, **self.outward, **self.fixed}

    def rows(self, verdict: DestinationVerdict) -> dict[tuple[str, int, str], Any]:
        """Of the result, by address, port and protocol."""
        assert self.result.network is not None
        found = self.result.network.destinations
        return {(row.address, row.port, row.protocol): row for row in found if row.verdict is verdict}


@asynccontextmanager
async def neighbour(executor: Executor, image: str, network: Network) -> AsyncIterator[Execution]:
    """Another job with a service, that waits until the attack is over."""
    job = Job(image=image, steps=(), network=network, services=(service(image),))
    async with executor.run(job) as execution:
        assert (await execution.exec(sh("true"))).exit is not None
        yield execution
        execution.finish()
        result = await execution.wait()
    assert result.outcome is Outcome.SUCCEEDED, result.message


MODES = [f"{mode}-user" for mode in NETWORKS] + ["deny-root", "restricted-root"]
NOWHERE = Around(*["192.0.2.1"] * 7)


@pytest.fixture(scope="module")
def sandboxes(
    shared_state: Path, tmp_path_factory: pytest.TempPathFactory, busybox_image: str
) -> Iterator[Callable[[str], Tried]]:
    """One sandbox per mode, made when first asked for: tests in random order would make a parametrised one anew."""
    host = EgressHost(tmp_path_factory.mktemp("host"))
    directory = tmp_path_factory.mktemp("tools", numbered=True) / "attack"
    jobs = {"user": lambda: as_user(directory), "root": lambda: as_root(directory, busybox_image)}

    def tried(name: str) -> Tried:
        mode, _, who = name.rpartition("-")
        return Tried(host, shared_state, mode, jobs[who](), busybox_image)

    with closing(host):
        yield cache(tried)
        host.wait_clean()


@pytest.fixture(params=MODES)
def tried(request: pytest.FixtureRequest, sandboxes: Callable[[str], Tried]) -> Tried:
    """All attacks in one sandbox of each mode."""
    return sandboxes(request.param)


def target(words: list[Any]) -> tuple[str, int, str]:
    """Address, port and protocol that an attack goes to."""
    verb, address, *rest = words
    return (address, 53, rest[2]) if verb == "dns" else (address, rest[0], verb)


@pytest.mark.acceptance("Network Deny blocks outbound network.")
@pytest.mark.parametrize("name", packets(NOWHERE))
def test_no_way_to_other_jobs_the_host_or_private_networks(tried: Tried, name: str) -> None:
    """Refused as it is tried, counted in the result, and nothing arrives; in no mode is there a way."""
    words, refusal = tried.packets[name]
    assert tried.answers[name] == refusal
    assert tried.rows(DestinationVerdict.REFUSED)[target(words)].count >= 1
    assert target(words) not in tried.rows(DestinationVerdict.ALLOWED)
    address, port, protocol = target(words)
    assert (protocol, address, port) not in tried.outside.seen


@pytest.mark.acceptance("Restricted egress blocks unauthorized destinations.")
@pytest.mark.parametrize("name", outward(NOWHERE))
def test_outside_is_what_the_policy_names(tried: Tried, name: str) -> None:
    """Section 277: the allowed host works, all others are blocked. What was let through has its bytes in the result."""
    words, refusal = tried.outward[name]
    address, port, protocol = target(words)
    open_ = tried.mode == "allow" or (tried.mode == "restricted" and name == "a web server")
    arrived = (protocol, address, port) in tried.outside.seen
    verdicts = [verdict for verdict in DestinationVerdict if target(words) in tried.rows(verdict)]
    if not open_:
        assert (tried.answers[name], arrived, verdicts) == (refusal, False, [DestinationVerdict.REFUSED])
        return
    assert tried.answers[name] not in (refusal, "timeout", UDP, TCP)
    assert (arrived, verdicts) == (True, [DestinationVerdict.ALLOWED])
    row = tried.rows(DestinationVerdict.ALLOWED)[target(words)]
    assert row.bytes_sent > 0
    assert row.bytes_received > 0


@pytest.mark.parametrize("name", [*LOCAL, *CHANGES, *PROGRAMS])
def test_nothing_can_be_forged_or_changed(tried: Tried, name: str) -> None:
    """Neither packets of other kinds, nor the network itself, also by root of the job's own user namespace."""
    expected, answer = tried.fixed[name][1], tried.answers[name]
    if expected == "exit":
        assert answer.startswith("exit "), answer
    else:
        assert answer in (expected if isinstance(expected, set | list) else {expected})


def test_the_network_is_as_it_was(tried: Tried) -> None:
    """Links, addresses and rules of the router, of the job's namespace and of the host; no ping got out, no shout."""
    assert tried.before == tried.later
    tried.facts.assert_unchanged(tried.after)
    assert tried._host.echoes() == tried.echoes
    assert {address for _, address, _ in tried.outside.seen} <= {SERVER, OTHER, RESOLVER}


def test_refusals_are_events(tried: Tried) -> None:
    """No attack waited for anything: none timed out, and all together took less than a few of their bounds."""
    assert "timeout" not in tried.answers.values()
    assert tried.seconds < WITHIN


def test_a_sweep_of_its_own_network_finds_its_own(tried: Tried) -> None:
    """ARP asks everybody in the subnet: only the attempt's own members can be there, and the router."""
    own = {tried.at.gateway, *(str(service.address) for service in tried.result.services)}
    assert tried.at.gateway in tried.answers["sweep"]
    assert set(tried.answers["sweep"]) <= own


def test_a_policy_that_names_a_neighbour_does_not_lead_there(
    shared_state: Path, tmp_path: Path, busybox_image: str
) -> None:
    """The router lets out what the policy names; the host keeps attempts apart all the same."""
    tools = as_user(tmp_path / "attack")

    async def main() -> tuple[ExecutionResult, list[Any]]:
        async with (
            Executor.open(shared_state, config=CONFIG) as executor,
            neighbour(executor, busybox_image, Network.allow()) as other,
        ):
            block = topology(other).block
            network = Network.restricted(NetworkDestination(cidr=str(block.inside)))
            attacks = [
                ["tcp", str(block.member(1)), 80],
                ["udp", str(block.member(1)), 80],
                ["tcp", str(block.gateway), 53],
            ]
            async with executor.run(Job(steps=(attack(tools, attacks),), network=network, **tools)) as execution:
                return await finished(execution)

    with closing(EgressHost(tmp_path)) as host:
        result, answers = host.play(main)
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert answers == [TCP, UDP, TCP]
