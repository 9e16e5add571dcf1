"""Network namespaces held by descriptor, links made in batches, and what netfilter tells of them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import pytest

from forgeyard_host.links import FIRST_INDEX, Address, Bridge, Delete, Join, LinkOp, Links, Route, Up, Veth
from forgeyard_host.netfilter import AddressSets, Flows, PacketLog
from forgeyard_host.netns import (
    NetNamespace,
    current_namespace,
    in_namespace,
    is_nsfs,
    new_namespace,
    open_pinned,
    pin,
    read_sysctls,
    stream_socket,
    tcp_listener,
    udp_socket,
    unpin,
)
from forgeyard_model.errors import SandboxError

pytestmark = pytest.mark.kernel

FORWARDING = "net.ipv4.ip_forward"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test entered into it."""
    with ExitStack() as stack:
        yield stack


def namespace(opened: ExitStack, **sysctls: str) -> NetNamespace:
    made = new_namespace({name.replace("__", "."): value for name, value in sysctls.items()})
    opened.callback(made.close)
    return made


def links(opened: ExitStack, fd: int) -> Links:
    made = Links.at(fd)
    opened.callback(made.close)
    return made


def namespaces_held() -> Counter[str]:
    """The namespaces and route sockets that descriptors of this process hold; other tests' threads have others."""
    return Counter(target for fd in os.listdir("/proc/self/fd") if (target := link(fd)).startswith(("net:", "socket:")))


def link(fd: str) -> str:
    """What a descriptor is; empty once it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def pair(opened: ExitStack) -> tuple[NetNamespace, NetNamespace]:
    """Two namespaces with a link between: 10.9.0.1 and 10.9.0.2."""
    one, two = namespace(opened), namespace(opened)
    links(opened, one.fd).run(
        Veth("a0", "b0", two.fd, FIRST_INDEX, FIRST_INDEX),
        Address(FIRST_INDEX, IPv4Interface("10.9.0.1/30")),
        Up("a0"),
    )
    links(opened, two.fd).run(Address(FIRST_INDEX, IPv4Interface("10.9.0.2/30")), Up("b0"))
    return one, two


def test_a_namespace_is_new_and_the_caller_stays_where_it_was(opened: ExitStack) -> None:
    """Making one moves no thread that anybody else uses."""
    before = current_namespace().inode
    made = namespace(opened)
    assert made.inode != before
    assert current_namespace().inode == before


def test_loopback_is_up_and_alone(opened: ExitStack) -> None:
    """A new namespace has lo, raised, and nothing that leads anywhere."""
    state = links(opened, namespace(opened).fd).dump()
    assert [(link.name, link.up) for link in state.links if link.up] == [("lo", True)]


def test_sysctls_are_set_inside_alone(opened: ExitStack) -> None:
    """What a namespace is made with holds there and not here."""
    here = read_sysctls((FORWARDING,))
    inside = "0" if here[FORWARDING] == "1" else "1"
    made = namespace(opened, net__ipv4__ip_forward=inside)
    assert in_namespace(made.fd, lambda: read_sysctls((FORWARDING,))) == {FORWARDING: inside}
    assert read_sysctls((FORWARDING,)) == here


def test_a_sysctl_that_is_not_there_is_an_error_and_leaves_nothing(opened: ExitStack) -> None:
    """A protection that can't be set is never left out."""
    before = namespaces_held()
    with pytest.raises(SandboxError) as caught:
        new_namespace({"net.ipv4.no_such_thing": "1"})
    assert "no_such_thing" in str(caught.value)
    assert not namespaces_held() - before


def test_closing_twice_is_fine_and_leaves_no_descriptor() -> None:
    """Descriptors are what a namespace is held by: none may be left."""
    before = namespaces_held()
    made = new_namespace()
    made.close()
    made.close()
    assert not namespaces_held() - before


