"""What jobs under Podman get, and who the service is: found once, when the adapter is opened."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_runtimes.endpoints import rootless_engine
from forgeyard_runtimes.podman.client import API, Peer
from forgeyard_runtimes.podman.endpoint import ROOTFUL, Endpoint
from forgeyard_runtimes.podman.errors import not_understood, unsupported

_LIMITS: Final = {"Max processes": "RLIMIT_NPROC", "Max open files": "RLIMIT_NOFILE"}
_UNLIMITED: Final = 1 << 62
_EVERY_ID: Final = ["0", "0", "4294967295"]


@dataclass(frozen=True, slots=True)
class Service:
    """The service at the other end.

    :param version: Podman's.
    :param runtime: the OCI runtime that it drives, with its version.
    :param inherited: the limits that a process of it inherits, by kernel name.
    """

    version: str
    runtime: str
    inherited: Mapping[str, int]


def identify(answer: Mapping[str, Any], peer: Peer) -> Service:
    """Read ``GET /libpod/version``.

    :raises ExecutorError: UNSUPPORTED for a service that speaks no API we know.
    """
    try:
        engine = answer["Components"][0]
        version, details = str(engine["Version"]), engine["Details"]
        offered, least = str(details["APIVersion"]), str(details["MinAPIVersion"])
        runtimes = [part for part in answer["Components"] if str(part["Name"]).startswith("OCI Runtime")]
    except (KeyError, IndexError, TypeError) as error:
        raise not_understood("version", answer) from error
    if not _release(least) <= _release(API) <= _release(offered):
        raise unsupported(
            "podman_version",
            f"Podman {version} does not speak version {API} of its API",
            "use Podman 4.0 or later" if _release(offered) < _release(API) else "use an earlier Podman",
            details=f"it speaks {least} to {offered}",
        )
    words = str(runtimes[0]["Version"]).split() if runtimes else []
    runtime = " ".join(word for word in words[:3] if word != "version")
    return Service(version, runtime, _inherited(peer))


def may_be_rootless(peer: Peer, uid_map: str = "/proc/self/uid_map") -> bool:
    """Whether the service has to be asked: `info` takes Podman longer than making a container.

    Seen from the machine's first user namespace, what root serves is rootful; from another one every user may look
    like root.
    """
    return peer.uid != 0 or Path(uid_map).read_text().split() != _EVERY_ID


def refuse_rootless(answer: Any, peer: Peer, endpoint: Endpoint) -> None:
    """Read ``GET /libpod/info``.

    :raises ExecutorError: UNSUPPORTED, when the service says that it is rootless.
    """
    try:
        rootless = bool(answer["host"]["security"]["rootless"])
    except (KeyError, TypeError) as error:
        raise not_understood("info", answer) from error
    if rootless:
        shown = f"{endpoint.path}, named by {endpoint.origin}, is Podman's of uid {peer.uid}"
        raise rootless_engine("podman", shown, f"use root's service at unix://{ROOTFUL}, or --runtime runc")


def _release(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.partition("-")[0].split(".")[:3])
    except ValueError:
        return (0,)


def _inherited(peer: Peer) -> dict[str, int]:
    """Podman sets limits of its own where none are given, and higher ones than a service without rights may set.

    Behind a socket that an init system holds, the peer is that; then ours bound it as well.
    """
    own = {"RLIMIT_NPROC": resource.RLIMIT_NPROC, "RLIMIT_NOFILE": resource.RLIMIT_NOFILE}
    found = {name: _number(resource.getrlimit(which)[1]) for name, which in own.items()}
    found["RLIMIT_NPROC"] = min(found["RLIMIT_NPROC"], _sysctl("kernel/pid_max"))
    found["RLIMIT_NOFILE"] = min(found["RLIMIT_NOFILE"], _sysctl("fs/nr_open"))
    try:
        lines = Path(f"/proc/{peer.pid}/limits").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name = _LIMITS.get(line[:25].strip())
        hard = line[26:].split()[1:2]
        if name is not None and hard and hard[0].isdigit():
            found[name] = min(found[name], int(hard[0]))
    return found


def _number(limit: int) -> int:
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _sysctl(name: str) -> int:
    return int(Path("/proc/sys", name).read_text())


def claims(service: Service) -> ExecutorCapabilities:
    """What bundles on this service enforce; verified at the gate of every job."""
    levels = {IsolationLevel.PROCESS, IsolationLevel.NAMESPACE, IsolationLevel.CONTAINER}
    return ExecutorCapabilities(
        runtime=f"podman {service.version}",
        isolation_levels=frozenset(levels),
        network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}),
        resource_controls=ResourceControls(cpu=True, memory=True, pids=True, disk=True),
        user_namespace=True,
        seccomp=True,
    )
