"""What a router lets through, tried with real peers, for every backend."""

from __future__ import annotations

import errno
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from router_peers import RANGE, SERVER, WAIT, Peers, ask_udp, connect, forged, gateway, logged, ping

from forgeyard_host.links import Links
from forgeyard_host.netfilter import PacketLog
from forgeyard_host.netns import in_namespace, set_sysctls
from forgeyard_networks.firewall.backend import Backend
from forgeyard_networks.firewall.hub import (
    NO_UPLINK_ROUTE,
    HubDestination,
    HubMode,
    HubPolicy,
    install_hub,
    prepare_hub,
)
from forgeyard_networks.firewall.iptables import IptablesBackend
from forgeyard_networks.firewall.nft import NftBackend
from forgeyard_networks.ranges import PRIVATE_NETWORKS

pytestmark = pytest.mark.kernel

BACKENDS = (IptablesBackend("legacy"), NftBackend(), IptablesBackend("nft"))
NAMED = "10.9.0.2"
PRIVATE = "192.168.7.7"
OTHER = "198.51.100.5"
METADATA = "169.254.169.254"


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param
    return made


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path, also=(NAMED, PRIVATE, OTHER, METADATA))
    yield made
    made.close()


def restricted(*destinations: HubDestination, audit: bool = False) -> HubPolicy:
    return HubPolicy(HubMode.RESTRICTED, destinations, blocked=(*PRIVATE_NETWORKS, RANGE), audit=audit)


def test_a_restricted_router_lets_out_what_is_named_and_refuses_the_rest_at_once(
    peers: Peers, backend: Backend
) -> None:
    """Address, port and protocol must be as named; everything else is answered with an error, never with silence."""
    peers.tcp(peers.outside, "0.0.0.0", 443)
    peers.tcp(peers.outside, "0.0.0.0", 80)
    server = peers.udp(peers.outside, "0.0.0.0", 443)
    attempt = peers.attempt()
    job = attempt.members[0]
    web = HubDestination(0, (IPv4Network(f"{SERVER}/32"), IPv4Network("10.9.0.0/16")), ports=(443,))
    install_hub(backend, attempt.router.fd, restricted(web), attempt.block)

    assert connect(job, SERVER, 443) == "ok"
    assert connect(job, NAMED, 443) == "ok"
    assert ask_udp(job, SERVER, 443, server) == "ok"
    assert connect(job, SERVER, 80) == "ECONNREFUSED"
    assert connect(job, OTHER, 443) == "ECONNREFUSED"
    assert connect(job, PRIVATE, 443) == "ECONNREFUSED"
    assert connect(job, METADATA, 443) == "ECONNREFUSED"
    assert ask_udp(job, OTHER, 443, server) == "EHOSTUNREACH"
    assert ping(job, SERVER) == "prohibited"


def test_an_open_router_keeps_private_addresses_closed(peers: Peers, backend: Backend) -> None:
    """`allow` reaches the outside by any protocol, but neither private ranges nor link-local ones."""
    peers.tcp(peers.outside, "0.0.0.0", 1234)
    attempt = peers.attempt()
    job = attempt.members[0]
    install_hub(backend, attempt.router.fd, HubPolicy(HubMode.ALLOW), attempt.block)

    assert connect(job, OTHER, 1234) == "ok"
    assert ping(job, SERVER) == "ok"
    assert [connect(job, address, 1234) for address in (NAMED, PRIVATE, METADATA)] == ["ECONNREFUSED"] * 3
    assert ping(job, PRIVATE) == "prohibited"


def test_a_set_opens_an_address_but_no_private_one(peers: Peers, backend: Backend) -> None:
    """An address is reachable from the moment it is in its destination's set; a private one stays closed even there."""
    peers.tcp(peers.outside, "0.0.0.0", 443)
    attempt = peers.attempt()
    job = attempt.members[0]
    install_hub(backend, attempt.router.fd, restricted(HubDestination(3, set_name="h3", ports=(443,))), attempt.block)
    sets = backend.sets_in(attempt.router.fd)

    assert connect(job, OTHER, 443) == "ECONNREFUSED"
    sets.add("h3", IPv4Address(OTHER), 300)
    sets.add("h3", IPv4Address(OTHER), 600)
    sets.add("h3", IPv4Address(PRIVATE), 300)
    sets.close()
    assert connect(job, OTHER, 443) == "ok"
    assert connect(job, OTHER, 80) == "ECONNREFUSED"
    assert connect(job, PRIVATE, 443) == "ECONNREFUSED"


