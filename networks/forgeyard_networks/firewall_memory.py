"""What `detect` found, remembered until the host is started anew or its programs change.

Finding out takes longer than a whole network, and a command that runs one job would do it each time. Remembering can
only be wrong in one direction: rules that can't be loaded end the attempt, and the memory with it.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from forgeyard_host.processes import boot_id
from forgeyard_networks.firewall.backend import PATH, Backend, HostBackend
from forgeyard_networks.firewall.detect import Firewall, detect
from forgeyard_networks.firewall.iptables import IptablesBackend
from forgeyard_networks.firewall.iptables_host import IptablesHost
from forgeyard_networks.firewall.nft import NftBackend
from forgeyard_networks.firewall.nft_host import NftHost

_VERSION: Final = 1
_PROGRAMS: Final = (
    *("iptables", "iptables-legacy", "iptables-nft", "nft"),
    *("iptables-legacy-restore", "ip6tables-legacy-restore", "iptables-nft-restore", "ip6tables-nft-restore"),
)


class FirewallMemory:
    """Kept in `directory`, which is root's alone. Blocking."""

    def __init__(self, directory: str) -> None:
        self._file = Path(directory, "firewall.json")

    def recall(self) -> Firewall:
        """What is known, or found out now.

        :raises SandboxError: as `detect`.
        """
        facts = _facts()
        try:
            known = json.loads(self._file.read_bytes())
            if known["facts"] == facts:
                return _read(known)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, of another version, or cut short: it is found out anew
        found = detect()
        self._keep(facts, found)
        return found

    def forget(self) -> None:
        """It proved wrong."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _keep(self, facts: list[Any], found: Firewall) -> None:
        words = _write(found)
        if words is None:
            return
        draft = self._file.with_name(f".firewall.{os.getpid()}")
        with suppress(OSError):  # then the next one finds out for itself
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_text(json.dumps({"facts": facts, **words}))
            draft.replace(self._file)


def _facts() -> list[Any]:
    """What an answer depends on: the kernel's start, and the programs as they are."""
    programs = []
    for name in _PROGRAMS:
        path = shutil.which(name, path=PATH)
        if path is not None:
            # Alternatives are links: which program one leads to decides.
            state = os.stat(path)  # noqa: PTH116  the fields are what is wanted
            programs.append([name, os.path.realpath(path), state.st_ino, state.st_mtime_ns])
    return [_VERSION, boot_id(), programs]


def _write(found: Firewall) -> dict[str, Any] | None:
    routers, host = _words(found.routers), _words(found.host)
    if routers is None or host is None:
        return None
    return {"routers": routers, "host": host, "nflog": found.nflog, "notes": list(found.notes)}


def _words(backend: Backend | HostBackend) -> list[Any] | None:
    match backend:
        case IptablesBackend(variant, version):
            return ["iptables", variant, version]
        case NftBackend(version):
            return ["nft", version]
        case IptablesHost(variant, version, lock):
            return ["iptables", variant, version, lock]
        case NftHost(version, compat):
            return ["nft", version, None if compat is None else _words(compat)]
    return None


def _read(known: dict[str, Any]) -> Firewall:
    kind, *words = known["routers"]
    routers: Backend = IptablesBackend(*words) if kind == "iptables" else NftBackend(*words)
    return Firewall(routers, _host(known["host"]), known["nflog"], tuple(known["notes"]))


def _host(words: list[Any]) -> HostBackend:
    kind, *rest = words
    if kind == "iptables":
        return IptablesHost(*rest)
    version, compat = rest
    return NftHost(version, None if compat is None else IptablesHost(*compat[1:]))
