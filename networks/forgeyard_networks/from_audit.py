"""From what a job reached under audit to the restricted policy that would have sufficed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.network import DestinationRecord, DestinationVerdict, NetworkEvidence
from forgeyard_model.policy import PROTOCOLS, EgressPolicy, NetworkDestination, NetworkMode, NetworkPolicy
from forgeyard_networks.allowlist import Allowlist


@dataclass(frozen=True, slots=True)
class SufficientPolicy:
    """The policy, and what it can't say or what its reader should look at, a line each."""

    policy: NetworkPolicy
    remarks: tuple[str, ...]

    def document(self) -> str:
        """YAML of a job file's ``network``, the remarks in front as comments."""
        lines = [f"# {text}" for text in self.remarks]
        if self.policy.egress is None:
            return "\n".join([*lines, "network: deny", ""])
        lines += ["network:", "  restricted:", "    allow:"]
        lines += [f"      - {{{', '.join(_words(item))}}}" for item in self.policy.egress.destinations]
        return "\n".join([*lines, ""])


def sufficient_policy(evidence: NetworkEvidence) -> SufficientPolicy:
    """By host name where the job's resolver led there, else by address.

    :raises InvalidRequest: the evidence is of a network that let through only what a policy named, or of none of ours.
    """
    if not evidence.audit:
        cure = "run the job with network: {audit: true} first: what was refused here may be needed as well"
        raise InvalidRequest("network", evidence.mode.value, cure)
    allowed = [row for row in evidence.destinations if row.verdict is DestinationVerdict.ALLOWED]
    named = [row for row in allowed if row.protocol in PROTOCOLS]
    remarks = [f"protocol {row.protocol} to {row.address} can't be named" for row in allowed if row not in named]
    remarks += [
        f"refused under audit too: {row.name or row.address} port {row.port}/{row.protocol}" for row in evidence.refused
    ]
    if evidence.truncated:
        remarks.append(f"{evidence.truncated} connections had no row in the result: this policy is not complete")
    destinations = tuple(_destinations(named))
    if not destinations:
        return SufficientPolicy(NetworkPolicy(NetworkMode.DENY), ("nothing outside was reached", *remarks))
    Allowlist.from_destinations(destinations)  # what is printed here has to be accepted there
    return SufficientPolicy(NetworkPolicy(NetworkMode.RESTRICTED, EgressPolicy(destinations)), tuple(remarks))


def _destinations(rows: Iterable[DestinationRecord]) -> Iterator[NetworkDestination]:
    """One for each name or address and set of ports; tcp and udp together where their ports are the same."""
    ports: dict[str, dict[str, set[int]]] = {}
    for row in rows:
        # Names that share an address are told apart by nothing that the router sees: each may be the one.
        names = filter(_can_be_named, dict.fromkeys((row.name, *row.names)))
        for target in tuple(names) or (row.address,):
            ports.setdefault(target, {}).setdefault(row.protocol, set()).add(row.port)
    for target in sorted(ports):
        yield from _of_target(target, ports[target])


def _can_be_named(name: str) -> bool:
    """Whether a policy can have it: a job may look up names that are no host names, such as those with ``_``."""
    try:
        NetworkDestination(host=name).check()
    except InvalidRequest:
        return False
    return True


def _of_target(target: str, ports: dict[str, set[int]]) -> Iterator[NetworkDestination]:
    by_ports: dict[tuple[int, ...], list[str]] = {}
    for protocol in sorted(ports):
        listed = () if protocol == "icmp" else tuple(sorted(ports[protocol]))
        by_ports.setdefault(listed, []).append(protocol)
    is_address = target.replace(".", "").isdigit()
    for listed, protocols in by_ports.items():
        yield NetworkDestination(
            host="" if is_address else target,
            cidr=f"{target}/32" if is_address else "",
            ports=listed,
            protocols=tuple(protocols),
        )


def _words(item: NetworkDestination) -> Iterator[str]:
    # A name's last label has a letter and an address a slash: neither needs quotes in YAML.
    yield f"host: {item.host}" if item.host else f"cidr: {item.cidr}"
    if item.ports:
        yield f"ports: [{', '.join(map(str, item.ports))}]"
    yield f"protocols: [{', '.join(item.protocols)}]"
