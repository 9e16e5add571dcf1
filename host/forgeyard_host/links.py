"""Links, addresses and routes of one network namespace: made in batches, read as plain data."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, ip_address
from typing import Final, Self

from forgeyard_host import netlink as nl
from forgeyard_host.failures import describe
from forgeyard_host.netns import NetNamespace, in_namespace, new_namespace_and
from forgeyard_model.errors import SandboxError, SandboxErrorKind

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 4, 10, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER, _IFLA_BR_MCAST_SNOOPING = 1, 2, 1, 23
_IFA_ADDRESS, _IFA_LOCAL, _IFA_LABEL = 1, 2, 3
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC, _RTA_TABLE = 1, 4, 5, 7, 15
_NDA_DST, _NDA_LLADDR = 1, 2
_IFF_UP: Final = 1
_IFINFO: Final = struct.Struct("=BxHiII")
_IFADDR: Final = struct.Struct("=BBBBI")
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
_TABLE_MAIN, _PROTO_STATIC, _SCOPE_UNIVERSE, _SCOPE_LINK, _UNICAST = 254, 4, 0, 253, 1
FIRST_INDEX: Final = 100
"""Interfaces get numbers from here on where we choose them: below are what the kernel puts into every namespace."""


@dataclass(frozen=True, slots=True)
class Veth:
    """A pair: `name` here, and `peer` in the namespace `peer_ns` (a descriptor). `index`: number here, 0 any."""

    name: str
    peer: str
    peer_ns: int
    index: int = 0
    peer_index: int = 0
    mac: bytes = b""
    peer_mac: bytes = b""


@dataclass(frozen=True, slots=True)
class Bridge:
    """A bridge. A MAC of its own, since otherwise it changes with its ports."""

    name: str
    index: int = 0
    mac: bytes = b""


@dataclass(frozen=True, slots=True)
class Join:
    """Make `link` a port of the bridge with the number `bridge`."""

    link: str
    bridge: int


@dataclass(frozen=True, slots=True)
class Address:
    """An IPv4 address with its prefix on the link of that number; `peer`: the one other end of a point-to-point."""

    index: int
    address: IPv4Interface
    peer: IPv4Address | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A route; `to` None is the default one."""

    to: IPv4Network | None
    via: IPv4Address | None
    index: int


