"""How a container at containerd gets its network, and what can be claimed of a bundle there."""

from __future__ import annotations

from typing import Final

from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_runtimes.contract import NetworkJoin, NetworkShare

NETWORK_JOIN: Final[NetworkJoin] = "plumbed"
"""How a job gets into its network. containerd's shim starts runc in the daemon's network, so none can be inherited.
By path runc 1.1 joins it only beside a user namespace that it makes itself: one that is joined by path as well, as
every attempt's is, comes first, and from there the host's network namespaces are out of reach. So the container has a
fresh one, and the network is put into it while the process shim waits at its gate."""

NETWORK_SHARE: Final[NetworkShare] = "made"
"""Two that share a namespace can't both have a fresh one. They join one of ours by path, and runc makes their user
namespaces, which get at the gate the limits that those of ours have from the start."""


def claims(name: str) -> ExecutorCapabilities:
    """What bundles on this adapter enforce; the executor verifies each at the gate of every job."""
    return ExecutorCapabilities(
        runtime=name,
        isolation_levels=frozenset({IsolationLevel.PROCESS, IsolationLevel.NAMESPACE, IsolationLevel.CONTAINER}),
        network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}),
        resource_controls=ResourceControls(cpu=True, memory=True, pids=True, disk=True),
        user_namespace=True,
        seccomp=True,
    )
