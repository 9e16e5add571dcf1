"""What a container of Docker's really runs with: the spec that its runtime was given, and the kernel's own mounts.

Docker keeps the spec below containerd's state directory, which its API does not tell. The parent of PID 1 is
containerd's shim, and that works in the directory of the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forgeyard_host.processes import parent_of
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.mount_table import Mounted, parse_mountinfo

_LIMIT: Final = 4 << 20
_FLAGS: Final = ("ro", "nosuid", "nodev", "noexec")


def read_effective(pid: int, docker_id: str) -> dict[str, Any]:
    """The spec of the container whose PID 1 is `pid`, with the flags of every mount as the kernel has them.

    :param docker_id: Docker's own id; the spec has to be that container's.
    :raises ExecutorError: LOST, when the process is gone or the spec can't be read.
    """
    try:
        bundle = Path(f"/proc/{parent_of(pid)}/cwd/config.json")
        with bundle.open("rb") as file:
            spec = json.loads(file.read(_LIMIT))
        seen = parse_mountinfo(Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape"))
    except (OSError, ValueError) as error:
        raise _unreadable(str(error)) from error
    if not isinstance(spec, dict) or docker_id not in str(spec.get("linux", {}).get("cgroupsPath", "")):
        raise _unreadable("the runtime's directory holds the spec of another container")
    linux = {**spec["linux"], "rootfsPropagation": root_propagation(seen)}
    return {**spec, "mounts": with_kernel_flags(spec["mounts"], seen), "linux": linux}


def with_kernel_flags(mounts: list[dict[str, Any]], seen: Mapping[str, Mounted]) -> list[dict[str, Any]]:
    """`mounts` with ro, nosuid, nodev and noexec as PID 1 sees them, and those that only the kernel has."""
    flagged = []
    for mount in mounts:
        # A mount that the kernel has not is left with no flags: to a comparison it is weaker than any.
        found = seen.get(mount["destination"])
        flags = frozenset() if found is None else found.flags
        kept = [option for option in mount["options"] if option not in (*_FLAGS, "rw", "suid", "dev", "exec")]
        flagged.append({**mount, "options": [*kept, *(flag for flag in _FLAGS if flag in flags)]})
    known = {mount["destination"] for mount in mounts}
    return flagged + [
        {"destination": where, "type": mount.kind, "source": "", "options": sorted(mount.flags & set(_FLAGS))}
        for where, mount in seen.items()
        if where not in known and not _expected_by_itself(where, mount.flags, known)
    ]


def _expected_by_itself(where: str, flags: frozenset[str], known: set[str]) -> bool:
    """The root, read-only hierarchies below the cgroup mount, and read-only covers of paths in /proc and /sys."""
    if where == "/":
        return True
    if where.startswith("/sys/fs/cgroup/") and "/sys/fs/cgroup" in known:
        return "ro" in flags  # what is mounted there has flags of its own
    if where.startswith("/proc/"):
        return "ro" in flags or _is_null_cover(where)
    return where.startswith("/sys/") and "ro" in flags


def _is_null_cover(where: str) -> bool:
    # A masked file is covered by the sandbox's own /dev/null, which is no read-only mount.
    return where.count("/") == 2


def root_propagation(seen: Mapping[str, Mounted]) -> str:
    """How mounts propagate to and from the root, as OCI names it."""
    root = seen.get("/")
    if root is None or "shared" in root.spreads:
        return "rshared"
    return "rslave" if "master" in root.spreads else "rprivate"


def _unreadable(details: str) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "effective_spec",
        "what Docker's runtime applied can't be read",
        details=details,
        resolution="run the executor in the pid and mount namespace of dockerd's containerd, as root",
    )
