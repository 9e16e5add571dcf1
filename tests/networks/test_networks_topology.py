"""Blocks of addresses, the router with its members, and the pool of networks made ahead."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_host.links import FIRST_INDEX, Links, Route, Up, Veth
from forgeyard_host.netns import NetNamespace, in_namespace, new_namespace, stream_socket, tcp_listener
from forgeyard_model.errors import InvalidRequest, SandboxError
from forgeyard_networks.ipam import DEFAULT_RANGE, MAX_MEMBERS, Block, Blocks, parse_range
from forgeyard_networks.pool import NetworkPool
from forgeyard_networks.topology import Topology


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    """The default range with locks of its own."""
    made = Blocks(parse_range(DEFAULT_RANGE), str(tmp_path / "locks"))
    yield made
    made.close()


@pytest.fixture
def make(blocks: Blocks) -> Iterator[Callable[[], Topology]]:
    """Makes networks, and closes them after the test."""
    with ExitStack() as stack:

        def one() -> Topology:
            topology = Topology.make(blocks.acquire())
            stack.callback(topology.close)
            return topology

        yield one


@given(number=st.integers(0, 2047))
def test_a_blocks_addresses_lie_in_it_and_differ(number: int) -> None:
    """Gateway, members and both ends of the uplink never collide, and the uplink is no neighbour of a member."""
    network = IPv4Network((int(IPv4Network(DEFAULT_RANGE).network_address) + number * 32, 27))
    block = Block(network, number)
    members = [block.member(index) for index in range(MAX_MEMBERS)]
    every = [block.gateway, *members, *block.uplink]
    assert len(set(every)) == len(every)
    assert all(address in network for address in every)
    assert all(address in block.inside for address in (block.gateway, *members))
    assert not any(address in block.inside for address in block.uplink)


def test_two_processes_never_share_a_block(tmp_path: Path) -> None:
    """Another holder of the locks gets other blocks, and all of them in the end."""
    network = IPv4Network("10.99.0.0/25")
    one, two = (Blocks(network, str(tmp_path)) for _ in range(2))
    taken = {one.acquire().network, one.acquire().network, two.acquire().network, two.acquire().network}
    assert len(taken) == 4
    with pytest.raises(SandboxError) as caught:
        one.acquire()
    assert caught.value.reason == "subnets_exhausted"
    two.close()
    assert one.acquire().network in taken
    one.close()


def test_blocks_that_this_host_reaches_already_stay_unused(tmp_path: Path) -> None:
    """A route of the host's own is not taken over by a job."""
    made = Blocks(IPv4Network("10.99.0.0/26"), str(tmp_path), routes=(IPv4Network("10.99.0.0/28"),))
    assert made.acquire().network == IPv4Network("10.99.0.32/27")
    with pytest.raises(SandboxError):
        made.acquire()
    made.close()


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "10.0.0.1/8", "10.0.0.0/28", "8.8.8.0/24", "::/64", "x"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    """Names the field, the value and the cure."""
    with pytest.raises(InvalidRequest) as caught:
        parse_range(text)
    assert "network.range" in str(caught.value)


@pytest.mark.kernel
def test_members_reach_each_other_and_the_router_alone(make: Callable[[], Topology]) -> None:
    """A service answers the job; without an uplink nothing else is there."""
    topology = make()
    service = topology.add_member()
    address = str(topology.block.member(1))
    with tcp_listener(service.fd, address, 80) as listener, stream_socket(topology.members[0].fd) as client:
        client.settimeout(5)
        client.connect((address, 80))
        listener.settimeout(5)
        listener.accept()[0].close()
    with stream_socket(topology.members[0].fd) as client:
        client.settimeout(5)
        with pytest.raises(OSError, match=r"unreachable|refused"):
            client.connect(("192.0.2.1", 80))


@pytest.mark.kernel
def test_ipv6_fails_at_once_and_loopback_has_it(make: Callable[[], Topology]) -> None:
    """No link-local address to be reached by; ::1 still works."""
    member = make().members[0]

    def look() -> tuple[str, int]:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            code = probe.connect_ex(("2001:db8::1", 80))
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as server:
            server.bind(("::1", 0))
            return Path("/proc/thread-self/net/if_inet6").read_text(), code

    addresses, code = in_namespace(member.fd, look)
    assert [line.split()[-1] for line in addresses.splitlines()] == ["lo"]
    assert code != 0


