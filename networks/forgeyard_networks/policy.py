"""A network policy as what enforces it takes it: the router's rules, the resolver's and the fetch proxy's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from typing import Final

from forgeyard_model.config import NetworkConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.policy import DEFAULT_PROTOCOLS, NetworkDestination, NetworkMode, NetworkPolicy
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.firewall.hub import HubDestination, HubMode, HubPolicy
from forgeyard_networks.proxy_policy import ProxyPolicy
from forgeyard_networks.ranges import PRIVATE_NETWORKS
from forgeyard_networks.resolver_policy import ResolverPolicy
from forgeyard_networks.settings import known_conflist

FETCH_PORT: Final = 3128
MOST_DESTINATIONS: Final = 256
"""Of one policy. Each is rules and a set of the router."""


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """What one attempt gets.

    :ivar fetch: of the fetch proxy, None when there is none. Its credentials are read when the attempt begins.
    :ivar uplink: there is a way out of the router.
    """

    hub: HubPolicy
    resolver: ResolverPolicy
    fetch: ProxyPolicy | None = None
    uplink: bool = False


def compile_policy(policy: NetworkPolicy, config: NetworkConfig, closed: Sequence[IPv4Network] = ()) -> CompiledPolicy:
    """`policy` for an attempt with a router.

    :param closed: beyond the private ranges: the range of jobs, the host's own addresses.
    :raises InvalidRequest: a destination that can't be enforced, named with its cure.
    :raises ExecutorError: UNSUPPORTED: fetch-only where nothing may be fetched from.
    """
    closed = tuple(dict.fromkeys(closed))
    blocked = (*PRIVATE_NETWORKS, *closed)
    match policy.mode:
        case NetworkMode.DENY:
            return CompiledPolicy(HubPolicy(HubMode.DENY, dns=True), ResolverPolicy(policy.mode))
        case NetworkMode.FETCH_ONLY:
            hub = HubPolicy(HubMode.FETCH_ONLY, dns=True, proxy_port=FETCH_PORT, blocked=blocked)
            return CompiledPolicy(hub, ResolverPolicy(policy.mode), _fetch(config, closed))
        case NetworkMode.RESTRICTED | NetworkMode.ALLOW:
            return _outward(policy, closed, blocked)
        case _:
            raise InvalidRequest("network", policy.mode.value, "this network has no router of ours")


def check_policy(policy: NetworkPolicy, config: NetworkConfig) -> None:
    """Whether a network for `policy` can be made at all; host and deny always can.

    :raises InvalidRequest, ExecutorError: as `compile_policy`, or an operator's network that is not configured.
    """
    if policy.mode is NetworkMode.CONFLIST:
        known_conflist(policy.conflist, config)
    elif policy.mode is not NetworkMode.HOST:
        compile_policy(policy, config)


def emulated(policy: NetworkPolicy) -> tuple[str, ...]:
    """Where enforcing `policy` covers more than its words say, for a plan. Each a sentence without its full stop."""
    if policy.mode is not NetworkMode.RESTRICTED or policy.egress is None:
        return ()
    hosts = [item.host for item in policy.egress.destinations if item.host]
    found = []
    if hosts:
        found.append(
            f"host names ({_listed(hosts)}) open the addresses that they lead to: whatever else answers at such an "
            "address and port can be reached as well"
        )
    wildcards = [host for host in hosts if host.startswith("*.")]
    if wildcards:
        found.append(f"{_listed(wildcards)}: names below it are looked up as they are asked, and can carry data out")
    return tuple(found)


def _outward(
    policy: NetworkPolicy, closed: tuple[IPv4Network, ...], blocked: tuple[IPv4Network, ...]
) -> CompiledPolicy:
    destinations = () if policy.egress is None else policy.egress.destinations
    if policy.mode is NetworkMode.RESTRICTED and not destinations:
        raise InvalidRequest("network", "restricted", "name at least one destination")
    if len(destinations) > MOST_DESTINATIONS:
        cure = f"name at most {MOST_DESTINATIONS} destinations: a wildcard or a larger network covers more"
        raise InvalidRequest("network.restricted.allow", len(destinations), cure)
    allow = Allowlist.from_destinations(destinations)
    restricted = policy.mode is NetworkMode.RESTRICTED
    hub = HubPolicy(
        HubMode.RESTRICTED if restricted else HubMode.ALLOW,
        tuple(_destination(index, item) for index, item in enumerate(destinations) if restricted or item.cidr),
        dns=True,
        blocked=blocked,
        audit=policy.audit,
    )
    return CompiledPolicy(hub, ResolverPolicy(policy.mode, allow, closed), uplink=True)


def _destination(index: int, item: NetworkDestination) -> HubDestination:
    made = HubDestination(index, ports=item.ports, protocols=item.protocols or DEFAULT_PROTOCOLS)
    if item.cidr:
        return replace(made, networks=(IPv4Network(item.cidr),))
    return replace(made, set_name=f"h{index}")


def _fetch(config: NetworkConfig, closed: tuple[IPv4Network, ...]) -> ProxyPolicy:
    if not config.fetch:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "nothing_to_fetch_from",
            "network fetch-only: this executor's configuration names nothing to fetch from",
            resolution="list hosts under network.fetch of the configuration (docs/configuration.md)",
        )
    return ProxyPolicy(Allowlist.from_destinations(config.fetch), closed)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
