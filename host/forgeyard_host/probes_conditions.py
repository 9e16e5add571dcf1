"""Preconditions of this host that no sandbox shows, and that break jobs when they do not hold."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from forgeyard_host.cgroups import files
from forgeyard_host.checks import check_searchable
from forgeyard_host.uids import DEFAULT_BASE, DEFAULT_SIZE, foreign_ids
from forgeyard_model.errors import SandboxError

_MIB: Final = 1 << 20


class Status(StrEnum):
    """OK, WARNING (some jobs will fail, or something is better changed) or PROBLEM (jobs can't run)."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class HostCondition:
    """One precondition. `details`: what was found. `cure`: what to do about it, empty when it holds."""

    name: str
    status: Status
    details: str
    cure: str = ""


def judge(name: str, details: str, *, warning: str = "", problem: str = "") -> HostCondition:
    """A condition with the cure of what does not hold, the worse first; without any it is OK."""
    if problem:
        return HostCondition(name, Status.PROBLEM, details, problem)
    return HostCondition(name, Status.WARNING if warning else Status.OK, details, warning)


def host_conditions(state_dir: str, *, block: range | None = None) -> tuple[HostCondition, ...]:
    """Every precondition but those that need a look at many files (see probes_exposed).

    :param block: host ids that jobs get; None: the default one.
    """
    return (
        _root(),
        _state_directory(state_dir),
        _free_disk(state_dir),
        uid_block(block or range(DEFAULT_BASE, DEFAULT_BASE + DEFAULT_SIZE)),
        _open_files(),
        _inotify(),
        _keyrings(),
        _conntrack(),
        _maps(),
        _clock(),
    )


def _root() -> HostCondition:
    uid = os.geteuid()
    return judge("root", f"uid {uid}", problem="" if uid == 0 else "run as root; the jobs themselves never are")


def _nearest(state_dir: str) -> Path:
    """The directory itself, or what is there of its ancestors."""
    return next(path for path in (Path(state_dir), *Path(state_dir).parents) if path.exists())


def _state_directory(state_dir: str) -> HostCondition:
    there = _nearest(state_dir)
    try:
        check_searchable(str(there))
    except SandboxError as error:
        return judge("state directory", error.brief, problem=error.resolution)
    return judge("state directory", f"{state_dir}: others can walk through")


def _free_disk(state_dir: str) -> HostCondition:
    there = _nearest(state_dir)
    facts = os.statvfs(there)
    free = facts.f_bavail * facts.f_frsize // _MIB
    no_inodes = facts.f_files > 0 and facts.f_favail < 10_000
    cure = "make room, or name another directory with --state-dir"
    return judge(
        "free disk",
        f"{free} MiB and {facts.f_favail} inodes at {there}",
        problem=cure if free < 256 else "",
        warning=cure if free < 2048 or no_inodes else "",
    )


def uid_block(block: range, *, etc: str = "/etc", uid_map: str = "/proc/self/uid_map") -> HostCondition:
    """Whether the ids that jobs get belong to nobody else, and exist where we are."""
    shown = f"{block.start} to {block.stop - 1}"
    rows = [[int(word) for word in line.split()] for line in (files.read(uid_map) or "").splitlines()]
    if not any(row[0] <= block.start and block.stop <= row[0] + row[2] for row in rows):
        return judge("uid block", f"{shown} is not mapped here", problem="give this container a uid map that covers it")
    others = foreign_ids(block, etc)
    if not others:
        return judge("uid block", f"{shown} belongs to nobody else")
    first = others[0]
    cure = f"move the others out of the block in {etc}/subuid, subgid, passwd and group, or configure another block"
    covered = any(ids.start <= block.start and block.stop <= ids.stop for ids in others)
    details = f"{len(others)} others' ranges in {shown}, the first {first.start} to {first.stop - 1}"
    return judge("uid block", details, problem=cure if covered else "", warning=cure)


def _open_files() -> HostCondition:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    cure = "raise the hard limit (ulimit -Hn, LimitNOFILE=); jobs ask for 4096 by default and are clamped to it"
    return judge("open files", f"hard limit {hard}", problem=cure if hard < 256 else "", warning=cure * (hard < 4096))


def _inotify() -> HostCondition:
    instances, watches = (_sysctl(f"fs/inotify/max_user_{name}") for name in ("instances", "watches"))
    details = f"{instances} instances, {watches} watches for each user"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC)
    cure = "sysctl fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=524288"
    if fd < 0:
        return judge("inotify", f"{details}; none is left for us: {os.strerror(ctypes.get_errno())}", warning=cure)
    os.close(fd)
    few = (instances or 0) < 128 or (watches or 0) < 8192
    return judge("inotify", details, warning=cure if few else "")


def _keyrings() -> HostCondition:
    most = _sysctl("kernel/keys/root_maxkeys")
    if most is None:
        return judge("keyrings", "this kernel has none")
    # "    0:    91 90/90 83/1000000 1620/25000000": usage, keys of which instantiated, keys of quota, bytes.
    rows = (line.split() for line in (files.read("/proc/key-users") or "").splitlines())
    used = next((int(row[3].partition("/")[0]) for row in rows if len(row) > 3 and row[0] == "0:"), 0)
    cure = "sysctl kernel.keys.root_maxkeys=1000000: a runtime makes a session keyring for each container"
    return judge("keyrings", f"{used} of {most} keys of root in use", warning=cure if most - used < 200 else "")


def _conntrack() -> HostCondition:
    most, used = (_sysctl(f"net/netfilter/nf_conntrack_{name}") for name in ("max", "count"))
    if most is None or used is None:
        return judge("conntrack", "not in use")
    cure = "sysctl net.netfilter.nf_conntrack_max=262144: new connections are dropped when the table is full"
    return judge("conntrack", f"{used} of {most} entries in use", warning=cure if used > most * 0.8 else "")


def _maps() -> HostCondition:
    most = _sysctl("vm/max_map_count")
    cure = "sysctl vm.max_map_count=262144: search engines and some JVMs do not start with less"
    return judge("memory maps", f"vm.max_map_count {most}", warning=cure if (most or 0) < 65530 else "")


def _clock() -> HostCondition:
    # This file was there before now: a clock that says otherwise breaks certificates and make.
    ours = Path(__file__).stat().st_mtime
    behind = ours - time.time()
    shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    cure = "set the clock (timedatectl set-ntp true): it is behind files that exist already"
    return judge("clock", shown, problem=cure if behind > 86_400 else "", warning=cure if behind > 60 else "")


def _sysctl(name: str) -> int | None:
    return files.number(f"/proc/sys/{name}")
