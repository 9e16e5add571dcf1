"""Forwarding in the executor's own namespace: only on the interfaces that routes use, put back at the end.

The switch for a whole host, net.ipv4.ip_forward, makes a router of every interface it has. The kernel asks only the
interface that a packet came in by: an uplink for the way out, and an interface with a route for the way back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from forgeyard_host.failures import describe
from forgeyard_networks.firewall.backend import failed, has_ipv6
from forgeyard_networks.topology import HOST_LINKS

_CONF: Final = Path("/proc/sys/net/ipv4/conf")
_ROUTES: Final = Path("/proc/thread-self/net/route")


def uplink_sysctls(link: str) -> dict[str, str]:
    """For the host's end of an uplink, as `netns.set_sysctls` takes them: it forwards, and has no IPv6."""
    values = {f"net.ipv4.conf.{link}.forwarding": "1"}
    if has_ipv6():
        values[f"net.ipv6.conf.{link}.disable_ipv6"] = "1"
    return values


def turn_on(record: Path, backend: str) -> None:
    """Let the interfaces of the calling thread's namespace that routes use forward; what they had goes to `record`.

    :raises SandboxError: NETWORK_SETUP_FAILED, reason forwarding_forbidden.
    """
    off = [link for link in _routed() if _read(link) == "0"]
    if not off:
        return
    try:
        kept = [*_recorded(record), *off]
        _keep(record, sorted(set(kept)))  # before the act, and whole: a crash must not lose what was
        for link in off:
            _path(link).write_text("1")
    except OSError as error:
        raise failed(
            backend,
            "forwarding_forbidden",
            "this host does not let the executor turn forwarding on",
            describe(error),
            "set net.ipv4.ip_forward=1 on the host, or give the executor a writable /proc/sys/net",
        ) from error


def restore(record: Path, backend: str) -> None:
    """Put back what `turn_on` changed, and forget it. An interface that is gone needs nothing.

    :raises SandboxError: NETWORK_SETUP_FAILED, reason forwarding_not_restored.
    """
    try:
        for link in _recorded(record):
            if _path(link).exists():
                _path(link).write_text("0")
        record.unlink(missing_ok=True)
    except OSError as error:
        raise failed(
            backend, "forwarding_not_restored", "forwarding can't be put back as it was", describe(error)
        ) from error


def problems() -> tuple[str, ...]:
    """Interfaces with a route that do not forward."""
    return tuple(f"{link} does not forward" for link in _routed() if _read(link) == "0")


def _routed() -> list[str]:
    """Interfaces that IPv4 routes lead to, without uplinks of ours and loopback."""
    lines = _ROUTES.read_text().splitlines()[1:]
    names = {line.split(None, 1)[0] for line in lines if line.strip()}
    return sorted(name for name in names if name not in ("lo", "*") and not name.startswith(HOST_LINKS))


def _recorded(record: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(record.read_text())]
    except FileNotFoundError:
        return []


def _keep(record: Path, links: list[str]) -> None:
    made = record.with_suffix(".new")
    made.write_text(json.dumps(links))
    made.replace(record)


def _path(link: str) -> Path:
    return _CONF / link / "forwarding"


def _read(link: str) -> str:
    try:
        return _path(link).read_text().strip()
    except FileNotFoundError:  # it went meanwhile
        return ""
