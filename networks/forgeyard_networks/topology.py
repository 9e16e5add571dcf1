"""An attempt's own network as namespaces and links: a router that no process ever enters, and members behind it.

::

    job     eth0 ── m0 ─┐
    service eth0 ── m1 ─┤ br0 (gateway) │ router │ up0 ── fyu… in the executor's own namespace, where a policy lets out
    service eth0 ── m2 ─┘

Everything hangs on descriptors of this process. Dropping them drops all of it, and nothing waits for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from types import MappingProxyType
from typing import Final

from forgeyard_host.links import FIRST_INDEX, Address, Bridge, Delete, Join, Links, NetState, Route, Up, Veth
from forgeyard_host.netns import NetNamespace, in_namespace, read_sysctls, set_sysctls
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_networks.ipam import MAX_MEMBERS, Block

BRIDGE: Final = "br0"
UPLINK: Final = "up0"
HOST_LINKS: Final = "fyu"
"""How the names of our links in the executor's own namespace begin."""
_BRIDGE_INDEX: Final = FIRST_INDEX
_UPLINK_INDEX: Final = FIRST_INDEX + 1
_MEMBER_INDEX: Final = FIRST_INDEX + 2
_HOST_INDEX: Final = 0x40000000
"""The host's ends of uplinks have numbers that follow from their blocks, far above those that the kernel gives out:
to ask for one would mean to list all links of the host for each attempt."""

