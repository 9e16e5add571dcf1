"""Rules as data, without a word of any backend. One Rule is one line in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network
from typing import Final

LOG_GROUP: Final = 1
"""The NFLOG group that rules log into."""


class Verdict(StrEnum):
    """What becomes of a packet. RESET answers TCP, REJECT everything else; both at once."""

    ACCEPT = "accept"
    RESET = "reset"
    REJECT = "reject"
    DROP = "drop"
    RETURN = "return"
    MASQUERADE = "masquerade"


class State(StrEnum):
    """What connection tracking says of a packet."""

    NEW = "new"
    ESTABLISHED = "established"
    RELATED = "related"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate: packets per second, after a burst."""

    per_second: int
    burst: int


@dataclass(frozen=True, slots=True)
class Log:
    """Hand the packet's head to who listens, and go on. Bounded, so that a flood can't drown the listener."""

    prefix: str
    limit: Limit = Limit(50, 100)


@dataclass(frozen=True, slots=True)
class Jump:
    """Go on in another chain of the same ruleset."""

    chain: str


Action = Verdict | Log | Jump


@dataclass(frozen=True, slots=True)
class Match:
    """What a packet must be; an empty field matches all.

    :ivar protocol: tcp, udp or icmp. `ports`: destination ports, with tcp or udp only.
    :ivar destination_set: the name of a set of addresses.
    :ivar in_link, out_link: an interface's name; one that ends in ``*`` is a prefix.
    """

    protocol: str = ""
    source: IPv4Network | None = None
    destination: IPv4Network | None = None
    destination_set: str = ""
    ports: tuple[int, ...] = ()
    in_link: str = ""
    out_link: str = ""
    states: frozenset[State] = frozenset()
    limit: Limit | None = None


ANY: Final = Match()


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done with packets that match."""

    match: Match
    action: Action


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules in order.

    :ivar hook: input, forward, output or postrouting; empty for a chain that is only jumped to.
    :ivar shared: it takes its place beside other people's rules instead of being all there is at its hook.
    :ivar policy: what happens at the end of a chain with a hook.
    """

    name: str
    rules: tuple[Rule, ...]
    hook: str = ""
    shared: bool = False
    policy: Verdict = Verdict.ACCEPT


@dataclass(frozen=True, slots=True)
class Ruleset:
    """The chains of one table of one family.

    :ivar family: ip or ip6. `table`: filter or nat.
    :ivar sets: sets of addresses that its rules match; made with it, empty.
    """

    family: str
    table: str
    chains: tuple[Chain, ...]
    sets: tuple[str, ...] = ()


def refuse(match: Match) -> tuple[Rule, Rule]:
    """Refuse at once, each protocol in the way that its clients understand."""
    tcp = Match(protocol="tcp", source=match.source, in_link=match.in_link, out_link=match.out_link)
    return Rule(tcp, Verdict.RESET), Rule(match, Verdict.REJECT)