@pytest.mark.kernel
def test_two_networks_know_nothing_of_each_other(make: Callable[[], Topology]) -> None:
    """The address of another attempt's member leads nowhere."""
    one, two = make(), make()
    with (
        tcp_listener(two.members[0].fd, str(two.block.member(0)), 80),
        stream_socket(one.members[0].fd) as client,
    ):
        client.settimeout(5)
        with pytest.raises(OSError, match=r"unreachable|refused"):
            client.connect((str(two.block.member(0)), 80))


@pytest.mark.kernel
def test_an_uplink_joins_the_router_to_the_host(make: Callable[[], Topology]) -> None:
    """The host's end is there with an address and a route, and goes with the network."""
    host = new_namespace()
    links = Links.at(host.fd)
    topology = make()
    topology.add_uplink(links, host.fd)
    state = links.dump()
    assert state.link(topology.uplink) is not None
    assert any(str(topology.block.inside) in route for route in state.routes)
    _, far = topology.block.uplink
    with tcp_listener(host.fd, str(far), 80), stream_socket(topology.router.fd) as client:
        client.settimeout(5)
        client.connect((str(far), 80))
    links.close()
    host.close()


@pytest.mark.kernel
def test_more_members_than_addresses_are_refused(make: Callable[[], Topology]) -> None:
    """The error says how many fit."""
    topology = make()
    for _ in range(MAX_MEMBERS - 1):
        topology.add_member()
    with pytest.raises(SandboxError) as caught:
        topology.add_member()
    assert str(MAX_MEMBERS - 1) in str(caught.value)


@pytest.mark.kernel
def test_a_hundred_networks_leave_no_descriptor(blocks: Blocks) -> None:
    """What is made is given back, whatever the number."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        block = blocks.acquire()
        Topology.make(block).close()
        blocks.release(block)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert blocks.held == 0


@pytest.fixture
def pool(blocks: Blocks) -> Iterator[NetworkPool]:
    """Two networks, kept ready."""

    def discard(topology: Topology) -> None:
        blocks.release(topology.block)
        topology.close()

    made = NetworkPool(lambda: Topology.make(blocks.acquire()), discard, 2)
    yield made
    made.close()
    assert (made.metrics().ready, blocks.held) == (0, 1)  # the test has not given back the one that it took


@pytest.mark.kernel
def test_a_pool_hands_out_ready_ones_and_refills(pool: NetworkPool) -> None:
    """A take finds one ready; another takes its place."""
    assert pool.wait_full(20)
    pool.take().close()
    assert pool.wait_full(20)
    assert (pool.metrics().hits, pool.metrics().misses) == (1, 0)
    assert pool.metrics().hit_rate == 1.0


def _route(member: NetNamespace) -> None:
    links = Links.at(member.fd)
    links.run(Route(IPv4Network("10.66.0.0/16"), None, FIRST_INDEX))
    links.close()


def _sysctl(member: NetNamespace) -> None:
    where = "/proc/sys/net/ipv4/ip_unprivileged_port_start"
    in_namespace(member.fd, lambda: Path(where).write_text("1024"))


def _link(member: NetNamespace) -> None:
    links = Links.at(member.fd)
    links.run(Veth("x0", "x1", member.fd), Up("x0"))
    links.close()


@pytest.mark.kernel
@pytest.mark.parametrize("change", [_route, _sysctl, _link])
def test_a_ready_network_that_changed_is_not_used(
    blocks: Blocks, change: Callable[[NetNamespace], None], request: pytest.FixtureRequest
) -> None:
    """Whatever was done to it: it is thrown away, and a new one takes its place."""
    made: list[Topology] = []

    def one() -> Topology:
        made.append(Topology.make(blocks.acquire()))
        return made[-1]

    pool = NetworkPool(one, Topology.close, 1)
    request.addfinalizer(pool.close)
    assert pool.wait_full(20)
    change(made[0].members[0])
    taken = pool.take()
    request.addfinalizer(taken.close)
    assert taken is not made[0]
    assert pool.metrics().refused == 1
