"""Which programs enforce policies on this host: found once, by using them, before the first job."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from forgeyard_host.netfilter import PacketLog
from forgeyard_host.netns import NetNamespace, new_namespace
from forgeyard_model.errors import SandboxError
from forgeyard_networks.firewall.backend import PATH, Backend, HostBackend, at, failed, run
from forgeyard_networks.firewall.hub import HubDestination, HubMode, HubPolicy, hub_rules
from forgeyard_networks.firewall.iptables import IptablesBackend
from forgeyard_networks.firewall.iptables_host import XTABLES_LOCK, IptablesHost
from forgeyard_networks.firewall.nft import NftBackend
from forgeyard_networks.firewall.nft_host import NftHost
from forgeyard_networks.ipam import Block

_SAMPLE: Final = Block(IPv4Network("10.213.0.0/27"), 0)
_SET: Final = "sample"


@dataclass(frozen=True, slots=True)
class Firewall:
    """What this host enforces network policies with.

    :ivar routers: loads the rules of attempts' routers. `host`: keeps those of the executor's own namespace.
    :ivar nflog: connections can be logged, as evidence needs it.
    :ivar notes: what was tried and did not work.
    """

    routers: Backend
    host: HostBackend
    nflog: bool
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line for capabilities."""
        log = "NFLOG" if self.nflog else "no NFLOG"
        routers, host = (f"{item.name} {item.version}".strip() for item in (self.routers, self.host))
        return f"routers: {routers}; host: {host}; {log}; sets of addresses"


def detect(ns_fd: int | None = None, *, path: str = PATH, lock: str = XTABLES_LOCK) -> Firewall:
    """Find, try and check them. Blocking, some tens of milliseconds.

    :param ns_fd: the executor's namespace, None for the caller's.
    :param path: directories where programs are looked for.
    :param lock: the lock file of legacy tables.
    :raises SandboxError: NETWORK_SETUP_FAILED, naming the backend that fails: no policy can be enforced then.
    """
    host = host_backend(path, lock)
    at(ns_fd, host.check_usable)
    routers, nflog, notes = router_backend(path)
    return Firewall(routers, host, nflog, notes)


def host_backend(path: str = PATH, lock: str = XTABLES_LOCK) -> HostBackend:
    """What the host's own rules are kept with: what its ``iptables`` is, or nft.

    :raises SandboxError: NETWORK_SETUP_FAILED, reason no_firewall_program.
    """
    stock = _version(path, "iptables") or _version(path, "iptables-nft") or _version(path, "iptables-legacy")
    if "legacy" in stock and _has(path, "iptables-legacy-restore"):
        return IptablesHost("legacy", _number(stock), lock)
    through_nft = IptablesHost("nft", _number(stock), lock) if _has(path, "iptables-nft-restore") else None
    if _has(path, "nft"):
        return NftHost(_number(_version(path, "nft")), through_nft)
    if through_nft is not None:
        return through_nft
    raise failed(
        "no backend",
        "no_firewall_program",
        "this host has neither iptables nor nft",
        f"looked in {path}",
        "install iptables or nftables",
    )


def router_backend(path: str = PATH) -> tuple[Backend, bool, tuple[str, ...]]:
    """The fastest program that really loads a router's rules here, whether NFLOG works, and what did not work.

    :raises SandboxError: NETWORK_SETUP_FAILED, reason no_firewall_program.
    """
    notes: list[str] = []
    for backend in _candidates(path):
        try:
            return backend, _tried(backend), tuple(notes)
        except SandboxError as error:
            notes.append(str(error))
    raise failed(
        "no backend",
        "no_firewall_program",
        "no program can set rules in a namespace of this host",
        "; ".join(notes) or f"looked in {path}",
        "install iptables or nftables, and allow their kernel modules",
    )


def _candidates(path: str) -> Iterator[Backend]:
    # In the order of what a load takes: a router is nobody else's, so the host's choice does not bind here.
    if _has(path, "iptables-legacy-restore") and _has(path, "ip6tables-legacy-restore"):
        yield IptablesBackend("legacy", _number(_version(path, "iptables-legacy")))
    if _has(path, "nft"):
        yield NftBackend(_number(_version(path, "nft")))
    if _has(path, "iptables-nft-restore") and _has(path, "ip6tables-nft-restore"):
        yield IptablesBackend("nft", _number(_version(path, "iptables-nft")))


def _tried(backend: Backend) -> bool:
    """Whether NFLOG works beside `backend`, which has loaded all kinds of rules and read them back.

    :raises SandboxError: it can't.
    """
    destination = HubDestination(0, (_SAMPLE.network,), "", (1, 2))
    policy = HubPolicy(HubMode.RESTRICTED, (destination, HubDestination(1, set_name=_SET)), dns=True, proxy_port=3128)
    scratch = new_namespace()
    try:
        backend.load_in(scratch.fd, hub_rules(policy, _SAMPLE))
        sets = backend.sets_in(scratch.fd)
        try:
            sets.add(_SET, IPv4Address("192.0.2.1"), 300)
        finally:
            sets.close()
        listing = backend.listing(scratch.fd)
        missing = [name for name in ("FORWARD", "EGRESS", "REFUSE", "A1", _SET) if name not in listing]
        if missing:
            raise failed(backend.name, "rule_not_set", "rules were set but are not there", ", ".join(missing))
        return _logs(scratch)
    finally:
        scratch.close()


def _logs(scratch: NetNamespace) -> bool:
    try:
        PacketLog(scratch.fd).close()
    except SandboxError:
        return False
    return True


def _has(path: str, program: str) -> bool:
    return shutil.which(program, path=path) is not None


def _version(path: str, program: str) -> str:
    """What a program says of its version, empty when it is not there or does not run."""
    if not _has(path, program):
        return ""
    try:
        return run(program, program, "-V" if program != "nft" else "--version").strip()
    except SandboxError:
        return ""


def _number(text: str) -> str:
    found = re.search(r"v(\d[\w.]*)", text)
    return found[1] if found else ""
