"""The rules of an attempt's router: where its members may connect to. No job process can enter that namespace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from forgeyard_host.links import Route
from forgeyard_host.netns import in_namespace, set_sysctls
from forgeyard_networks.firewall.rules import (
    ANY,
    Chain,
    Jump,
    Limit,
    Log,
    Match,
    Rule,
    Ruleset,
    State,
    Verdict,
)
from forgeyard_networks.ipam import Block
from forgeyard_networks.ranges import PRIVATE_NETWORKS
from forgeyard_networks.topology import BRIDGE, UPLINK

if TYPE_CHECKING:
    from forgeyard_networks.firewall.backend import Backend

ALLOWED_PREFIX: Final = "A"
"""Begins the log prefix of a new connection that was let through; a destination's index follows where one names it."""
REFUSED_PREFIX: Final = "R"
DNS_PORT: Final = 53

# Refusals are answered as they come: the kernel's own limit of one ICMP error a second for each peer would turn the
# seventh refused datagram into a timeout. The chain REFUSE has a bound of its own.
HUB_SYSCTLS: Final = MappingProxyType({"net.ipv4.icmp_ratemask": "0"})
NO_UPLINK_ROUTE: Final = Route(None, None, 1)
"""Where a router without a way out sends what it can't deliver: to its loopback, past the rules that refuse and log it.
Without any route such packets are refused as well, but nobody sees them."""

_REFUSE: Final = "REFUSE"
_EGRESS: Final = "EGRESS"
_KNOWN: Final = frozenset({State.ESTABLISHED, State.RELATED})


class HubMode(StrEnum):
    """What a router lets out."""

    DENY = "deny"
    FETCH_ONLY = "fetch-only"
    RESTRICTED = "restricted"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class HubDestination:
    """One destination of a policy.

    :ivar index: its place in the policy, by which the log names it.
    :ivar networks: as the policy wrote them. `set_name`: the set into which the resolver puts addresses of its name.
    :ivar ports: empty for all. `protocols`: of tcp, udp, icmp; icmp has no ports and matches whatever they are.
    """

    index: int
    networks: tuple[IPv4Network, ...] = ()
    set_name: str = ""
    ports: tuple[int, ...] = ()
    protocols: tuple[str, ...] = ("tcp", "udp")


@dataclass(frozen=True, slots=True)
class HubPolicy:
    """What the members of one attempt may reach.

    :ivar dns: a resolver listens at the gateway. `proxy_port`: so does a fetch proxy.
    :ivar blocked: closed unless a destination names exactly that or a part of it: private ranges, the host's own
        addresses, every attempt's range.
    :ivar audit: let through what `allow` would, and log it.
    """

    mode: HubMode
    destinations: tuple[HubDestination, ...] = ()
    dns: bool = False
    proxy_port: int | None = None
    blocked: tuple[IPv4Network, ...] = PRIVATE_NETWORKS
    audit: bool = False

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the sets that its destinations use."""
        return tuple(item.set_name for item in self.destinations if item.set_name)


def prepare_hub(backend: Backend, router_fd: int, block: Block) -> None:
    """Close a router that waits for its attempt, IPv6 for good. What is done here need not be done later. Blocking.

    :raises SandboxError: NETWORK_SETUP_FAILED.
    """
    install_hub(backend, router_fd, HubPolicy(HubMode.DENY), block)


def install_hub(backend: Backend, router_fd: int, policy: HubPolicy, block: Block, *, prepared: bool = False) -> None:
    """Put `policy` in force in the router. Once for each router, before a member's first process. Blocking.

    :param prepared: `prepare_hub` was here.
    :raises SandboxError: NETWORK_SETUP_FAILED; the attempt must end then.
    """
    rules = hub_rules(policy, block)
    if prepared:
        rules = tuple(ruleset for ruleset in rules if ruleset.family == "ip")
    else:
        in_namespace(router_fd, lambda: set_sysctls(HUB_SYSCTLS))
    backend.load_in(router_fd, rules)


def hub_rules(policy: HubPolicy, block: Block) -> tuple[Ruleset, ...]:
    """The whole of a router's rules, IPv4 and IPv6."""
    indices = {item.index for item in policy.destinations}
    chains = (
        Chain("INPUT", tuple(_input(policy, block)), "input", policy=Verdict.DROP),
        Chain("FORWARD", tuple(_forward(block)), "forward", policy=Verdict.DROP),
        Chain("OUTPUT", _OUTPUT, "output"),
        Chain(_EGRESS, tuple(_egress(policy))),
        *(_accepting(f"{ALLOWED_PREFIX}{index}") for index in sorted(indices)),
        _accepting(ALLOWED_PREFIX),
        _REFUSING,
    )
    return Ruleset("ip", "filter", chains, policy.sets), _IPV6


