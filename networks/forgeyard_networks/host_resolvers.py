"""Which name servers this host uses. They are asked from the executor's own network, so that loopback stubs work.

No server is made up where the host names none: names of its own network would go to a stranger.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final

from forgeyard_host.failures import describe

RESOLV_CONF: Final = "/etc/resolv.conf"
MOST_SERVERS: Final = 3
"""As the C library takes of them (MAXNS)."""
_MOST_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Upstreams:
    """Servers in the host's order. `notes`: what was left out and why. `problem`: why there is none, or empty."""

    servers: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problem: str = ""


def host_resolvers(path: str = RESOLV_CONF) -> Upstreams:
    """The servers that `path` names. Reads the file anew: it changes while the executor runs.

    Its search domains and options are left out: a job looks up whole names.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return Upstreams((), problem=_no_server(_absent(path)))
    except OSError as error:
        return Upstreams((), problem=_no_server(f"{path} can't be read: {describe(error)}"))
    servers: list[str] = []
    notes: list[str] = []
    for line in text.splitlines():
        words = line.split("#", 1)[0].split(";", 1)[0].split()
        if len(words) < 2 or words[0] != "nameserver" or words[1] in servers:
            continue
        if cause := _unusable(words[1]):
            notes.append(f"name server {words[1][:64]!r} of {path} is left out: {cause}")
        elif len(servers) == MOST_SERVERS:
            notes.append(f"name server {words[1]!r} of {path} is left out: only the first {MOST_SERVERS} are used")
        else:
            servers.append(words[1])
    problem = "" if servers else _no_server(f"{path} names no usable server")
    return Upstreams(tuple(servers), tuple(notes), problem)


def _unusable(text: str) -> str:
    try:
        address = ip_address(text)
    except ValueError:
        return "not an address"
    if address.is_multicast:
        return "a multicast address"
    if isinstance(address, IPv6Address) and address.is_link_local and not address.scope_id:
        return "a link-local address without its interface, as in fe80::1%eth0"
    return ""


def _absent(path: str) -> str:
    found = Path(path)
    return f"{path} leads to {found.readlink()}, which is absent" if found.is_symlink() else f"{path} is absent"


def _no_server(cause: str) -> str:
    return f"this host has no usable name server, names outside the job's network can't be looked up: {cause}"
