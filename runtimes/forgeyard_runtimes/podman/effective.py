"""What a container of Podman's really runs with: the config.json it gave its OCI runtime, and PID 1's mounts.

It is returned as Podman wrote it, but for what Podman has no words for and PID 1's own view proves all the same:
r-forms of mount options (``rro``) where every mount below has those flags, a private root where that receives no
mounts from elsewhere, and /sys/fs/cgroup as read-only where the job can't write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_runtimes.podman.errors import not_understood
from forgeyard_runtimes.podman.images import root_folded
from forgeyard_runtimes.podman.mounts import CGROUP, HostMounts, recursive_flags


@dataclass(frozen=True, slots=True)
class Inspected:
    """What `inspect` says of a container, as far as it matters here.

    :param config: path of the OCI runtime's config.json; empty before the container was initialised.
    :param cgroup: path below each hierarchy's root.
    :param pid: of PID 1; 0 when it has no process.
    :param status: Podman's own word.
    """

    id: str
    status: str
    pid: int
    config: str
    cgroup: str


def inspected(answer: Any) -> Inspected:
    """Read ``GET /libpod/containers/NAME/json``.

    :raises ExecutorError: INTERNAL, when it is not what the API promises.
    """
    try:
        state = answer["State"]
        return Inspected(
            str(answer["Id"]),
            str(state["Status"]),
            int(state["Pid"]),
            str(answer.get("OCIConfigPath", "")),
            str(state.get("CgroupPath", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise not_understood("inspect", answer) from error


def effective(found: Inspected, intended: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec that the container runs with.

    :param intended: the bundle's config.json.
    :raises SandboxError: NAMESPACE_FAILED, when it can't be read: nothing is known then, and nothing may run.
    """
    try:
        spec: dict[str, Any] = json.loads(Path(found.config).read_bytes())
        mounts = HostMounts.read(found.pid)
    except (OSError, ValueError) as error:
        raise SandboxError(
            SandboxErrorKind.NAMESPACE_FAILED,
            "effective_spec",
            "what Podman applied can't be read",
            details=f"{found.config or 'no config.json'}: {error}",
            resolution="run the executor on the service's host, as a user who may read its state",
        ) from error
    spec = root_folded(spec, intended)
    _seen_recursive_flags(spec, intended, mounts)
    if "/" not in mounts.spreading:
        spec["linux"].setdefault("rootfsPropagation", "private")
    if _cgroup_is_read_only(found.pid, spec, mounts):
        spec["linux"]["readonlyPaths"] = [*spec["linux"].get("readonlyPaths", ()), CGROUP]
    return spec


def _cgroup_is_read_only(pid: int, spec: Mapping[str, Any], mounts: HostMounts) -> bool:
    """On v1 the hierarchies lie in a tmpfs that its owner, the container's root, can write; nobody else can."""
    if mounts.lacking(CGROUP, frozenset({"ro"})) or CGROUP not in mounts.flags:
        return False
    if "ro" in mounts.flags[CGROUP]:
        return True
    top = Path(f"/proc/{pid}/root{CGROUP}").stat()
    return spec["process"]["user"]["uid"] != 0 and not top.st_mode & 0o022 and top.st_uid == _host_root(spec)


def _host_root(spec: Mapping[str, Any]) -> int:
    """The container's root, as the host has it."""
    mappings = spec["linux"].get("uidMappings") or [{"containerID": 0, "hostID": 0}]
    return next(int(entry["hostID"]) for entry in mappings if entry["containerID"] == 0)


def _seen_recursive_flags(spec: dict[str, Any], intended: Mapping[str, Any], mounts: HostMounts) -> None:
    own = frozenset(str(mount["destination"]) for mount in spec["mounts"])
    wanted = {mount["destination"]: recursive_flags(mount) for mount in intended["mounts"]}
    for mount in spec["mounts"]:
        flags = wanted.get(mount["destination"], frozenset())
        others = frozenset(path for path in own if path != mount["destination"])
        if flags and not mounts.lacking(mount["destination"], flags, but=others):
            mount["options"] = [*mount["options"], *sorted(f"r{flag}" for flag in flags)]
