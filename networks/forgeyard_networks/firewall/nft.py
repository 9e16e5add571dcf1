"""nftables: rendering, and routers. All our chains of a family are in one table, which is replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

from forgeyard_networks.firewall.backend import at, has_ipv6, run
from forgeyard_networks.firewall.rules import LOG_GROUP, Action, Chain, Jump, Limit, Log, Match, Ruleset, Verdict

TABLE: Final = "forgeyard"
_VERDICTS: Final = {
    Verdict.ACCEPT: "accept",
    Verdict.DROP: "drop",
    Verdict.RETURN: "return",
    Verdict.MASQUERADE: "masquerade",
    Verdict.RESET: "reject with tcp reset",
}
_REJECT: Final = {"ip": "reject with icmp type admin-prohibited", "ip6": "reject with icmpv6 type admin-prohibited"}
# A little before everybody else's: what we refuse is refused by us, and what we translate is translated by us.
_PRIORITIES: Final = {"filter": "filter - 5", "nat": "srcnat - 5"}


@dataclass(frozen=True, slots=True)
class NftBackend:
    """Routers through ``nft -f``."""

    version: str = ""

    @property
    def name(self) -> str:
        """As capabilities show it."""
        return "nft"

    def load_in(self, ns_fd: int | None, rulesets: Sequence[Ruleset]) -> None:
        """Load, all of it in one transaction; see Backend."""
        text = nft_text(rulesets)
        at(ns_fd, lambda: run(self.name, "nft", "-f", "-", text=text))

    def listing(self, ns_fd: int | None) -> str:
        """What ``nft list ruleset`` shows; see Backend."""
        return at(ns_fd, lambda: run(self.name, "nft", "list", "ruleset"))

    def sets_in(self, ns_fd: int) -> NftSets:
        """The sets of our table; see Backend."""
        return NftSets(ns_fd)


class NftSets:
    """See Sets. One process for each address, which takes ten times as long as an ipset."""

    def __init__(self, ns_fd: int) -> None:
        self._ns_fd = ns_fd

    def add(self, name: str, address: IPv4Address, seconds: int) -> None:
        """See Sets."""
        where = f"element ip {TABLE} {name} {{ {address}"
        # Adding what is there renews nothing. All three are one transaction, so that it is never absent.
        text = f"add {where} }}\ndelete {where} }}\nadd {where} timeout {seconds}s }}\n"
        at(self._ns_fd, lambda: run("nft", "nft", "-f", "-", text=text))

    def close(self) -> None:
        """Nothing is kept."""


def nft_text(rulesets: Sequence[Ruleset]) -> str:
    """Input of ``nft -f`` that makes or replaces our tables."""
    return "".join("\n".join(_family(rulesets, family)) + "\n" for family in families(rulesets))


def families(rulesets: Sequence[Ruleset]) -> tuple[str, ...]:
    """Those that rulesets are for and this kernel has."""
    found = {item.family for item in rulesets}
    return tuple(family for family in ("ip", "ip6") if family in found and (family == "ip" or has_ipv6()))


def _family(rulesets: Sequence[Ruleset], family: str) -> Iterator[str]:
    # Adding first makes deleting no error; the kernel carries out all three or none.
    yield f"add table {family} {TABLE}"
    yield f"delete table {family} {TABLE}"
    yield f"table {family} {TABLE} {{"
    for ruleset in rulesets:
        if ruleset.family == family:
            yield from (f"set {name} {{ type ipv4_addr; flags timeout; }}" for name in ruleset.sets)
            for chain in ruleset.chains:
                yield from _chain(chain, ruleset)
    yield "}"


def _chain(chain: Chain, ruleset: Ruleset) -> Iterator[str]:
    yield f"chain {chain.name} {{"
    if chain.hook:
        kind, priority = ruleset.table, _PRIORITIES[ruleset.table]
        yield f"type {kind} hook {chain.hook} priority {priority}; policy {chain.policy.value};"
    for rule in chain.rules:
        yield " ".join((*_match(rule.match), _action(rule.action, ruleset.family)))
    yield "}"


def _match(match: Match) -> Iterator[str]:
    if match.in_link:
        yield f'iifname "{match.in_link}"'
    if match.out_link:
        yield f'oifname "{match.out_link}"'
    if match.source is not None:
        yield f"ip saddr {match.source}"
    if match.destination is not None:
        yield f"ip daddr {match.destination}"
    if match.ports:
        yield f"{match.protocol} dport {{ {', '.join(map(str, match.ports))} }}"
    elif match.protocol:
        yield f"meta l4proto {match.protocol}"
    if match.destination_set:
        yield f"ip daddr @{match.destination_set}"
    if match.states:
        yield f"ct state {{ {', '.join(sorted(state.value for state in match.states))} }}"
    if match.limit is not None:
        yield _limit(match.limit)


def _action(action: Action, family: str) -> str:
    match action:
        case Jump(chain):
            text = f"jump {chain}"
        case Log(prefix, limit):
            text = f'{_limit(limit)} log prefix "{prefix}" group {LOG_GROUP}'
        case Verdict.REJECT:
            text = _REJECT[family]
        case verdict:
            text = _VERDICTS[verdict]
    return text


def _limit(limit: Limit) -> str:
    return f"limit rate {limit.per_second}/second burst {limit.burst} packets"