def test_many_threads_make_and_drop_namespaces() -> None:
    """No deadlock, no descriptor left, also when every third fails (field case C15)."""
    before, failures = namespaces_held(), []

    def work() -> None:
        for number in range(40):
            try:
                made = new_namespace({"net.ipv4.nowhere": "1"} if number % 3 == 0 else {})
            except SandboxError as error:
                failures.append(error)
                continue
            found = Links.at(made.fd)
            found.dump()
            found.close()
            made.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 8 * 14
    assert not namespaces_held() - before


def test_an_error_inside_comes_out_as_it_is(opened: ExitStack) -> None:
    """What the caller's own code raises in there is not dressed up."""

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        in_namespace(namespace(opened).fd, fail)


def test_a_batch_connects_two_namespaces(opened: ExitStack) -> None:
    """Links, addresses and routes made in two calls carry a connection."""
    one, two = pair(opened)
    listener = opened.enter_context(tcp_listener(one.fd, "10.9.0.1", 80))
    client = opened.enter_context(stream_socket(two.fd))
    client.settimeout(5)
    client.connect(("10.9.0.1", 80))
    listener.settimeout(5)
    taken, peer = listener.accept()
    opened.enter_context(taken)
    assert peer[0] == "10.9.0.2"


def test_datagrams_pass_between_sockets_made_inside(opened: ExitStack) -> None:
    """A UDP socket belongs to the namespace that it was made in."""
    one, two = pair(opened)
    server = opened.enter_context(udp_socket(one.fd, "10.9.0.1", 53))
    client = opened.enter_context(udp_socket(two.fd, "10.9.0.2", 0))
    server.settimeout(5)
    client.sendto(b"hello", ("10.9.0.1", 53))
    assert server.recvfrom(16)[0] == b"hello"


@pytest.mark.parametrize(
    ("op", "named"),
    [
        (Up("nosuch"), "nosuch up"),
        (Join("nosuch", 4), "port nosuch"),
        (Delete("nosuch"), "remove nosuch"),
        (Address(77, IPv4Interface("10.9.9.9/24")), "address 10.9.9.9/24"),
        (Route(None, IPv4Address("10.9.9.1"), 77), "route default"),
        (Bridge("lo"), "bridge lo"),
    ],
)
def test_a_failed_part_of_a_batch_is_named(opened: ExitStack, op: LinkOp, named: str) -> None:
    """The error says which of the many did not work."""
    made = links(opened, namespace(opened).fd)
    with pytest.raises(SandboxError) as caught:
        made.run(Up("lo"), op)
    assert named in str(caught.value)


def test_a_dump_shows_what_the_kernel_has(opened: ExitStack) -> None:
    """Our own reader agrees with ip(8)."""
    one, _ = pair(opened)
    made = links(opened, one.fd)
    made.run(Bridge("br9", 200, b"\x02\0\0\0\0\x09"), Up("br9"), Route(IPv4Network("10.77.0.0/16"), None, FIRST_INDEX))
    state = made.dump()
    bridge = state.link("br9")
    assert bridge is not None
    assert (bridge.kind, bridge.mac, bridge.up) == ("bridge", "02:00:00:00:00:09", True)
    assert any("10.9.0.1/30" in address for address in state.addresses)
    shown = in_namespace(one.fd, lambda: subprocess.run(["ip", "route"], capture_output=True, check=True).stdout)
    assert b"10.77.0.0/16 dev a0" in shown
    assert f"table 254 type 1 10.77.0.0/16 dev {FIRST_INDEX}" in state.routes
    assert made.dump().links == state.links


def test_dropping_a_namespace_takes_the_other_end_along(opened: ExitStack) -> None:
    """Nothing needs to be deleted: the peer of a link goes with the namespace that held it."""
    host, inner = namespace(opened), new_namespace()
    watch = opened.enter_context(in_namespace(host.fd, _link_events))
    made = links(opened, host.fd)
    made.run(Veth("fyx", "eth0", inner.fd, FIRST_INDEX))
    inner.close()
    while made.dump().link("fyx") is not None:
        watch.recv(65536)  # times out, and fails, when the link stays


