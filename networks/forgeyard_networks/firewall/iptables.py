"""iptables, in either of its variants: rendering, and routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_host.netfilter import AddressSets
from forgeyard_networks.firewall.backend import LOCK_WAIT, Command, at, has_ipv6, run_all
from forgeyard_networks.firewall.rules import LOG_GROUP, Action, Chain, Jump, Limit, Log, Match, Ruleset, Verdict

_TARGETS: Final = {
    Verdict.ACCEPT: "ACCEPT",
    Verdict.DROP: "DROP",
    Verdict.RETURN: "RETURN",
    Verdict.MASQUERADE: "MASQUERADE",
    Verdict.RESET: "REJECT --reject-with tcp-reset",
}
_REJECT: Final = {"ip": "icmp-admin-prohibited", "ip6": "icmp6-adm-prohibited"}
_MULTIPORT: Final = 15
PROGRAMS: Final = {"ip": "iptables", "ip6": "ip6tables"}
# A namespace's own lock, since nobody else writes there: a router never waits for the host's firewall.
_OWN_LOCK: Final = {"XTABLES_LOCKFILE": "/proc/self/ns/net"}


@dataclass(frozen=True, slots=True)
class IptablesBackend:
    """Routers through ``iptables-<variant>-restore``. `variant`: legacy or nft."""

    variant: str
    version: str = ""

    @property
    def name(self) -> str:
        """As capabilities show it."""
        return f"iptables-{self.variant}"

    def load_in(self, ns_fd: int | None, rulesets: Sequence[Ruleset]) -> None:
        """Load; see Backend. IPv4 and IPv6 at the same time, each by a process of its own."""
        rulesets = [item for item in rulesets if item.family == "ip" or has_ipv6()]
        self._make_sets(ns_fd, rulesets)
        commands = [
            Command(restore_command(self.variant, family), text, _OWN_LOCK)
            for family in PROGRAMS
            if (text := restore_text(rulesets, family))
        ]
        at(ns_fd, lambda: run_all(self.name, commands))

    def listing(self, ns_fd: int | None) -> str:
        """What ``iptables-save`` shows; see Backend."""
        families = PROGRAMS if has_ipv6() else ("ip",)
        commands = [Command((f"{PROGRAMS[family]}-{self.variant}-save",)) for family in families]
        return "".join(at(ns_fd, lambda: run_all(self.name, commands)))

    def sets_in(self, ns_fd: int) -> AddressSets:
        """The ipsets there; see Backend."""
        return AddressSets.at(ns_fd)

    def _make_sets(self, ns_fd: int | None, rulesets: Sequence[Ruleset]) -> None:
        names = [name for item in rulesets for name in item.sets]
        if not names or ns_fd is None:
            return
        sets = AddressSets.at(ns_fd)
        try:
            for name in names:
                sets.create(name)
        finally:
            sets.close()


def restore_command(variant: str, family: str) -> tuple[str, ...]:
    """Loads what `restore_text` writes, and waits for the lock for a bounded time."""
    return f"{PROGRAMS[family]}-{variant}-restore", "-w", str(LOCK_WAIT)


def restore_text(rulesets: Sequence[Ruleset], family: str) -> str:
    """Input of ``iptables-restore`` for one family; empty when there is nothing for it."""
    return "".join("\n".join(_table(item)) + "\n" for item in rulesets if item.family == family)


def _table(ruleset: Ruleset) -> Iterator[str]:
    yield f"*{ruleset.table}"
    for chain in ruleset.chains:
        policy = chain.policy.upper() if chain.hook and not chain.shared else "-"
        yield f":{chain.name} {policy} [0:0]"
    for chain in ruleset.chains:
        yield from _rules(chain, ruleset.family)
    yield "COMMIT"


def _rules(chain: Chain, family: str) -> Iterator[str]:
    for rule in chain.rules:
        for ports in _portions(rule.match.ports):
            words = ["-A", chain.name, *_match(rule.match, ports)]
            if isinstance(rule.action, Log):
                words.append(_limit(rule.action.limit))
            yield " ".join((*words, "-j", _target(rule.action, family)))


def _portions(ports: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield ports[:_MULTIPORT]
    for start in range(_MULTIPORT, len(ports), _MULTIPORT):
        yield ports[start : start + _MULTIPORT]


def _match(match: Match, ports: tuple[int, ...]) -> Iterator[str]:
    if match.in_link:
        yield f"-i {_link(match.in_link)}"
    if match.out_link:
        yield f"-o {_link(match.out_link)}"
    if match.source is not None:
        yield f"-s {match.source}"
    if match.destination is not None:
        yield f"-d {match.destination}"
    if match.protocol:
        yield f"-p {match.protocol}"
    if ports:
        yield f"-m multiport --dports {','.join(map(str, ports))}"
    if match.destination_set:
        yield f"-m set --match-set {match.destination_set} dst"
    if match.states:
        yield f"-m conntrack --ctstate {','.join(sorted(state.upper() for state in match.states))}"
    if match.limit is not None:
        yield _limit(match.limit)


def _target(action: Action, family: str) -> str:
    match action:
        case Jump(chain):
            target = chain
        case Log(prefix):
            target = f"NFLOG --nflog-group {LOG_GROUP} --nflog-prefix {prefix}"
        case Verdict.REJECT:
            target = f"REJECT --reject-with {_REJECT[family]}"
        case verdict:
            target = _TARGETS[verdict]
    return target


def _limit(limit: Limit) -> str:
    return f"-m limit --limit {limit.per_second}/s --limit-burst {limit.burst}"


def _link(name: str) -> str:
    return name[:-1] + "+" if name.endswith("*") else name
