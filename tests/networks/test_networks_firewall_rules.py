"""Rules as data: what a policy's rules decide for any address, and how each backend writes them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_networks.firewall.hub import HubDestination, HubMode, HubPolicy, hub_rules
from forgeyard_networks.firewall.iptables import restore_text
from forgeyard_networks.firewall.nft import nft_text
from forgeyard_networks.firewall.rules import Jump, Match, Ruleset, Verdict
from forgeyard_networks.ipam import Block
from forgeyard_networks.ranges import PRIVATE_NETWORKS

BLOCK = Block(IPv4Network("10.213.0.0/27"), 0)


def decision(rules: Ruleset, address: IPv4Address, port: int, protocol: str = "tcp") -> str:
    """The chain where a new connection from a member ends: A, A<index> or REFUSE."""
    egress = next(chain for chain in rules.chains if chain.name == "EGRESS")
    for rule in egress.rules:
        if _meets(rule.match, address, port, protocol):
            assert isinstance(rule.action, Jump)
            return rule.action.chain
    raise AssertionError("no rule decides")


def _meets(match: Match, address: IPv4Address, port: int, protocol: str) -> bool:
    return (
        match.protocol in ("", protocol)
        and (match.destination is None or address in match.destination)
        and (not match.ports or port in match.ports)
        and not match.destination_set
    )


def decide(policy: HubPolicy, address: str, port: int = 443, protocol: str = "tcp") -> str:
    return decision(hub_rules(policy, BLOCK)[0], IPv4Address(address), port, protocol)


def restricted(*cidrs: str, ports: tuple[int, ...] = (), blocked: tuple[IPv4Network, ...] = ()) -> HubPolicy:
    named = tuple(HubDestination(n, (IPv4Network(cidr),), ports=ports) for n, cidr in enumerate(cidrs))
    return HubPolicy(HubMode.RESTRICTED, named, blocked=(*PRIVATE_NETWORKS, *blocked))


def test_a_wide_destination_opens_no_private_range() -> None:
    """0.0.0.0/0 means the outside; what is private, link-local or the host's own must be named as such."""
    everything = restricted("0.0.0.0/0", ports=(443,))
    assert decide(everything, "8.8.8.8") == "A0"
    assert decide(everything, "8.8.8.8", 80) == "REFUSE"
    for address in ("10.1.2.3", "127.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "224.0.0.1", "0.1.2.3"):
        assert decide(everything, address) == "REFUSE"


def test_a_named_private_range_is_open_but_not_the_hosts_address_in_it() -> None:
    """Naming a range opens it whole or in part; an address of the host inside needs its own name."""
    host = IPv4Network("10.1.0.9/32")
    assert decide(restricted("10.0.0.0/8"), "10.1.0.9") == "A0"
    assert decide(restricted("10.1.0.0/16", blocked=(host,)), "10.1.0.8") == "A0"
    assert decide(restricted("10.1.0.0/16", blocked=(host,)), "10.1.0.9") == "REFUSE"
    assert decide(restricted("10.1.0.9/32", blocked=(host,)), "10.1.0.9") == "A0"
    assert decide(restricted("10.1.0.0/16"), "10.2.0.1") == "REFUSE"


def test_icmp_must_be_named() -> None:
    """A destination without protocols means tcp and udp; where icmp is named, its ports do not matter to it."""
    assert decide(restricted("8.8.8.0/24"), "8.8.8.8", 0, "icmp") == "REFUSE"
    named = HubDestination(0, (IPv4Network("8.8.8.0/24"),), ports=(443,), protocols=("tcp", "icmp"))
    policy = HubPolicy(HubMode.RESTRICTED, (named,))
    assert decide(policy, "8.8.8.8", 0, "icmp") == "A0"
    assert decide(policy, "8.8.8.8", 443, "udp") == "REFUSE"


@pytest.mark.parametrize("mode", [HubMode.DENY, HubMode.FETCH_ONLY])
def test_closed_modes_let_nothing_out(mode: HubMode) -> None:
    """Destinations open nothing in a mode that has none; only audit does."""
    named = (HubDestination(0, (IPv4Network("0.0.0.0/0"),)),)
    assert decide(HubPolicy(mode, named), "8.8.8.8") == "REFUSE"
    assert decide(HubPolicy(mode, audit=True), "8.8.8.8") == "A"


networks = st.builds(
    lambda value, length: IPv4Network((value, length), strict=False),
    st.integers(0, 2**32 - 1),
    st.integers(0, 32),
)


@given(
    named=st.lists(st.tuples(networks, st.lists(st.sampled_from([80, 443]), unique=True)), max_size=6),
    blocked=st.lists(networks, max_size=6),
    inside=st.booleans(),
    value=st.integers(0, 2**32 - 1),
    pick=st.integers(0, 20),
    opens_all=st.booleans(),
)
def test_an_address_is_open_exactly_when_what_names_it_is_as_specific_as_what_closes_it(
    named: list[tuple[IPv4Network, list[int]]],
    blocked: list[IPv4Network],
    inside: bool,
    value: int,
    pick: int,
    opens_all: bool,
) -> None:
    """The order of the rules gives, for every address, what the sentence above says."""
    known = [*(network for network, _ in named), *blocked]
    address = IPv4Address(value)
    if inside and known:
        network = known[pick % len(known)]
        address = network.network_address + value % network.num_addresses
    destinations = tuple(HubDestination(n, (net,), ports=tuple(ports)) for n, (net, ports) in enumerate(named))
    mode = HubMode.ALLOW if opens_all else HubMode.RESTRICTED
    got = decide(HubPolicy(mode, destinations, blocked=tuple(blocked)), str(address), 443)

    closes = max((network.prefixlen for network in blocked if address in network), default=-1)
    opens = any(
        address in network and network.prefixlen >= closes and (not ports or 443 in ports) for network, ports in named
    )
    assert (got != "REFUSE") == (opens or (opens_all and closes < 0))


def test_every_refusal_is_an_answer() -> None:
    """DROP stands only where an answer would go to the wrong one, or past a storm's bound, after a refusal."""
    for ruleset in hub_rules(HubPolicy(HubMode.ALLOW), BLOCK):
        refusing = next(chain for chain in ruleset.chains if chain.name == "REFUSE")
        actions = [rule.action for rule in refusing.rules if isinstance(rule.action, Verdict)]
        assert actions == [Verdict.RESET, Verdict.REJECT, Verdict.DROP]


def test_many_ports_take_several_lines_with_iptables_and_one_with_nft() -> None:
    """multiport takes fifteen."""
    ports = tuple(range(1, 34))
    rules = hub_rules(restricted("203.0.113.0/24", ports=ports), BLOCK)
    lines = [line for line in restore_text(rules, "ip").splitlines() if "-p tcp" in line and "-j A0" in line]
    assert [line.count(",") + 1 for line in lines] == [15, 15, 3]
    assert nft_text(rules).count("tcp dport { 1, 2,") == 1


def test_what_each_backend_writes() -> None:
    """One rule, both ways."""
    named = HubDestination(2, set_name="h2", ports=(443,), protocols=("tcp",))
    rules = hub_rules(HubPolicy(HubMode.RESTRICTED, (named,)), BLOCK)
    legacy, native = restore_text(rules, "ip"), nft_text(rules)
    assert "-A EGRESS -p tcp -m multiport --dports 443 -m set --match-set h2 dst -j A2" in legacy
    assert "tcp dport { 443 } ip daddr @h2 jump A2" in native
    limit = "-m limit --limit 50/s --limit-burst 100"
    assert f"-A A2 {limit} -j NFLOG --nflog-group 1 --nflog-prefix A2" in legacy
    assert 'limit rate 50/second burst 100 packets log prefix "A2" group 1' in native
    assert "set h2 { type ipv4_addr; flags timeout; }" in native
