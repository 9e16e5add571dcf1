"""Our chains beside other people's, with iptables: each behind one commented jump of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import SandboxError
from forgeyard_networks.firewall import iptc_edit
from forgeyard_networks.firewall.backend import Command, failed, has_ipv6, locked, run_all
from forgeyard_networks.firewall.edits import COMMENT, Edit, Op
from forgeyard_networks.firewall.iptables import PROGRAMS, restore_command, restore_text
from forgeyard_networks.firewall.rules import Ruleset

XTABLES_LOCK: Final = "/run/xtables.lock"
_DOCKER: Final = "DOCKER-USER"
_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class IptablesHost:
    """See HostBackend. `variant`: legacy or nft. `lock`: the lock file that every writer of legacy tables takes."""

    variant: str
    version: str = ""
    lock: str = XTABLES_LOCK

    @property
    def name(self) -> str:
        """As capabilities show it."""
        return f"iptables-{self.variant}"

    def check_usable(self) -> None:
        """See HostBackend."""
        for table in ("filter", "nat"):
            self._saved("ip", table)
        if has_ipv6():
            self._saved("ip6", "filter")

    def install(self, rulesets: Sequence[Ruleset]) -> None:
        """See HostBackend."""
        commands = [
            # Without its flush, only the chains that the text names are replaced, each table in one commit.
            self._command((*restore_command(self.variant, family), "--noflush"), text)
            for family in PROGRAMS
            if (text := restore_text(_known(rulesets), family))
        ]
        run_all(self.name, commands)
        for ruleset in _known(rulesets):
            self._edit(ruleset, keep=True)

    def remove(self, rulesets: Sequence[Ruleset]) -> None:
        """See HostBackend."""
        for ruleset in _known(rulesets):
            self._edit(ruleset, keep=False)

    def problems(self, rulesets: Sequence[Ruleset]) -> tuple[str, ...]:
        """See HostBackend."""
        return tuple(text for ruleset in _known(rulesets) for text in self._wrong(ruleset))

    def _wrong(self, ruleset: Ruleset) -> Iterator[str]:
        saved = self._saved(ruleset.family, ruleset.table)
        where = f"{PROGRAMS[ruleset.family]} table {ruleset.table}"
        expected = restore_text([ruleset], ruleset.family).splitlines()
        for chain in ruleset.chains:
            if len(_of(saved, chain.name)) != len(_of(expected, chain.name)):
                yield f"chain {chain.name} of {where} is not as it was made"
        for edit in edits(saved, ruleset, keep=True):
            yield f"{where}: {'no' if edit.op is Op.INSERT else 'a surplus'} jump from {edit.chain} to {edit.target}"

    def _edit(self, ruleset: Ruleset, *, keep: bool) -> None:
        found = edits(self._saved(ruleset.family, ruleset.table), ruleset, keep=keep)
        if not found:
            return
        if self.variant == "nft":
            self._restore_edits(ruleset, found)
            return
        # libiptc commits a whole table that it read before: nobody may write in between. It takes no lock itself.
        with locked(self.lock, self.name):
            self._commit_edits(ruleset, keep=keep)

    def _restore_edits(self, ruleset: Ruleset, found: Sequence[Edit]) -> None:
        text = "\n".join((f"*{ruleset.table}", *(edit.text for edit in found), "COMMIT\n"))
        command = (*restore_command(self.variant, ruleset.family), "--noflush")
        run_all(self.name, [self._command(command, text)])

    def _commit_edits(self, ruleset: Ruleset, *, keep: bool) -> None:
        # Some writers take no lock: the kernel then refuses a commit, and what was read is read again.
        for attempt in range(_ATTEMPTS):
            found = edits(self._saved(ruleset.family, ruleset.table), ruleset, keep=keep)
            try:
                iptc_edit.commit(ruleset.family, ruleset.table, found)
            except iptc_edit.CommitError as error:
                if attempt == _ATTEMPTS - 1:
                    raise failed(self.name, "rule_not_set", "rules can't be set", str(error)) from error
            else:
                return

    def _saved(self, family: str, table: str) -> list[str]:
        command = self._command((f"{PROGRAMS[family]}-{self.variant}-save", "-t", table))
        text = run_all(self.name, [command])[0]
        # iptables-save writes this as a comment and ends well.
        if "incompatible" in text:
            raise _incompatible(self.name, table)
        return text.splitlines()

    def _command(self, words: tuple[str, ...], text: str = "") -> Command:
        return Command(words, text, {"XTABLES_LOCKFILE": self.lock})


def edits(saved: Sequence[str], ruleset: Ruleset, *, keep: bool) -> tuple[Edit, ...]:
    """What makes a table hold each chain's jump once and at its place, or neither jump nor chain."""
    chains = {line.split()[0][1:] for line in saved if line.startswith(":")}
    found: list[Edit] = []
    for chain in ruleset.chains:
        wanted = chain.hook.upper()
        if wanted == "FORWARD" and _DOCKER in chains:
            wanted = _DOCKER
        jumps = _jumps(saved, chain.name)
        for place, count in jumps.items():
            surplus = count - 1 if keep and place == wanted else count
            found += [Edit(Op.DELETE, place, chain.name)] * surplus
        if keep and wanted not in jumps:
            found.append(Edit(Op.INSERT, wanted, chain.name))
        if not keep and chain.name in chains:
            found.append(Edit(Op.DROP_CHAIN, chain.name, chain.name))
    return tuple(found)


def _jumps(saved: Sequence[str], target: str) -> Mapping[str, int]:
    """How often our exact jump to `target` is in each chain."""
    end = f' -m comment --comment "{COMMENT}" -j {target}'
    found: dict[str, int] = {}
    for line in saved:
        words = line.split(" ", 2)
        if len(words) == 3 and words[0] == "-A" and f" {words[2]}" == end:
            found[words[1]] = found.get(words[1], 0) + 1
    return found


def _of(lines: Sequence[str], chain: str) -> list[str]:
    return [line for line in lines if line.startswith(f"-A {chain} ")]


def _known(rulesets: Sequence[Ruleset]) -> list[Ruleset]:
    return [item for item in rulesets if item.family == "ip" or has_ipv6()]


def _incompatible(backend: str, table: str) -> SandboxError:
    return failed(
        backend,
        "backend_incompatible",
        f"the rules in this host's table {table} were made by another program and can't be listed",
        "iptables-save: table is incompatible, use 'nft' tool",
        "install nft, which lists and changes them all",
    )