_FLOWS: Final = "net.netfilter.nf_conntrack_count"
ROUTER_SYSCTLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "net.ipv4.ip_forward": "1",
        "net.ipv4.conf.all.rp_filter": "1",
        "net.ipv4.conf.all.accept_redirects": "0",
        "net.ipv4.conf.all.send_redirects": "0",
        "net.ipv6.conf.all.disable_ipv6": "1",
        "net.ipv6.conf.default.disable_ipv6": "1",
    }
)
# IPv6 goes before the link comes: a connection to an IPv6 address then fails at once, and there is no link-local
# address that a neighbour could be reached by. Loopback keeps ::1.
MEMBER_SYSCTLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "net.ipv6.conf.default.disable_ipv6": "1",
        "net.ipv4.ip_forward": "0",  # a new namespace inherits what the host has
        "net.ipv4.ip_unprivileged_port_start": "0",
        "net.ipv4.conf.all.accept_redirects": "0",
    }
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a network is made of before its first use."""

    router: NetState
    member: NetState
    sysctls: tuple[tuple[str, str], ...]
    flows: int


@dataclass(slots=True)
class Topology:
    """The namespaces and links of one attempt.

    :ivar members: made ahead: the job first, then its services, in the order of their addresses.
    :ivar plumbed: namespaces that runtimes made, connected in the place of members, by the same numbers.
    """

    block: Block
    router: NetNamespace
    links: Links
    members: list[NetNamespace] = field(default_factory=list)
    plumbed: dict[int, NetNamespace] = field(default_factory=dict)
    uplink: str = ""
    _bridged: bool = False

    @classmethod
    def begin(cls, block: Block) -> Topology:
        """A router with nothing in it yet. Blocking.

        :raises SandboxError: NAMESPACE_FAILED; nothing is left.
        """
        router, links = Links.in_new_namespace(ROUTER_SYSCTLS)
        return cls(block, router, links)

    @classmethod
    def make(cls, block: Block) -> Topology:
        """A router with the job behind it. Blocking.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED; nothing is left.
        """
        made = cls.begin(block)
        try:
            made.build(1)
        except BaseException:
            made.close()
            raise
        return made

    def build(self, members: int) -> None:
        """The bridge, and as many members as are missing. Blocking.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED.
        """
        if not self._bridged:
            gateway = IPv4Interface((self.block.gateway, self.block.inside.prefixlen))
            bridge = Bridge(BRIDGE, _BRIDGE_INDEX, _mac(self.block, 0))
            self.links.run(bridge, Address(_BRIDGE_INDEX, gateway), Up(BRIDGE))
            self._bridged = True
        while len(self.members) < members:
            self.add_member()

    def add_member(self) -> NetNamespace:
        """One more namespace behind the router. Blocking.

        :raises SandboxError: NETWORK_SETUP_FAILED, when there is no address left for it.
        """
        number = len(self.members)
        if number >= MAX_MEMBERS:
            raise SandboxError(
                SandboxErrorKind.NETWORK_SETUP_FAILED,
                "too_many_services",
                f"a job's network has room for {MAX_MEMBERS - 1} services",
                resolution="leave some out, or let some share the job's namespace",
            )
        member, inner = Links.in_new_namespace(MEMBER_SYSCTLS)
        self.members.append(member)
        self._connect(number, inner)
        return member

    def plumb(self, number: int, namespace: NetNamespace) -> None:
        """Connect a namespace that a runtime made, as member `number`. Nothing may run in it yet. Blocking.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED.
        """
        self.plumbed[number] = namespace
        if number < len(self.members):
            self.links.run(Delete(f"m{number}"))
        in_namespace(namespace.fd, lambda: set_sysctls(MEMBER_SYSCTLS))
        inner = Links.at(namespace.fd)
        try:
            inner.run(Up("lo"))
        except BaseException:
            inner.close()
            raise
        self._connect(number, inner)

    def member(self, number: int) -> NetNamespace | None:
        """The namespace of a member; None for one that a runtime has yet to make."""
        made = self.members[number] if number < len(self.members) else None
        return self.plumbed.get(number, made)

    def _connect(self, number: int, inner: Links) -> None:
        """Put a member's link into its namespace, whose links `inner` are and are let go of."""
        name, address = f"m{number}", IPv4Interface((self.block.member(number), self.block.inside.prefixlen))
        mac = _mac(self.block, number + 1)
        try:
            inner.run(
                Veth("eth0", name, self.router.fd, FIRST_INDEX, _MEMBER_INDEX + number, mac),
                Address(FIRST_INDEX, address),
                Up("eth0"),
                Route(None, self.block.gateway, FIRST_INDEX),
            )
        finally:
            inner.close()
        self.links.run(Join(name, _BRIDGE_INDEX), Up(name))

    def add_uplink(self, host: Links, host_fd: int) -> None:
        """A way from the router to the executor's own namespace. Whether it leads on is for the firewalls. Blocking.

        :param host: links of that namespace; `host_fd`: its descriptor.
        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        near, far = self.block.uplink
        name = f"{HOST_LINKS}{int(self.block.network.network_address):08x}"
        index = _HOST_INDEX | (int(self.block.network.network_address) >> 5) & 0xFFFFFF
        self.links.run(
            Veth(UPLINK, name, host_fd, _UPLINK_INDEX, index, peer_mac=_mac(self.block, 254)),
            Address(_UPLINK_INDEX, IPv4Interface(near), peer=far),
            Up(UPLINK),
            Route(None, far, _UPLINK_INDEX),
        )
        self.uplink = name
        host.run(
            Address(index, IPv4Interface(far), peer=near),
            Up(name),
            Route(self.block.inside, near, index),
        )

    def fingerprint(self) -> Fingerprint:
        """What there is now. Blocking.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """

        def member() -> tuple[NetState, dict[str, str]]:
            inner = Links.at()
            try:
                return inner.dump(), read_sysctls(tuple(MEMBER_SYSCTLS))
            finally:
                inner.close()

        # One thread for each namespace: a look may not cost more than what it saves.
        found = in_namespace(self.router.fd, lambda: read_sysctls((*ROUTER_SYSCTLS, _FLOWS)))
        flows = found.pop(_FLOWS)
        state, sysctls = in_namespace(self.members[0].fd, member)
        every = (*sorted(found.items()), *sorted(sysctls.items()))
        return Fingerprint(self.links.dump(), state, every, int(flows or 0))

    def close(self) -> None:
        """Let go of everything; the kernel takes it down in its own time. Idempotent."""
        self.links.close()
        for namespace in (*self.members, *self.plumbed.values(), self.router):
            namespace.close()


def _mac(block: Block, number: int) -> bytes:
    """A locally administered address, different for each link of the host."""
    return b"\x02\xfe" + (int(block.network.network_address) & 0xFFFFFF).to_bytes(3, "big") + bytes((number,))
