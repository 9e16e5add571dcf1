"""What containerd carries of a bundle, and what of it can be claimed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.policy import IsolationLevel, NetworkMode

NETWORK_JOIN: Final = "plumbed"
"""How a job gets into its network. containerd's shim starts runc in the daemon's network, so none can be inherited.
By path runc 1.1 joins it only beside a user namespace that it makes itself: one that is joined by path as well, as
every attempt's is, comes first, and from there the host's network namespaces are out of reach. So the container has a
fresh one, and the network is put into it while the process shim waits at its gate."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing a sandbox may be made of.

    :param carried: it reaches the kernel as the bundle says.
    :param how: by what; or why not.
    """

    feature: str
    carried: bool
    how: str


STATEMENTS: Final = (
    Statement("literal bundle", True, "the container's spec is config.json byte for byte"),
    Statement("root file system", True, "ours by absolute path; containerd mounts nothing"),
    Statement("bind mounts, tmpfs, masks", True, "by runc, as without containerd"),
    Statement("FIFO channel", True, "bound like any mount; the task's own streams are /dev/null"),
    Statement("user namespace of one's own", True, "by runc, new or by path"),
    Statement("network namespace of one's own", True, "by runc; connected while the shim waits"),
    Statement("network namespace by path", False, "not with a user namespace by path: runc joins that first"),
    Statement("seccomp filter", True, "by runc; all of it"),
    Statement("capabilities, no_new_privs, rlimits", True, "by runc"),
    Statement("cgroup below a parent of ours", True, "linux.cgroupsPath of the cgroupfs driver"),
    Statement("OOM and pids evidence", True, "read by us from the cgroup; the daemon's events are a note"),
    Statement("exec of a compiled process", True, "Tasks.Exec takes process.json byte for byte"),
    Statement("terminal", False, "the channel carries output"),
    Statement("cgroups of the systemd driver", False, "not tried"),
)


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