def _input(policy: HubPolicy, block: Block) -> Iterator[Rule]:
    yield Rule(Match(in_link="lo"), Verdict.ACCEPT)
    yield from _TRACKED
    ours = [("udp", DNS_PORT), ("tcp", DNS_PORT)] if policy.dns else []
    if policy.proxy_port is not None:
        ours.append(("tcp", policy.proxy_port))
    gateway = IPv4Network(block.gateway)
    for protocol, port in ours:
        match = Match(protocol, block.inside, gateway, ports=(port,), in_link=BRIDGE)
        yield Rule(match, Verdict.ACCEPT)
    yield from _rest(block)


def _forward(block: Block) -> Iterator[Rule]:
    # Members among themselves: seen here only where bridged packets pass the rules (br_netfilter).
    yield Rule(Match(in_link=BRIDGE, out_link=BRIDGE), Verdict.ACCEPT)
    yield from _TRACKED
    yield Rule(Match(source=block.inside, in_link=BRIDGE, out_link=UPLINK), Jump(_EGRESS))
    yield from _rest(block)


def _rest(block: Block) -> Iterator[Rule]:
    yield Rule(Match(source=block.inside, in_link=BRIDGE), Jump(_REFUSE))
    yield Rule(Match(in_link=UPLINK), Jump(_REFUSE))
    # What is left has a forged source: an answer would go to somebody who never asked. The policy drops it.
    yield Rule(ANY, Log(REFUSED_PREFIX))


def _egress(policy: HubPolicy) -> Iterator[Rule]:
    opens_all = policy.audit or policy.mode is HubMode.ALLOW
    if not opens_all and policy.mode is not HubMode.RESTRICTED:
        yield Rule(ANY, Jump(_REFUSE))
        return
    yield from _networks(policy)
    # Past everything that is closed: a name that leads to a private address opens nothing.
    for item in policy.destinations:
        if item.set_name:
            for match in _matches(item, None):
                yield Rule(match, Jump(f"{ALLOWED_PREFIX}{item.index}"))
    yield Rule(ANY, Jump(ALLOWED_PREFIX if opens_all else _REFUSE))


def _networks(policy: HubPolicy) -> Iterator[Rule]:
    """Named and closed networks, the most specific first and a named one before its equal.

    So a packet meets first what says most about its address: a destination opens a closed range when it names that
    range or a part of it, and never because it is wider.
    """
    named = [(network, item) for item in policy.destinations for network in item.networks]
    closed: list[tuple[IPv4Network, HubDestination | None]] = [(network, None) for network in set(policy.blocked)]
    order = sorted([*named, *closed], key=lambda pair: (-pair[0].prefixlen, pair[1] is None, pair[0]))
    for network, item in order:
        if item is None:
            yield Rule(Match(destination=network), Jump(_REFUSE))
        else:
            for match in _matches(item, network):
                yield Rule(match, Jump(f"{ALLOWED_PREFIX}{item.index}"))


def _matches(item: HubDestination, network: IPv4Network | None) -> Iterator[Match]:
    """What `network` of a destination means in packets; None: its set."""
    named = "" if network is not None else item.set_name
    for protocol in item.protocols:
        ports = () if protocol == "icmp" else item.ports
        yield Match(protocol, destination=network, destination_set=named, ports=ports)


def _accepting(prefix: str) -> Chain:
    return Chain(prefix, (Rule(ANY, Log(prefix)), Rule(ANY, Verdict.ACCEPT)))


# An INVALID packet belongs to no connection, so there is nobody to tell.
_TRACKED: Final = (
    Rule(Match(states=_KNOWN), Verdict.ACCEPT),
    Rule(Match(states=frozenset({State.INVALID})), Verdict.DROP),
)
# Nothing of the router's own leaves: no socket of ours connects from here, and answers belong to a connection.
_OUTPUT: Final = (
    Rule(Match(out_link=UPLINK, states=_KNOWN), Verdict.ACCEPT),
    Rule(Match(out_link=UPLINK), Verdict.DROP),
)
_REFUSING: Final = Chain(
    _REFUSE,
    (
        Rule(ANY, Log(REFUSED_PREFIX)),
        Rule(Match(protocol="tcp"), Verdict.RESET),
        # Beyond this it is a storm, and answering makes it two.
        Rule(Match(limit=Limit(1000, 1000)), Verdict.REJECT),
        Rule(ANY, Verdict.DROP),
    ),
)
_IPV6: Final = Ruleset(
    "ip6",
    "filter",
    (
        Chain(
            "INPUT", (Rule(Match(in_link="lo"), Verdict.ACCEPT), Rule(ANY, Jump(_REFUSE))), "input", policy=Verdict.DROP
        ),
        Chain("FORWARD", (Rule(ANY, Jump(_REFUSE)),), "forward", policy=Verdict.DROP),
        _REFUSING,
    ),
)
