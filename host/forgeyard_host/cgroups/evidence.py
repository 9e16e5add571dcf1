"""What the kernel counted for a container. v1 counts in the leaf itself; v2 also in its parent.

Not used as evidence: memory.failcnt, which stays 0 through a real out-of-memory kill on current kernels.
"""

# ruff: noqa: PTH110, PTH112  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from forgeyard_host.cgroups import files
from forgeyard_host.cgroups.detect import CgroupHost, CgroupMode
from forgeyard_model.live import LiveUsage
from forgeyard_model.result import Evidence, MemoryEvidence, PidsEvidence, ResourceUsage

_NANOSECOND: Final = 1e-9
_MICROSECOND: Final = 1e-6


@dataclass(frozen=True, slots=True)
class AppliedLimits:
    """Limits as read back: bytes, bytes on top of memory, count, cores. None: no limit, or no controller."""

    memory: int | None
    swap: int | None
    pids: int | None
    cpus: float | None


def read_evidence(host: CgroupHost, parent: str, leaf: str) -> Evidence:
    """Memory and pids evidence of the group `leaf`."""
    if host.mode is CgroupMode.V1:
        return Evidence(memory=_memory_v1(host, leaf), pids=_pids_v1(host, leaf))
    directory = _v2_directory(host, parent, leaf)
    return Evidence(memory=_memory_v2(directory), pids=_pids(directory))


def read_usage(host: CgroupHost, parent: str, leaf: str) -> ResourceUsage:
    """Usage of the group `leaf` so far."""
    if host.mode is CgroupMode.V1:
        return _usage_v1(host, leaf)
    directory = _v2_directory(host, parent, leaf)
    cpu = files.keyed(f"{directory}/cpu.stat").get("usage_usec")
    io = files.nested(f"{directory}/io.stat")
    return ResourceUsage(
        cpu_time=None if cpu is None else cpu * _MICROSECOND,
        peak_memory=files.number(f"{directory}/memory.peak"),
        io_read=io.get("rbytes"),
        io_written=io.get("wbytes"),
    )


def read_live(host: CgroupHost, parent: str, leaf: str) -> LiveUsage:
    """What the group `leaf` uses now, but for its disk."""
    now = datetime.now(UTC)
    if host.mode is CgroupMode.V2:
        directory = _v2_directory(host, parent, leaf)
        cpu = files.keyed(f"{directory}/cpu.stat").get("usage_usec")
        return LiveUsage(
            at=now,
            cpu_nanoseconds=None if cpu is None else cpu * 1000,
            memory_bytes=_working_set(directory, "memory.current", "inactive_file"),
            pids=files.number(f"{directory}/pids.current"),
        )
    memory = host.controllers.get("memory")
    return LiveUsage(
        at=now,
        cpu_nanoseconds=_v1(host, "cpuacct", leaf, "cpuacct.usage"),
        memory_bytes=None
        if memory is None
        else _working_set(memory + leaf, "memory.usage_in_bytes", "total_inactive_file"),
        pids=_v1(host, "pids", leaf, "pids.current"),
    )


def _working_set(directory: str, current: str, droppable: str) -> int | None:
    """Bytes in use, less the page cache that goes first: as engines and kubelet count it."""
    used = files.number(f"{directory}/{current}")
    if used is None:
        return None
    return max(0, used - files.keyed(f"{directory}/memory.stat").get(droppable, 0))


def read_limits(host: CgroupHost, leaf: str) -> AppliedLimits:
    """The limits in force for `leaf`."""
    if host.mode is CgroupMode.V2:
        directory = host.hierarchies[0] + leaf
        quota, _, period = (files.read(f"{directory}/cpu.max") or "max 100000").strip().partition(" ")
        return AppliedLimits(
            memory=files.limit(f"{directory}/memory.max"),
            swap=files.limit(f"{directory}/memory.swap.max"),
            pids=files.limit(f"{directory}/pids.max"),
            cpus=None if quota == "max" else int(quota) / int(period),
        )
    memory = _v1(host, "memory", leaf, "memory.limit_in_bytes")
    both = _v1(host, "memory", leaf, "memory.memsw.limit_in_bytes")
    quota_us = _v1(host, "cpu", leaf, "cpu.cfs_quota_us")
    period_us = _v1(host, "cpu", leaf, "cpu.cfs_period_us")
    return AppliedLimits(
        memory=memory,
        swap=None if memory is None or both is None else both - memory,
        pids=_v1(host, "pids", leaf, "pids.max"),
        cpus=quota_us / period_us if quota_us is not None and quota_us > 0 and period_us else None,
    )


