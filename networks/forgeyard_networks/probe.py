"""Does `deny` deny? What a script in a sandbox with that mode tried, and what its report proves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forgeyard_model.capabilities import Feature, Probe

FEATURES: Final = (Feature.NETWORK_DENY,)

# An address of TEST-NET-1: nobody answers there, so only an error of our own kernel comes back at once.
LOOK: Final = r"""
say interfaces "$(echo $(sed -n '3,$s/:.*//p' /proc/net/dev))"
say routes "$(echo $(sed 1d /proc/net/route))"
try connect timeout 1 bash -c ': >/dev/tcp/192.0.2.1/9'
"""


def deny_probes(seen: Mapping[str, str]) -> tuple[Probe, ...]:
    """What the report of a sandbox with network deny proves."""
    shown = f"interfaces: {seen.get('interfaces', 'unknown')}; connect {seen.get('connect', 'not tried')}"
    if denied(seen):
        return (Probe(Feature.NETWORK_DENY, works=True, by="network namespace with loopback only", details=shown),)
    cure = "check the runtime's configuration: it must make a network namespace and put nothing into it"
    return (Probe(Feature.NETWORK_DENY, works=False, details=shown, cure=cure),)


def denied(seen: Mapping[str, str]) -> bool:
    """Whether there was loopback alone, no route, and no way to connect."""
    alone = seen.get("interfaces") == "lo" and seen.get("routes") == ""
    return alone and seen.get("connect", "").startswith("refused: ")
