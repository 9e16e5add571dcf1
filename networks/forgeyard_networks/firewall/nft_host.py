"""Our chains beside other people's, with nft: in tables of our own, at the same hooks as theirs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from forgeyard_model.errors import SandboxError
from forgeyard_networks.firewall.backend import run
from forgeyard_networks.firewall.iptables_host import IptablesHost
from forgeyard_networks.firewall.nft import TABLE, families, nft_text
from forgeyard_networks.firewall.rules import Ruleset

log: Final = logging.getLogger("forgeyard.networks")


@dataclass(frozen=True, slots=True)
class NftHost:
    """See HostBackend.

    An accept of ours does not beat a drop in somebody else's table. The one that many hosts have, made by Docker or a
    firewall through iptables-nft, therefore gets our forward chain as well, through that program.

    :ivar compat: that program, None where the host has none.
    """

    version: str = ""
    compat: IptablesHost | None = None

    @property
    def name(self) -> str:
        """As capabilities show it."""
        return "nft"

    def check_usable(self) -> None:
        """See HostBackend."""
        run(self.name, "nft", "list", "ruleset")

    def install(self, rulesets: Sequence[Ruleset]) -> None:
        """See HostBackend."""
        run(self.name, "nft", "-f", "-", text=nft_text(rulesets))
        compat = self._compat(self._there())
        if compat is not None:
            compat.install(_forward(rulesets))

    def remove(self, rulesets: Sequence[Ruleset]) -> None:
        """See HostBackend."""
        compat = self._compat(self._there())
        if compat is not None:
            compat.remove(_forward(rulesets))
        text = "".join(f"add table {name} {TABLE}\ndelete table {name} {TABLE}\n" for name in families(rulesets))
        run(self.name, "nft", "-f", "-", text=text)

    def problems(self, rulesets: Sequence[Ruleset]) -> tuple[str, ...]:
        """See HostBackend."""
        there = self._there()
        wanted = _rule_counts(nft_text(rulesets))
        found = [
            f"chain {name[1]} of nft table {name[0]} is not as it was made"
            for name in wanted
            if there.get(name) != wanted[name]
        ]
        compat = self._compat(there)
        return (*found, *(compat.problems(_forward(rulesets)) if compat is not None else ()))

    def _there(self) -> Mapping[tuple[str, str], int]:
        return _rule_counts(run(self.name, "nft", "list", "ruleset"))

    def _compat(self, there: Mapping[tuple[str, str], int]) -> IptablesHost | None:
        """The program that made the table where forwarded packets may be dropped, if there is one and it can."""
        if self.compat is None or ("ip filter", "FORWARD") not in there:
            return None
        try:
            self.compat.check_usable()
        except SandboxError as error:
            if error.reason != "backend_incompatible":
                raise
            # A table of that name which nft made. Whether it lets our packets pass is for the forwarding probe to see.
            log.warning("no rule of ours is put into table ip filter, which %s can't list", self.compat.name)
            return None
        return self.compat


def _forward(rulesets: Sequence[Ruleset]) -> list[Ruleset]:
    return [
        replace(item, chains=tuple(chain for chain in item.chains if chain.hook == "forward"))
        for item in rulesets
        if (item.family, item.table) == ("ip", "filter")
    ]


def _rule_counts(text: str) -> dict[tuple[str, str], int]:
    """How many rules each chain has, by table and name, in what nft lists or reads."""
    found: dict[tuple[str, str], int] = {}
    table = chain = ""
    for line in map(str.strip, text.splitlines()):
        if opened := re.fullmatch(r"table (\S+ \S+) \{", line):
            table = opened[1]
        elif opened := re.fullmatch(r"chain (\S+) \{", line):
            chain = opened[1]
            found[table, chain] = 0
        elif line == "}":
            chain = ""
        elif chain and line and not line.startswith(("type ", "#")):
            found[table, chain] += 1
    return found