def test_each_decision_is_logged_with_its_destination(peers: Peers, backend: Backend) -> None:
    """A new connection is logged once, with the index of what allowed it, or as refused; its other packets are not."""
    peers.tcp(peers.outside, "0.0.0.0", 443)
    attempt = peers.attempt()
    job = attempt.members[0]
    install_hub(
        backend, attempt.router.fd, restricted(HubDestination(7, (IPv4Network(f"{SERVER}/32"),))), attempt.block
    )
    log = PacketLog(attempt.router.fd)

    connect(job, SERVER, 443)
    connect(job, OTHER, 22)
    ask_udp(job, OTHER, 53)
    found = logged(log, 3)
    log.close()
    assert [(item.prefix, item.destination, item.protocol, item.port) for item in found] == [
        ("A7", SERVER, "tcp", 443),
        ("R", OTHER, "tcp", 22),
        ("R", OTHER, "udp", 53),
    ]


def test_audit_lets_through_and_logs(peers: Peers, backend: Backend) -> None:
    """With audit a restricted router behaves as an open one, and its log tells named destinations from others."""
    peers.tcp(peers.outside, "0.0.0.0", 443)
    attempt = peers.attempt()
    job = attempt.members[0]
    policy = restricted(HubDestination(0, (IPv4Network(f"{SERVER}/32"),)), audit=True)
    install_hub(backend, attempt.router.fd, policy, attempt.block)
    log = PacketLog(attempt.router.fd)

    assert [connect(job, address, 443) for address in (SERVER, OTHER, PRIVATE)] == ["ok", "ok", "ECONNREFUSED"]
    assert [item.prefix for item in logged(log, 3)] == ["A0", "A", "R"]
    log.close()


def test_only_the_resolver_and_the_proxy_are_reachable_at_the_gateway(peers: Peers, backend: Backend) -> None:
    """fetch-only: members reach each other and our two ports, nothing else; also without an uplink that is logged."""
    attempt = peers.attempt(members=2, uplink=False)
    job, service = attempt.members
    attempt.links.run(NO_UPLINK_ROUTE)
    address = gateway(attempt.block)
    for port in (53, 3128, 8080):
        peers.tcp(attempt.router, address, port)
    resolver = peers.udp(attempt.router, address, 53)
    peers.tcp(service, "0.0.0.0", 5432)
    policy = HubPolicy(HubMode.FETCH_ONLY, dns=True, proxy_port=3128)
    install_hub(backend, attempt.router.fd, policy, attempt.block)
    log = PacketLog(attempt.router.fd)

    assert connect(job, address, 53) == "ok"
    assert connect(service, address, 3128) == "ok"
    assert ask_udp(job, address, 53, resolver) == "ok"
    assert connect(job, str(attempt.block.member(1)), 5432) == "ok"
    assert connect(job, address, 8080) == "ECONNREFUSED"
    assert ask_udp(job, address, 54) == "EHOSTUNREACH"
    assert ping(job, address) == "prohibited"
    assert connect(job, SERVER, 443) == "ECONNREFUSED"
    assert ask_udp(job, SERVER, 53) == "EHOSTUNREACH"
    assert [item.prefix for item in logged(log, 5)] == ["R"] * 5
    log.close()


def test_nobody_outside_reaches_a_member(peers: Peers, backend: Backend) -> None:
    """What comes in by the uplink and belongs to no connection of a member is refused."""
    attempt = peers.attempt()
    peers.tcp(attempt.members[0], "0.0.0.0", 8000)
    install_hub(backend, attempt.router.fd, HubPolicy(HubMode.ALLOW), attempt.block)

    assert connect(peers.host, str(attempt.block.member(0)), 8000) == "ECONNREFUSED"
    assert connect(peers.outside, str(attempt.block.member(0)), 8000) == "ECONNREFUSED"
    assert connect(peers.host, str(attempt.block.uplink[0]), 53) == "ECONNREFUSED"


def test_a_forged_source_gets_nowhere(peers: Peers, backend: Backend) -> None:
    """Also where the kernel's own check of sources is off, a packet with a foreign source is dropped, not answered."""
    attempt = peers.attempt()
    job = attempt.members[0]
    install_hub(backend, attempt.router.fd, HubPolicy(HubMode.ALLOW), attempt.block)
    off = {"net.ipv4.conf.all.rp_filter": "0", "net.ipv4.conf.br0.rp_filter": "0"}
    in_namespace(attempt.router.fd, lambda: set_sysctls(off))
    server = peers.udp(peers.outside, "0.0.0.0", 4000)
    log = PacketLog(attempt.router.fd)

    forged(job, OTHER, SERVER, 4000)
    found = logged(log, 1)
    assert ask_udp(job, SERVER, 4000, server) == "ok"
    log.close()
    assert [(item.prefix, item.source) for item in found] == [("R", OTHER)]
    assert not select.select([server], [], [], 0)[0]


