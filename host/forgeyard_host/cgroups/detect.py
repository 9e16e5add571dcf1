"""Which hierarchies this host has, and where below them an executor may make groups."""

# ruff: noqa: PTH106  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from forgeyard_host.cgroups import files
from forgeyard_model.errors import SandboxError, SandboxErrorKind

_V1_CONTROLLERS: Final = frozenset(
    {"blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "hugetlb"}
    | {"memory", "misc", "net_cls", "net_prio", "perf_event", "pids", "rdma"}
)


class CgroupMode(StrEnum):
    """V1 also stands for hybrid: the controllers are in v1 hierarchies, whatever a bare v2 mount holds."""

    V1 = "v1"
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class CgroupHost:
    """The hierarchies of this host.

    :param hierarchies: mountpoints, each once: those of v1's controllers, `systemd` and `unified` included.
    :param controllers: mountpoint by controller; on v2 all have the same one.
    :param base: path below the mountpoints that groups go under: "" is the root; v2 in a delegated service: its own.
    """

    mode: CgroupMode
    hierarchies: tuple[str, ...]
    controllers: Mapping[str, str]
    base: str = ""

    @classmethod
    def detect(cls, mountinfo: str | None = None, own: str | None = None) -> Self:
        """Look at this host. The parameters are texts of /proc/self/mountinfo and /proc/self/cgroup, for tests.

        :raises SandboxError: RESOURCE_LIMIT_FAILED when no hierarchy is mounted.
        """
        if mountinfo is None:
            # Somebody else's mount point may be no text, and is none of our business.
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        v1, v2 = _mounts(mountinfo)
        controllers = {name: point for point, options in v1.items() for name in options & _V1_CONTROLLERS}
        if controllers:
            points = (*v1, *v2)
            return cls(CgroupMode.V1, points, MappingProxyType(controllers))
        if not v2:
            raise SandboxError(
                SandboxErrorKind.RESOURCE_LIMIT_FAILED,
                "no_cgroups",
                "no cgroup hierarchy is mounted",
                resolution="mount cgroup2 at /sys/fs/cgroup",
            )
        point = v2[0]
        base = _v2_base(point, Path("/proc/self/cgroup").read_text(encoding="utf-8") if own is None else own)
        names = (files.read(f"{point}{base}/cgroup.controllers") or "").split()
        return cls(CgroupMode.V2, (point,), MappingProxyType(dict.fromkeys(names, point)), base)

    def paths(self, group: str) -> tuple[str, ...]:
        """Directory of `group` in each hierarchy."""
        return tuple(point + group for point in self.hierarchies)

    def remove_empty(self, path: str) -> None:
        """Remove the group `path` (as given to AttemptCgroup.create) and its ancestors where nothing is in them."""
        for point in self.hierarchies:
            inner = path.strip("/")
            while inner:
                try:
                    os.rmdir(f"{point}{self.base}/{inner}")
                except FileNotFoundError:
                    pass
                except OSError:
                    break  # in use by another executor
                inner = inner.rpartition("/")[0]


def _mounts(mountinfo: str) -> tuple[dict[str, frozenset[str]], list[str]]:
    """v1 mountpoints with the options that name their controllers, and v2 mountpoints."""
    v1: dict[str, frozenset[str]] = {}
    v2: list[str] = []
    for line in mountinfo.splitlines():
        front, _, back = line.partition(" - ")
        kind, _, options = back.split(" ", 2) if back.count(" ") >= 2 else ("", "", "")
        point = front.split()[4].replace("\\040", " ") if kind.startswith("cgroup") else ""
        if kind == "cgroup":
            v1[point] = frozenset(options.split(","))
        elif kind == "cgroup2" and point not in v2:
            v2.append(point)
    return v1, v2


def _v2_base(point: str, own: str) -> str:
    """Where groups of ours can live on v2.

    A group that systemd has marked as delegated, and that we run in a child of, is meant for them. Else the true root
    (known by having no cgroup.type) takes them if we may write there. Otherwise a delegated group: the parent of ours
    when it is ours too and holds no process itself, since a group with processes in it cannot pass controllers on.
    """
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/").rstrip("/")
    parent = path.rpartition("/")[0]
    if parent and _marked(point + parent) and not files.processes(point + parent):
        return parent
    at_root = not Path(f"{point}/cgroup.type").exists() and os.access(f"{point}/cgroup.procs", os.W_OK)
    if at_root or not path:
        return ""
    delegated = os.access(f"{point}{parent}/cgroup.subtree_control", os.W_OK)
    if delegated and not files.processes(f"{point}{parent}"):
        return parent
    return path


def _marked(directory: str) -> bool:
    """Whether systemd says that it keeps its hands off what is below (Delegate=): an attribute, by who may set it."""
    for name in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):  # ENODATA; EPERM for trusted.* without root; no attributes at all
            if os.getxattr(directory, name) == b"1":
                return True
    return False