def swap_in_use() -> bool:
    """Whether this host has swap space at all."""
    return len((files.read("/proc/swaps") or "").splitlines()) > 1


def _v1(host: CgroupHost, controller: str, leaf: str, name: str) -> int | None:
    point = host.controllers.get(controller)
    return None if point is None else files.limit(f"{point}{leaf}/{name}")


def _memory_v1(host: CgroupHost, leaf: str) -> MemoryEvidence:
    point = host.controllers.get("memory")
    if point is None:
        return MemoryEvidence()
    directory = point + leaf
    # Each group counts only the kills among its own processes, so nested groups are added up.
    kills = _summed(directory, "memory.oom_control", "oom_kill")
    stat = files.keyed(f"{directory}/memory.stat")
    return MemoryEvidence(
        limit=files.limit(f"{directory}/memory.limit_in_bytes"),
        peak=files.number(f"{directory}/memory.max_usage_in_bytes"),
        oom_kills=kills,
        tmpfs=stat.get("total_shmem", stat.get("shmem")),
    )


def _memory_v2(directory: str) -> MemoryEvidence:
    return MemoryEvidence(
        limit=files.limit(f"{directory}/memory.max"),
        peak=files.number(f"{directory}/memory.peak"),
        oom_kills=files.keyed(f"{directory}/memory.events").get("oom_kill"),
        tmpfs=files.keyed(f"{directory}/memory.stat").get("shmem"),
    )


def _pids_v1(host: CgroupHost, leaf: str) -> PidsEvidence:
    point = host.controllers.get("pids")
    return PidsEvidence() if point is None else _pids(point + leaf)


def _pids(directory: str) -> PidsEvidence:
    # From Linux 6.11 on v2's pids.events counts what is below as well, and pids.events.local is there to tell. Before,
    # and on v1, a refusal counts in the group of the process that forked and nowhere else.
    hierarchical = os.path.exists(f"{directory}/pids.events.local")
    own = files.keyed(f"{directory}/pids.events").get("max")
    return PidsEvidence(
        limit=files.limit(f"{directory}/pids.max"),
        peak=files.number(f"{directory}/pids.peak"),
        refused=own if hierarchical else _summed(directory, "pids.events", "max"),
    )


def _summed(directory: str, name: str, key: str) -> int | None:
    counts = [files.keyed(f"{group}/{name}").get(key) for group in files.groups_below(directory)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _v2_directory(host: CgroupHost, parent: str, leaf: str) -> str:
    """The leaf while it exists: it is this container's alone. Afterwards the parent, which kept its counters."""
    point = host.hierarchies[0]
    return point + leaf if os.path.isdir(point + leaf) else point + parent


def _usage_v1(host: CgroupHost, leaf: str) -> ResourceUsage:
    cpu = _v1(host, "cpuacct", leaf, "cpuacct.usage")
    io = _blkio(host, leaf)
    memory = host.controllers.get("memory")
    return ResourceUsage(
        cpu_time=None if cpu is None else cpu * _NANOSECOND,
        peak_memory=None if memory is None else files.number(f"{memory}{leaf}/memory.max_usage_in_bytes"),
        io_read=io.get("Read"),
        io_written=io.get("Write"),
    )


def _blkio(host: CgroupHost, leaf: str) -> dict[str, int]:
    """Bytes by direction, all devices. A group without any I/O has no device lines, which is a true 0."""
    point = host.controllers.get("blkio")
    text = None if point is None else files.read(f"{point}{leaf}/blkio.throttle.io_service_bytes_recursive")
    if text is None:
        return {}
    sums = {"Read": 0, "Write": 0}
    for words in (line.split() for line in text.splitlines()):
        if len(words) == 3 and words[1] in sums:
            sums[words[1]] += int(words[2])
    return sums
