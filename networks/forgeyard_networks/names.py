"""Names of a job's network: what counts as one, and the table of those that its members have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from typing import Final

from forgeyard_model.errors import InvalidRequest

MOST_NAME: Final = 253
LOCALHOST: Final = "localhost"
RESERVED: Final = frozenset({LOCALHOST, "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
# With '_': names made from images and records such as _dmarc have it, though host names (RFC 1123) do not.
_NAME: Final = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_CURE: Final = "write a host name: letters, digits, - and _, in labels of at most 63 with dots between"


@dataclass(frozen=True, slots=True)
class MemberNames:
    """A member of the network, by the names it is found under."""

    name: str
    address: IPv4Address
    aliases: tuple[str, ...] = ()
    hostname: str = ""

    def all(self) -> tuple[str, ...]:
        """Each once, its host name first: that is the one an address leads back to."""
        own = self.hostname or self.name
        return tuple(dict.fromkeys(text.removesuffix(".").lower() for text in (own, self.name, *self.aliases)))


def normal_name(text: str) -> str | None:
    """`text` in lower case and without its last dot; None when that is no name that a host could have."""
    name = text.removesuffix(".").lower()
    return name if len(name) <= MOST_NAME and _NAME.fullmatch(name) else None


def is_address(text: str) -> bool:
    """Whether `text` is an address of either family."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def check_name(text: str, field: str = "name") -> str:
    """`text` as members are known by it.

    :raises InvalidRequest: names the field and what is wrong with the name.
    """
    name = normal_name(text)
    if name is None:
        raise InvalidRequest(field, text, _CURE)
    if name in RESERVED or name.endswith(f".{LOCALHOST}"):
        raise InvalidRequest(field, text, "choose another name: this one is always the machine itself")
    if name.rpartition(".")[2].isdigit():
        raise InvalidRequest(field, text, "choose a name whose last label is no number: this reads as an address")
    return name


def name_table(members: Sequence[MemberNames]) -> dict[str, IPv4Address]:
    """Every name of every member, checked.

    :raises InvalidRequest: a name that is none, or one that two members have.
    """
    table: dict[str, IPv4Address] = {}
    owners: dict[str, str] = {}
    for member, name, field in _named(members):
        owner = owners.setdefault(check_name(name, field), member.name)
        if owner != member.name:
            raise InvalidRequest(field, name, f"choose another name: {owner} has this one")
        table[name] = member.address
    return table


def _named(members: Sequence[MemberNames]) -> Iterator[tuple[MemberNames, str, str]]:
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            raise InvalidRequest("name", member.name, "choose another name: two members have this one")
        seen.add(member.name)
        for name in member.all():
            kind = "aliases" if name in member.aliases else "hostname" if name == member.hostname else "name"
            yield member, name, f"{member.name[:64]}.{kind}"
