"""What a chain of plugins made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Any


@dataclass(frozen=True, slots=True)
class CniInterface:
    """An interface. `sandbox`: path of the namespace it is in, "" for the host's own. `mtu`: bytes, 0 unknown."""

    name: str
    mac: str
    sandbox: str
    mtu: int


@dataclass(frozen=True, slots=True)
class CniAddress:
    """An address with its prefix. `interface`: index into the interfaces of the result."""

    address: IPv4Interface | IPv6Interface
    gateway: IPv4Address | IPv6Address | None
    interface: int | None


@dataclass(frozen=True, slots=True)
class CniRoute:
    """A route inside the container."""

    to: IPv4Network | IPv6Network
    gateway: IPv4Address | IPv6Address | None


@dataclass(frozen=True, slots=True)
class CniDns:
    """What the network says about names; nobody has applied it."""

    nameservers: tuple[str, ...]
    domain: str
    search: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CniResult:
    """The result of an ADD (specification, "Success")."""

    interfaces: tuple[CniInterface, ...]
    ips: tuple[CniAddress, ...]
    routes: tuple[CniRoute, ...]
    dns: CniDns

    @property
    def ipv4(self) -> tuple[IPv4Interface, ...]:
        """Its IPv4 addresses."""
        return tuple(entry.address for entry in self.ips if isinstance(entry.address, IPv4Interface))


def parse_result(printed: Mapping[str, Any]) -> CniResult:
    """Read what a plugin printed.

    :raises ValueError: one line that says what is wrong with it.
    """
    from pydantic import ValidationError

    from forgeyard_networks.cni.wire import ResultModel

    try:
        model = ResultModel.model_validate(printed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for entry in model.ips:
        if entry.interface is not None and entry.interface >= len(model.interfaces):
            raise ValueError(f"ips: interface {entry.interface} is not in the list of interfaces")
    dns = model.dns
    return CniResult(
        tuple(CniInterface(link.name, link.mac, link.sandbox, link.mtu) for link in model.interfaces),
        tuple(CniAddress(entry.address, entry.gateway, entry.interface) for entry in model.ips),
        tuple(CniRoute(route.dst, route.gw) for route in model.routes),
        CniDns(tuple(dns.nameservers), dns.domain, tuple(dns.search), tuple(dns.options)),
    )
