"""Do this host's limits hold? Small programs run into each of them, in control groups made for that."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost, files
from forgeyard_host.cgroups.detect import CgroupMode
from forgeyard_host.cgroups.evidence import swap_in_use
from forgeyard_host.failures import describe
from forgeyard_host.processes import pidfd_open, wait_ended
from forgeyard_model.capabilities import Feature, Probe
from forgeyard_model.errors import SandboxError

PATIENCE: Final = 15.0
"""Seconds in which a limit has to be met. It takes some ten milliseconds; a host under load or in emulation, seconds,
and to be told for that reason that it holds no limits would be wrong."""

_MEMORY: Final = 8 << 20
_PIDS: Final = 4
_QUOTA, _PERIOD = 1_000, 10_000
_PAUSE: Final = 0.004

# Each waits for its group first, and ends by itself before long, should we die before killing it.
_HOG: Final = "read go; exec tail /dev/zero"
_FORKS: Final = "read go; for n in 1 2 3 4 5 6 7 8; do sleep 3 & done; wait"
_SPIN: Final = "read go; ulimit -t 1; while :; do :; done"

_CURE: Final = {
    "memory": "boot with the memory controller on (cgroup_enable=memory), or mount or delegate it",
    "pids": "mount the pids controller, or delegate it to the executor's group",
    "cpu": "mount the cpu controller, or delegate it; the kernel needs CONFIG_CFS_BANDWIDTH",
}


def limit_probes(host: CgroupHost, path: str) -> tuple[Probe, ...]:
    """Run programs into a memory, a pids and a cpu limit at once, and see what the kernel did.

    :param path: a group of the caller's, as AttemptCgroup.create takes it. It is made, and gone at the end.
    """
    group = AttemptCgroup.at(host, path)
    try:
        AttemptCgroup.create(host, path)
        with (
            _running(_Leaf(host, group, "memory"), _HOG) as hog,
            _running(_Leaf(host, group, "pids"), _FORKS) as forks,
            _running(_Leaf(host, group, "cpu"), _SPIN) as spin,
        ):
            return (*_memory(hog), _pids(forks), _cpu(spin))
    except (OSError, SandboxError) as error:
        shown = describe(error) if isinstance(error, OSError) else str(error)
        return tuple(_broken(feature, name, shown) for name, feature in _LIMITS)
    finally:
        group.kill()
        group.remove()


_LIMITS: Final = (
    ("memory", Feature.MEMORY_LIMIT),
    ("memory", Feature.SWAP_LIMIT),
    ("memory", Feature.OOM_EVIDENCE),
    ("pids", Feature.PIDS_LIMIT),
    ("cpu", Feature.CPU_LIMIT),
)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A group for one program, with one limit."""

    host: CgroupHost
    group: AttemptCgroup
    controller: str

    @property
    def directory(self) -> str:
        point = self.host.controllers.get(self.controller)
        return "" if point is None else point + self.group.leaf(self.controller)

    @property
    def by(self) -> str:
        return f"cgroup {self.host.mode} {self.controller} controller"

    def limit(self) -> None:
        """Set the limit that the program will meet."""
        v2 = self.host.mode is CgroupMode.V2
        if self.controller == "memory":
            files.write(f"{self.directory}/{'memory.max' if v2 else 'memory.limit_in_bytes'}", str(_MEMORY))
        elif self.controller == "pids":
            files.write(f"{self.directory}/pids.max", str(_PIDS))
        elif v2:
            files.write(f"{self.directory}/cpu.max", f"{_QUOTA} {_PERIOD}")
        else:
            files.write(f"{self.directory}/cpu.cfs_period_us", str(_PERIOD))
            files.write(f"{self.directory}/cpu.cfs_quota_us", str(_QUOTA))

    def limit_swap(self) -> str:
        """Switch swap off for the group; what went wrong, or ""."""
        v2 = self.host.mode is CgroupMode.V2
        name, value = ("memory.swap.max", 0) if v2 else ("memory.memsw.limit_in_bytes", _MEMORY)
        try:
            files.write(f"{self.directory}/{name}", str(value))
        except OSError as error:
            return describe(error)
        return "" if files.limit(f"{self.directory}/{name}") == value else f"{name} does not keep what is written"