@dataclass(frozen=True, slots=True)
class Up:
    """Raise a link."""

    link: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a link, with its peer. The kernel lets its caller wait for tens of milliseconds."""

    link: str


LinkOp = Veth | Bridge | Join | Address | Route | Up | Delete


@dataclass(frozen=True, slots=True)
class LinkState:
    """One link. `kind`: veth, bridge, or "" for what the kernel makes."""

    name: str
    index: int
    up: bool
    mac: str
    kind: str
    master: int
    mtu: int


@dataclass(frozen=True, slots=True)
class NetState:
    """What a namespace holds, sorted. Routes and rules: the tables that a packet meets first to last, as words."""

    links: tuple[LinkState, ...]
    addresses: tuple[str, ...]
    routes: tuple[str, ...]
    rules: tuple[str, ...]
    neighbours: tuple[str, ...]

    def link(self, name: str) -> LinkState | None:
        """The link of that name."""
        return next((link for link in self.links if link.name == name), None)


class Links:
    """One kept socket into a namespace. Safe to use from several threads."""

    def __init__(self, made: nl.NetlinkSocket) -> None:
        self._socket = made
        self._lock = threading.Lock()

    @classmethod
    def at(cls, fd: int | None = None) -> Self:
        """Of the namespace `fd`, or of the caller's own.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED.
        """
        try:
            return cls(nl.NetlinkSocket() if fd is None else in_namespace(fd, nl.NetlinkSocket))
        except OSError as error:
            raise _failed("open a netlink socket", error) from error

    @classmethod
    def in_new_namespace(cls, sysctls: Mapping[str, str]) -> tuple[NetNamespace, Self]:
        """A new namespace (see `new_namespace`), and a socket into it.

        :raises SandboxError: NAMESPACE_FAILED.
        """
        namespace, made = new_namespace_and(nl.NetlinkSocket, sysctls)
        return namespace, cls(made)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def run(self, *ops: LinkOp) -> None:
        """Carry out `ops` in order, all in one system call. What came before or after a failed one may be done.

        :raises SandboxError: NETWORK_SETUP_FAILED, naming the first that failed.
        """
        try:
            with self._lock:
                self._socket.run([_message(op) for op in ops])
        except OSError as error:
            raise _failed(f"set up a link ({error.filename})", error) from error

    def index(self, name: str) -> int:
        """The number of a link, 0 when there is none of that name.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        found = self.dump().link(name)
        return 0 if found is None else found.index

    def dump(self) -> NetState:
        """Everything that is there.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            with self._lock:
                links = [_link(body) for body in self._socket.dump(nl.GETLINK, _IFINFO.pack(0, 0, 0, 0, 0))]
                addresses = [_address(body) for body in self._socket.dump(nl.GETADDR, _IFADDR.pack(0, 0, 0, 0, 0))]
                routes = [_route(body) for body in self._socket.dump(nl.GETROUTE, _ROUTE.pack(*(0,) * 9))]
                rules = [_rule(body) for body in self._socket.dump(nl.GETRULE, _ROUTE.pack(*(0,) * 9))]
                neighbours = [_neighbour(body) for body in self._socket.dump(nl.GETNEIGH, bytes(12))]
        except OSError as error:
            raise _failed("read the links of a namespace", error) from error
        return NetState(
            tuple(sorted(links, key=lambda link: link.index)),
            *(tuple(sorted(part)) for part in (addresses, routes, rules, neighbours)),
        )


def _message(op: LinkOp) -> nl.Message:
    create = nl.CREATE | nl.EXCLUSIVE
    match op:
        case Veth():
            made = nl.Message(nl.NEWLINK, f"veth {op.name}", create, _veth_body(op))
        case Bridge():
            quiet = nl.nested(_IFLA_INFO_DATA, nl.attribute(_IFLA_BR_MCAST_SNOOPING, b"\0"))
            info = nl.nested(_IFLA_LINKINFO, nl.text(_IFLA_INFO_KIND, "bridge"), quiet)
            made = nl.Message(nl.NEWLINK, f"bridge {op.name}", create, _link_body(op.name, op.index, op.mac) + info)
        case Join():
            body = _link_body(op.link, 0, b"") + nl.number(_IFLA_MASTER, op.bridge)
            made = nl.Message(nl.NEWLINK, f"port {op.link}", 0, body)
        case Up():
            body = _IFINFO.pack(0, 0, 0, _IFF_UP, _IFF_UP) + nl.text(_IFLA_IFNAME, op.link)
            made = nl.Message(nl.NEWLINK, f"{op.link} up", 0, body)
        case Delete():
            made = nl.Message(nl.DELLINK, f"remove {op.link}", 0, _link_body(op.link, 0, b""))
        case Address():
            made = nl.Message(nl.NEWADDR, f"address {op.address}", create, _address_body(op))
        case Route():
            made = nl.Message(nl.NEWROUTE, f"route {op.to or 'default'}", create, _route_body(op))
    return made


def _veth_body(op: Veth) -> bytes:
    peer = nl.nested(
        _VETH_INFO_PEER,
        _IFINFO.pack(0, 0, op.peer_index, 0, 0)
        + nl.text(_IFLA_IFNAME, op.peer)
        + nl.number(_IFLA_NET_NS_FD, op.peer_ns)
        + (nl.attribute(_IFLA_ADDRESS, op.peer_mac) if op.peer_mac else b""),
    )
    info = nl.nested(_IFLA_LINKINFO, nl.text(_IFLA_INFO_KIND, "veth"), nl.nested(_IFLA_INFO_DATA, peer))
    return _link_body(op.name, op.index, op.mac) + info


def _link_body(name: str, index: int, mac: bytes) -> bytes:
    address = nl.attribute(_IFLA_ADDRESS, mac) if mac else b""
    return _IFINFO.pack(0, 0, index, 0, 0) + nl.text(_IFLA_IFNAME, name) + address


def _address_body(op: Address) -> bytes:
    length = 32 if op.peer is not None else op.address.network.prefixlen
    local = op.address.ip.packed
    return (
        _IFADDR.pack(socket.AF_INET, length, 0, _SCOPE_UNIVERSE, op.index)
        + nl.attribute(_IFA_LOCAL, local)
        + nl.attribute(_IFA_ADDRESS, op.peer.packed if op.peer is not None else local)
    )


def _route_body(op: Route) -> bytes:
    scope = _SCOPE_LINK if op.via is None else _SCOPE_UNIVERSE
    length = 0 if op.to is None else op.to.prefixlen
    body = _ROUTE.pack(socket.AF_INET, length, 0, 0, _TABLE_MAIN, _PROTO_STATIC, scope, _UNICAST, 0)
    if op.to is not None:
        body += nl.attribute(_RTA_DST, op.to.network_address.packed)
    if op.via is not None:
        body += nl.attribute(_RTA_GATEWAY, op.via.packed)
    return body + nl.number(_RTA_OIF, op.index)


def _link(body: bytes) -> LinkState:
    _, _, index, flags, _ = _IFINFO.unpack_from(body)
    found = nl.attributes(body[_IFINFO.size :])
    info = nl.attributes(found.get(_IFLA_LINKINFO, b""))
    return LinkState(
        name=_word(found.get(_IFLA_IFNAME, b"")),
        index=index,
        up=bool(flags & _IFF_UP),
        mac=found.get(_IFLA_ADDRESS, b"").hex(":"),
        kind=_word(info.get(_IFLA_INFO_KIND, b"")),
        master=_number(found.get(_IFLA_MASTER)),
        mtu=_number(found.get(_IFLA_MTU)),
    )


def _address(body: bytes) -> str:
    _, length, _, _, index = _IFADDR.unpack_from(body)
    found = nl.attributes(body[_IFADDR.size :])
    local = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS, b"")
    peer = found.get(_IFA_ADDRESS, local)
    end = f" peer {_ip(peer)}" if peer != local else ""
    return f"{index}: {_ip(local)}{end}/{length}"


def _route(body: bytes) -> str:
    family, length, _, _, table, _, _, kind, _ = _ROUTE.unpack_from(body)
    found = nl.attributes(body[_ROUTE.size :])
    to = f"{_ip(found[_RTA_DST])}/{length}" if _RTA_DST in found else ("default" if family == socket.AF_INET else "::")
    via = f" via {_ip(found[_RTA_GATEWAY])}" if _RTA_GATEWAY in found else ""
    return f"table {_number(found.get(_RTA_TABLE)) or table} type {kind} {to}{via} dev {_number(found.get(_RTA_OIF))}"


def _rule(body: bytes) -> str:
    family, to_length, from_length, _, table, _, _, action, _ = _ROUTE.unpack_from(body)
    found = nl.attributes(body[_ROUTE.size :])
    words = " ".join(f"{kind}={value.hex()}" for kind, value in sorted(found.items()))
    return f"family {family} to/{to_length} from/{from_length} table {table} action {action} {words}"


def _neighbour(body: bytes) -> str:
    _, index, state, _, _ = struct.unpack_from("=BxxxiHBB", body)
    found = nl.attributes(body[12:])
    return f"{index}: {_ip(found.get(_NDA_DST, b''))} {found.get(_NDA_LLADDR, b'').hex(':')} state {state}"


def _ip(packed: bytes) -> str:
    return str(ip_address(packed)) if len(packed) in (4, 16) else packed.hex()


def _word(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")


def _number(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "little")


def _failed(what: str, error: OSError) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED,
        "netlink",
        f"cannot {what}",
        details=describe(error),
        resolution="links need CAP_NET_ADMIN, and the veth and bridge modules",
    )
