"""What a job's resolver answers, asks others for, or refuses; and which addresses of others' answers it passes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Address, IPv4Network
from types import MappingProxyType
from typing import Final

from forgeyard_model.policy import NetworkMode
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.dns_wire import TYPE_A, TYPE_AAAA, TYPE_PTR, Question
from forgeyard_networks.names import LOCALHOST, normal_name

MEMBER_TTL: Final = 5
"""Seconds. Members keep their addresses; short all the same, since an answer costs nothing."""
MIN_OPEN: Final = 300
"""Seconds that an address stays open at least: connection pools outlive a TTL."""
MAX_OPEN: Final = 86400
_TTL_MARGIN: Final = 10
_REVERSE: Final = ".in-addr.arpa"
_FIRST_META: Final = 128
_META_TYPES: Final = range(_FIRST_META, 256)  # ANY, AXFR, TSIG …: about the exchange, not about a name
_OPT: Final = 41
_LOOPBACK: Final = IPv4Address("127.0.0.1")


class Verdict(Enum):
    """What to do with a question."""

    ADDRESS = "address"
    REVERSE = "reverse"
    EMPTY = "empty"
    FORWARD = "forward"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with what it needs: a member's address or name, or the destinations to open."""

    verdict: Verdict
    address: IPv4Address | None = None
    name: str = ""
    destinations: tuple[int, ...] = ()


REFUSE: Final = Decision(Verdict.REFUSE)
EMPTY: Final = Decision(Verdict.EMPTY)


@dataclass(frozen=True, slots=True)
class ResolverPolicy:
    """Of one attempt.

    :param mode: ALLOW asks the upstream for any name, RESTRICTED for those of `allow`, every other mode for none.
    :param closed: ranges beyond the private ones that no outside name may lead to: the host's own addresses.
    """

    mode: NetworkMode
    allow: Allowlist = field(default_factory=Allowlist)
    closed: tuple[IPv4Network, ...] = ()

    @property
    def forwards(self) -> bool:
        """Whether any name goes to an upstream server."""
        return self.mode in (NetworkMode.ALLOW, NetworkMode.RESTRICTED)

    @property
    def opens(self) -> bool:
        """Whether addresses are shut until a name leads to them."""
        return self.mode is NetworkMode.RESTRICTED

    def admits(self, address: IPv4Address) -> bool:
        """Whether an outside name may lead to `address` (no: DNS rebinding)."""
        return self.allow.admits(address, self.closed)


@dataclass(frozen=True, slots=True)
class NameRules:
    """A policy together with the members' names."""

    policy: ResolverPolicy
    addresses: Mapping[str, IPv4Address]
    reverse: Mapping[IPv4Address, str]

    @classmethod
    def of(cls, policy: ResolverPolicy, names: Mapping[str, IPv4Address]) -> NameRules:
        """:param names: as `name_table` makes it; an address leads back to the first of its names."""
        table = {LOCALHOST: _LOOPBACK, **names}
        reverse: dict[IPv4Address, str] = {}
        for name, address in table.items():
            reverse.setdefault(address, name)
        return cls(policy, MappingProxyType(table), MappingProxyType(reverse))

    def decide(self, question: Question) -> Decision:
        """What becomes of `question`. Names of members come before anything outside."""
        name = question.name
        if (address := self.addresses.get(name)) is not None:
            return Decision(Verdict.ADDRESS, address) if question.type == TYPE_A else EMPTY
        if name.endswith(_REVERSE) and (reversed_ := _reversed(name)) is not None:
            return self._reverse(question, reversed_)
        return self._outside(question)

    def _reverse(self, question: Question, address: IPv4Address) -> Decision:
        known = self.reverse.get(address)
        if known is not None:
            return Decision(Verdict.REVERSE, name=known) if question.type == TYPE_PTR else EMPTY
        return self._outside(question) if self.policy.admits(address) else REFUSE

    def _outside(self, question: Question) -> Decision:
        if not self.policy.forwards or question.type in _META_TYPES or question.type in (0, _OPT):
            return REFUSE
        if normal_name(question.name) is None:
            return REFUSE
        found = self.policy.allow.host_allowed(question.name)
        if self.policy.opens and (not found or question.type not in (TYPE_A, TYPE_AAAA)):
            return REFUSE  # records other than addresses carry data, and a job needs none of them to connect
        if question.type == TYPE_AAAA:
            return EMPTY  # there is no IPv6 in the network: asking would only tell the name
        return Decision(Verdict.FORWARD, destinations=found if self.policy.opens else ())


def opening(ttl: int) -> tuple[int, int]:
    """For the TTL of an answer: seconds that its addresses are open, and the TTL to pass on, which ends before that."""
    seconds = min(max(ttl, MIN_OPEN), MAX_OPEN)
    return seconds, min(max(ttl, 0), seconds - _TTL_MARGIN)


def admitted(policy: ResolverPolicy, addresses: Iterable[IPv4Address]) -> tuple[list[IPv4Address], list[IPv4Address]]:
    """Those an outside name may lead to, and the others."""
    kept: list[IPv4Address] = []
    removed: list[IPv4Address] = []
    for address in addresses:
        (kept if policy.admits(address) else removed).append(address)
    return kept, removed


def _reversed(name: str) -> IPv4Address | None:
    parts = name.removesuffix(_REVERSE).split(".")
    try:
        return IPv4Address(".".join(reversed(parts)))
    except ValueError:
        return None