@dataclass(frozen=True, slots=True)
class _Run:
    """A program in its group. `error`: why it could not be put there. `swap`: why swap is not bounded."""

    leaf: _Leaf
    pidfd: int = -1
    error: str = ""
    swap: str = ""


@contextmanager
def _running(leaf: _Leaf, script: str) -> Iterator[_Run]:
    """`script` in `leaf`, under its limit; killed at the end."""
    if not leaf.directory:
        yield _Run(leaf, error=f"no {leaf.controller} controller is mounted")
        return
    # stderr goes nowhere: what these programs say when they meet their limit is nobody's concern.
    with subprocess.Popen(
        ["/bin/sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    ) as child:
        pidfd = pidfd_open(child.pid)
        try:
            yield _released(leaf, child, pidfd)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def _released(leaf: _Leaf, child: subprocess.Popen[bytes], pidfd: int) -> _Run:
    try:
        Path(leaf.directory).mkdir()
        leaf.limit()
        swap = leaf.limit_swap() if leaf.controller == "memory" else ""
        files.write(f"{leaf.directory}/cgroup.procs", str(child.pid))
    except OSError as error:
        return _Run(leaf, pidfd, describe(error))
    assert child.stdin is not None  # noqa: S101  PIPE above
    child.stdin.write(b"\n")
    child.stdin.flush()
    return _Run(leaf, pidfd, swap=swap)


def _memory(run: _Run) -> tuple[Probe, Probe, Probe]:
    by = run.leaf.by
    if run.error:
        limits = (Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.OOM_EVIDENCE)
        first, second, third = (_broken(feature, "memory", run.error) for feature in limits)
        return first, second, third
    ended = wait_ended(run.pidfd, PATIENCE)
    kills = _leaf_evidence(run.leaf)
    shown = f"a program over {_MEMORY >> 20} MiB was {'killed' if ended else 'not stopped'}"
    return (
        Probe(Feature.MEMORY_LIMIT, ended, by, shown, "" if ended else _CURE["memory"]),
        _swap(run),
        Probe(
            Feature.OOM_EVIDENCE,
            bool(kills),
            by,
            f"{kills} kill counted in the program's own group" if kills else "the kill was counted nowhere",
            "" if kills else "use a kernel that counts oom_kill for each group (Linux 4.13 or newer)",
        ),
    )


def _leaf_evidence(leaf: _Leaf) -> int:
    return leaf.group.evidence("memory").memory.oom_kills or 0


def _swap(run: _Run) -> Probe:
    if not run.swap:
        return Probe(Feature.SWAP_LIMIT, works=True, by=run.leaf.by, details="swap is off for the group")
    if not swap_in_use():
        return Probe(Feature.SWAP_LIMIT, works=True, by="no swap on this host", details=run.swap)
    cure = "boot with swapaccount=1, or switch swap off (swapoff -a)"
    return Probe(Feature.SWAP_LIMIT, works=False, by=run.leaf.by, details=run.swap, cure=cure)


def _pids(run: _Run) -> Probe:
    if run.error:
        return _broken(Feature.PIDS_LIMIT, "pids", run.error)
    refused = _until(lambda: files.keyed(f"{run.leaf.directory}/pids.events").get("max", 0))
    shown = f"a fork beyond {_PIDS} processes was {'refused' if refused else 'not refused'}"
    return Probe(Feature.PIDS_LIMIT, bool(refused), run.leaf.by, shown, "" if refused else _CURE["pids"])


def _cpu(run: _Run) -> Probe:
    if run.error:
        return _broken(Feature.CPU_LIMIT, "cpu", run.error)
    throttled = _until(lambda: files.keyed(f"{run.leaf.directory}/cpu.stat").get("nr_throttled", 0))
    shown = f"a busy program with {_QUOTA / _PERIOD:g} cpu was {'throttled' if throttled else 'not throttled'}"
    return Probe(Feature.CPU_LIMIT, bool(throttled), run.leaf.by, shown, "" if throttled else _CURE["cpu"])


def _until(count: Callable[[], int]) -> int:
    """`count` as soon as it is not 0, or 0 after PATIENCE. The kernel announces none of these counters."""
    deadline = time.monotonic() + PATIENCE
    while not (found := count()) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return found


def _broken(feature: Feature, controller: str, details: str) -> Probe:
    return Probe(feature, works=False, by="", details=details, cure=_CURE[controller])
