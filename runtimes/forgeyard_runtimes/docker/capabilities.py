"""What Docker's containers can be: no user namespace of an attempt's own, the rest as everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_runtimes.endpoints import rootless_engine


def docker_capabilities(name: str, info: Mapping[str, Any]) -> ExecutorCapabilities:
    """Claims from the daemon's own account of itself; the executor verifies each at the gate of every job."""
    return ExecutorCapabilities(
        runtime=name,
        isolation_levels=frozenset({IsolationLevel.PROCESS, IsolationLevel.NAMESPACE, IsolationLevel.CONTAINER}),
        network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}),
        resource_controls=ResourceControls(
            cpu=bool(info.get("CpuCfsQuota")),
            memory=bool(info.get("MemoryLimit")),
            pids=bool(info.get("PidsLimit")),
            disk=True,
        ),
        user_namespace=False,
        seccomp=_has_option(info, "seccomp"),
    )


def refuse_unfit(info: Mapping[str, Any]) -> None:
    """Whether jobs can run on this daemon at all.

    :raises ExecutorError: UNSUPPORTED, naming what is in the way.
    """
    if info.get("OSType") != "linux":
        raise _unfit("docker_not_linux", f"the daemon runs {info.get('OSType')} containers", "use a Linux daemon")
    if _has_option(info, "rootless"):
        raise rootless_engine("docker", "the Docker daemon says so", "use root's daemon, or --runtime runc")
    if info.get("CgroupDriver") != "cgroupfs":
        raise _unfit(
            "docker_cgroup_driver",
            f"Docker uses the {info.get('CgroupDriver')} cgroup driver, below which the executor can't put its groups",
            'set "exec-opts": ["native.cgroupdriver=cgroupfs"] in daemon.json, or use --runtime runc',
        )
    if not _has_option(info, "seccomp"):
        raise _unfit("docker_seccomp", "the Docker daemon filters no system calls", "use one built with seccomp")


def maps_ids(info: Mapping[str, Any]) -> bool:
    """Whether the daemon puts all its containers into one shared range of ids (userns-remap)."""
    return _has_option(info, "userns")


def _has_option(info: Mapping[str, Any], name: str) -> bool:
    return any(option.split(",")[0] == f"name={name}" for option in info.get("SecurityOptions") or ())


def _unfit(reason: str, brief: str, resolution: str) -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, resolution=resolution)
