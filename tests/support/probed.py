"""What probes say of a host in tests."""

from __future__ import annotations

from forgeyard_executor.capabilities_probe import claims
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe, ResourceControls
from forgeyard_model.policy import IsolationLevel, NetworkMode

ADAPTER = ExecutorCapabilities(
    runtime="runc",
    isolation_levels=frozenset({IsolationLevel.PROCESS, IsolationLevel.NAMESPACE, IsolationLevel.CONTAINER}),
    network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}),
    resource_controls=ResourceControls(cpu=True, memory=True, pids=True, disk=True),
    user_namespace=True,
    seccomp=True,
)


def found(*missing: Feature, unseen: tuple[Feature, ...] = ()) -> ExecutorCapabilities:
    """A result in which everything works but `missing`, and `unseen` could not be probed."""
    probes = tuple(
        Probe(feature, feature not in (*missing, *unseen), details="d", cure="c", seen=feature not in unseen)
        for feature in Feature
    )
    return claims(ADAPTER, probes, None)