def test_ipv6_is_refused_like_ipv4(peers: Peers, backend: Backend) -> None:
    """Should somebody turn IPv6 on in a router and a member, the rules refuse it at once, through and to the router."""
    attempt = peers.attempt(uplink=False)
    router, member = attempt.router.fd, attempt.members[0].fd
    install_hub(backend, router, HubPolicy(HubMode.ALLOW), attempt.block)
    for fd, link in ((router, "br0"), (member, "eth0")):
        in_namespace(fd, partial(set_sysctls, {f"net.ipv6.conf.{name}.disable_ipv6": "0" for name in ("all", link)}))
    in_namespace(router, partial(set_sysctls, {"net.ipv6.conf.all.forwarding": "1"}))
    # Neighbours are written in, since the router does not answer to who looks for it.
    _ip6(router, "address add fd00::1/64 dev br0 nodad")
    _ip6(router, f"neighbour add fd00::2 lladdr {_mac(member, 'eth0')} dev br0")
    _ip6(router, "route add 2001:db8::/32 dev br0")
    _ip6(member, "address add fd00::2/64 dev eth0 nodad")
    _ip6(member, f"neighbour add fd00::1 lladdr {_mac(router, 'br0')} dev eth0")
    _ip6(member, "route add default via fd00::1")

    def tried(target: str) -> int:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client:
            client.settimeout(WAIT)
            return client.connect_ex((target, 80))

    assert in_namespace(member, partial(tried, "fd00::1")) == errno.ECONNREFUSED
    assert in_namespace(member, partial(tried, "2001:db8::1")) == errno.ECONNREFUSED


def test_a_member_has_no_ipv6_to_begin_with(peers: Peers) -> None:
    """A connection to an IPv6 address fails before a packet is made."""
    attempt = peers.attempt()

    def tried() -> int:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client:
            client.settimeout(WAIT)
            return client.connect_ex(("2001:db8::1", 80))

    assert in_namespace(attempt.members[0].fd, tried) in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)


def test_a_prepared_router_is_closed_until_it_gets_its_policy(peers: Peers, backend: Backend) -> None:
    """Rules that a pool has loaded refuse everything; the policy replaces them as a whole, and IPv6 stays refused."""
    peers.tcp(peers.outside, "0.0.0.0", 443)
    attempt = peers.attempt()
    job = attempt.members[0]
    prepare_hub(backend, attempt.router.fd, attempt.block)
    assert connect(job, SERVER, 443) == "ECONNREFUSED"
    assert ask_udp(job, gateway(attempt.block), 53) == "EHOSTUNREACH"

    named = HubDestination(0, (IPv4Network(f"{SERVER}/32"),))
    policy = restricted(named, HubDestination(1, set_name="h1"))
    install_hub(backend, attempt.router.fd, policy, attempt.block, prepared=True)
    assert connect(job, SERVER, 443) == "ok"
    assert connect(job, OTHER, 443) == "ECONNREFUSED"
    listing = backend.listing(attempt.router.fd)
    assert "icmp6-adm-prohibited" in listing or "table ip6 forgeyard" in listing


def test_a_flood_neither_drowns_the_log_nor_goes_unanswered(peers: Peers) -> None:
    """Of thousands of refused datagrams the log gets a bounded number; far more than one a second are answered."""
    attempt = peers.attempt()
    job = attempt.members[0]
    install_hub(BACKENDS[0], attempt.router.fd, HubPolicy(HubMode.DENY), attempt.block)
    log = PacketLog(attempt.router.fd)
    sender = peers.udp(job, "0.0.0.0", 0)
    sender.connect((SERVER, 9))
    began = time.monotonic()
    refused = 0
    for _ in range(5000):
        try:
            sender.send(b"x")
        except OSError:
            refused += 1
    took = time.monotonic() - began
    found = []
    while packets := log.read():
        found += packets
    log.close()
    assert 100 <= len(found) <= 100 + 50 * (took + 1)
    assert refused > 500


def test_a_job_with_a_user_namespace_of_its_own_cannot_change_the_rules(peers: Peers, backend: Backend) -> None:
    """All capabilities in a child user namespace give no right over the member's namespace, nor a way to the router."""
    attempt = peers.attempt()
    install_hub(backend, attempt.router.fd, HubPolicy(HubMode.DENY), attempt.block)
    before = backend.listing(attempt.router.fd)

    def tried(*words: str) -> int:
        command = ["unshare", "--user", "--map-root-user", *words]
        return subprocess.run(command, check=False, capture_output=True).returncode

    for words in (
        ("iptables-legacy", "-F"),
        ("nft", "flush", "ruleset"),
        ("ip", "link", "delete", "eth0"),
        ("nsenter", f"--net={attempt.router.path}", "iptables-legacy", "-F"),
    ):
        assert in_namespace(attempt.members[0].fd, lambda words=words: tried(*words)) != 0
    # Counters move with packets; chains and rules do not.
    assert _rules(backend.listing(attempt.router.fd)) == _rules(before)
    assert attempt.links.dump().link("m0") is not None


def _rules(listing: str) -> list[str]:
    return [line for line in listing.splitlines() if not line.startswith(("#", ":"))]


def _ip6(fd: int, words: str) -> None:
    in_namespace(fd, lambda: subprocess.run(["ip", "-6", *words.split()], check=True))


def _mac(fd: int, link: str) -> str:
    links = Links.at(fd)
    found = links.dump().link(link)
    links.close()
    assert found is not None
    return found.mac
