"""Does what our rules accept really get out? Somebody else's rules may drop it, and no listing of ours shows that."""

from __future__ import annotations

import errno
import select
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Final

from forgeyard_host.links import Address, Delete, Links, Up, Veth
from forgeyard_host.netns import (
    NetNamespace,
    current_namespace,
    new_namespace,
    set_sysctls,
    stream_socket,
    tcp_listener,
)
from forgeyard_networks.firewall.backend import Backend, at
from forgeyard_networks.firewall.forwarding import uplink_sysctls
from forgeyard_networks.firewall.hub import HubDestination, HubMode, HubPolicy, install_hub
from forgeyard_networks.ipam import Block, Blocks
from forgeyard_networks.topology import Topology

_PORT: Final = 9
_AGAIN: Final = 0.2
"""Seconds without an answer before one more connection is tried."""
_LINK: Final = "fyp"
"""Begins the name of the probe's own link: not that of uplinks, which may not talk to each other."""


@dataclass(frozen=True, slots=True)
class ForwardingReport:
    """What became of a connection from an attempt's network to an outside that the probe made.

    :ivar passes: it was answered, from an address of this host's own.
    """

    passes: bool
    details: str
    cure: str = ""


def forwarding_probe(
    routers: Backend, blocks: Blocks, *, ns_fd: int | None = None, timeout: float = 3.0
) -> ForwardingReport:
    """Connect from a member through its router and this host to an outside and back. Blocking, some 50 ms if it works.

    The host's rules must be there (HostFirewall.acquire).

    :param blocks: a block is borrowed, for the attempt's side and for the outside.
    :param ns_fd: the namespace that plays the host, None for the caller's.
    :param timeout: seconds to wait for an answer, of which a busy host may take one: what gets none jobs are refused.
    :raises SandboxError: the networks for it could not be made.
    """
    block = blocks.acquire()
    with ExitStack() as undo:
        undo.callback(blocks.release, block)
        host = at(ns_fd, current_namespace)
        undo.callback(host.close)
        outside = new_namespace()
        undo.callback(outside.close)
        topology = Topology.make(block)
        undo.callback(topology.close)
        links = Links.at(host.fd)
        undo.callback(links.close)
        server = _connect_up(topology, routers, links, host, outside)
        # Waited for, unlike an attempt's: a probe is rare, and whoever looks at the host next should find it as it was.
        undo.callback(links.run, Delete(_link(block)))
        listener = tcp_listener(outside.fd, str(server), _PORT)
        undo.callback(listener.close)
        client = _answered(topology.members[0], str(server), timeout, undo)
        return _judged(client, listener, timeout)


def _connect_up(
    topology: Topology, routers: Backend, links: Links, host: NetNamespace, outside: NetNamespace
) -> IPv4Address:
    """Join attempt, host and outside; the outside's address."""
    block = topology.block
    near, server = block.network.network_address + 27, block.network.network_address + 28
    named = HubDestination(0, (IPv4Network(server),), ports=(_PORT,), protocols=("tcp",))
    install_hub(routers, topology.router.fd, HubPolicy(HubMode.RESTRICTED, (named,)), block)
    topology.add_uplink(links, host.fd)
    name = _link(block)
    links.run(Veth(name, "eth0", outside.fd), Up(name))
    links.run(Address(links.index(name), IPv4Interface(near), peer=server))
    far = Links.at(outside.fd)
    try:
        far.run(Address(far.index("eth0"), IPv4Interface(server), peer=near), Up("eth0"))
    finally:
        far.close()
    forwards = {**uplink_sysctls(topology.uplink), **uplink_sysctls(name)}
    at(host.fd, lambda: set_sysctls(forwards))
    return server


def _link(block: Block) -> str:
    return f"{_LINK}{int(block.network.network_address):08x}"


def _answered(member: NetNamespace, server: str, timeout: float, undo: ExitStack) -> socket.socket | None:
    """The first connection that gets an answer, whichever; None when none does.

    Several, since a single packet may be lost where nothing drops, and TCP repeats one only after a second.
    """
    end = time.monotonic() + timeout
    tried: list[socket.socket] = []
    while (left := end - time.monotonic()) > 0:
        client = stream_socket(member.fd)
        undo.callback(client.close)
        client.connect_ex((server, _PORT))
        tried.append(client)
        _, answered, _ = select.select([], tried, [], min(left, _AGAIN))
        if answered:
            return answered[0]
    return None


def _judged(client: socket.socket | None, listener: socket.socket, timeout: float) -> ForwardingReport:
    if client is None:
        return _unanswered(timeout)
    code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        return ForwardingReport(
            passes=False,
            details=f"refused: {errno.errorcode.get(code, str(code))}",
            cure="another table of rules refuses forwarded packets: let interfaces fyu* pass there",
        )
    # The answer is the second packet of three: the last one may still be on its way.
    if not select.select([listener], [], [], timeout)[0]:
        return _unanswered(timeout)
    accepted, (peer, _) = listener.accept()
    accepted.close()
    own = client.getsockname()[0]
    if peer == own:
        return ForwardingReport(
            passes=False, details=f"{own} arrived outside as it is", cure="another table undoes address translation"
        )
    return ForwardingReport(passes=True, details=f"{own} arrived outside as {peer}")


def _unanswered(timeout: float) -> ForwardingReport:
    return ForwardingReport(
        passes=False,
        details=f"no answer within {timeout:g} s",
        cure="another table of rules drops forwarded packets: look for drops in `nft list ruleset`, and let "
        "interfaces fyu* pass there",
    )
