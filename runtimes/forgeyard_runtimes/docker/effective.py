"""What a container of Docker's really runs with: the spec that its runtime was given, and the kernel's own mounts.

Docker keeps the spec below containerd's state directory, which its API does not tell. The parent of PID 1 is
containerd's shim, and that works in the directory of the bundle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.mount_table import parse_mountinfo

_LIMIT: Final = 4 << 20
_FLAGS: Final = ("ro", "nosuid", "nodev", "noexec")


def read_effective(pid: int, docker_id: str) -> dict[str, Any]:
    """The spec of the container whose PID 1 is `pid`, with the flags of every mount as the kernel has them.

    :param docker_id: Docker's own id; the spec has to be that container's.
    :raises ExecutorError: LOST, when the process is gone or the spec can't be read.
    """
    try:
        bundle = Path(f"/proc/{_parent(pid)}/cwd/config.json")
        with bundle.open("rb") as file:
            spec = json.loads(file.read(_LIMIT))
        mounts = Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape")
    except (OSError, ValueError) as error:
        raise _unreadable(str(error)) from error
    if not isinstance(spec, dict) or docker_id not in str(spec.get("linux", {}).get("cgroupsPath", "")):
        raise _unreadable("the runtime's directory holds the spec of another container")
    linux = {**spec["linux"], "rootfsPropagation": root_propagation(mounts)}
    return {**spec, "mounts": with_kernel_flags(spec["mounts"], mounts), "linux": linux}


def with_kernel_flags(mounts: list[dict[str, Any]], mountinfo: str) -> list[dict[str, Any]]:
    """`mounts` with ro, nosuid, nodev and noexec as they are in `mountinfo`, and those that only the kernel has."""
    seen = parse_mountinfo(mountinfo)
    flagged = []
    for mount in mounts:
        # A mount that the kernel has not is left with no flags: to a comparison it is weaker than any.
        found = seen.get(mount["destination"])
        flags = frozenset() if found is None else found.flags
        kept = [option for option in mount["options"] if option not in (*_FLAGS, "rw", "suid", "dev", "exec")]
        flagged.append({**mount, "options": [*kept, *(flag for flag in _FLAGS if flag in flags)]})
    known = {mount["destination"] for mount in mounts}
    return flagged + [
        {"destination": where, "type": kind, "source": "", "options": sorted(flags & set(_FLAGS))}
        for where, (kind, flags, _) in seen.items()
        if where not in known and not _expected_by_itself(where, flags, known)
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


def root_propagation(text: str) -> str:
    """How mounts propagate to and from the root, as OCI names it."""
    for line in text.splitlines():
        fields = line.split(" ")
        if fields[4] == "/":
            tags = [field.partition(":")[0] for field in fields[6 : fields.index("-")]]
            return "rshared" if "shared" in tags else "rslave" if "master" in tags else "rprivate"
    return "rshared"


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # Field 4, counted behind the name, which may hold spaces and parentheses.
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


def _unreadable(details: str) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "effective_spec",
        "what Docker's runtime applied can't be read",
        details=details,
        resolution="run the executor in the pid and mount namespace of dockerd's containerd, as root",
    )