def _link_events() -> socket.socket:
    events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    events.bind((0, 1))  # RTMGRP_LINK
    events.settimeout(20)
    return events


def test_a_pinned_namespace_has_a_name_until_it_is_taken_away(opened: ExitStack, state_dir: Path) -> None:
    """Plugins want a path; it is the same namespace."""
    made, where = namespace(opened), state_dir / "netns" / "one"
    pin(made, where)
    assert is_nsfs(where)
    again = open_pinned(where)
    opened.callback(again.close)
    assert again.inode == made.inode
    unpin(where)
    assert not where.exists()
    unpin(where)


def test_what_a_reboot_leaves_is_no_namespace(state_dir: Path) -> None:
    """An empty file in its place is treated as absent (field case C07)."""
    where = state_dir / "left"
    where.touch()
    assert not is_nsfs(where)
    with pytest.raises(SandboxError):
        open_pinned(where)
    unpin(where)
    assert not where.exists()


RULES = b"""*filter
:OUTPUT ACCEPT [0:0]
-A OUTPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT
-A OUTPUT -p tcp --dport 80 -m set --match-set d0 dst -j NFLOG --nflog-group 1 --nflog-prefix A0
-A OUTPUT -p tcp --dport 80 -m set --match-set d0 dst -j ACCEPT
-A OUTPUT -p tcp -j NFLOG --nflog-group 1 --nflog-prefix R
-A OUTPUT -p tcp -j REJECT
COMMIT
"""


def test_rules_log_what_they_decide_and_flows_count_bytes(opened: ExitStack) -> None:
    """The prefix says which rule it was; a connection's bytes are known while it lasts."""
    one, two = pair(opened)
    sets = AddressSets.at(two.fd)
    opened.callback(sets.close)
    sets.create("d0")
    sets.add("d0", IPv4Address("10.9.0.1"), 300)
    sets.add("d0", IPv4Address("10.9.0.1"), 600)
    in_namespace(two.fd, lambda: Path("/proc/sys/net/netfilter/nf_conntrack_acct").write_text("1"))
    in_namespace(two.fd, lambda: subprocess.run(["iptables-legacy-restore"], input=RULES, check=True))
    log, flows = PacketLog(two.fd), Flows(two.fd)
    opened.callback(log.close)
    opened.callback(flows.close)
    listener = opened.enter_context(tcp_listener(one.fd, "10.9.0.1", 80))
    good, bad = opened.enter_context(stream_socket(two.fd)), opened.enter_context(stream_socket(two.fd))
    for client in (good, bad):
        client.settimeout(5)
    good.connect(("10.9.0.1", 80))
    good.send(b"x" * 1000)
    listener.settimeout(5)
    opened.enter_context(listener.accept()[0])
    assert bad.connect_ex(("10.9.0.1", 81)) == errno.ECONNREFUSED
    packets = []
    while more := log.read():
        packets += more
    assert {(p.prefix, p.protocol, p.destination, p.port) for p in packets} == {
        ("A0", "tcp", "10.9.0.1", 80),
        ("R", "tcp", "10.9.0.1", 81),
    }
    flow = next(flow for flow in flows.open() if flow.port == 80)
    assert (flow.protocol, flow.source, flow.destination) == ("tcp", "10.9.0.2", "10.9.0.1")
    assert flow.sent > 1000
    assert log.read() == []


def test_a_set_that_is_not_there_is_an_error(opened: ExitStack) -> None:
    """An address that could not be opened is never taken for open."""
    sets = AddressSets.at(namespace(opened).fd)
    opened.callback(sets.close)
    with pytest.raises(SandboxError) as caught:
        sets.add("nosuch", IPv4Address("10.9.0.1"), 300)
    assert "nosuch" in str(caught.value)
