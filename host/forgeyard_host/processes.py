"""Processes by pidfd, and what the kernel says of one: read from /proc, the outside view that no job can forge."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_CAPABILITY_SETS: Final = {
    "CapInh": "inheritable",
    "CapPrm": "permitted",
    "CapEff": "effective",
    "CapBnd": "bounding",
    "CapAmb": "ambient",
}


def pidfd_open(pid: int) -> int:
    """A pidfd of `pid`, close-on-exec; readable (see `wait_ended`) once the process has ended.

    :raises ProcessLookupError: when there is none.
    """
    return os.pidfd_open(pid)


def send_signal(pidfd: int, number: int) -> bool:
    """Signal the process; False when it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def wait_ended(pidfd: int, seconds: float) -> bool:
    """Wait for the process to end, at most `seconds`. In asyncio give the pidfd to `loop.add_reader` instead."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


@cache
def boot_id() -> str:
    """A value that changes with each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_time(pid: int) -> int:
    """When `pid` started, in clock ticks since boot: with the pid it names one process for good.

    :raises ProcessLookupError: when there is none.
    """
    return _stat(pid, 22)


def parent_of(pid: int) -> int:
    """The parent of `pid`, as this process's pid namespace has it; 0 when that is outside.

    :raises ProcessLookupError: when there is none.
    """
    return _stat(pid, 4)


def _stat(pid: int, field: int) -> int:
    """A number of proc_pid_stat(5), by its place there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError as error:
        raise ProcessLookupError(3, "no such process", str(pid)) from error
    # Counted behind the name, field 2, which may hold spaces and parentheses.
    return int(stat[stat.rindex(b")") + 2 :].split()[field - 3])


_own: dict[int, int] = {}


def own_start_time() -> int:
    """`start_time` of this process, read once."""
    pid = os.getpid()
    if pid not in _own:
        _own[pid] = start_time(pid)
    return _own[pid]


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process as the kernel has it.

    :param uid_map: (first inside, first outside, count) as this process reads it.
    :param seccomp: 0 none, 1 strict, 2 filter.
    :param capabilities: bit masks by set: inheritable, permitted, effective, bounding, ambient.
    :param uids: real, effective, saved, filesystem; on the host. `gids` likewise.
    :param namespace_pids: its pid in each nested pid namespace, outermost first.
    :param namespaces: inode number by kind (mnt, net, pid, user, ...).
    :param cgroups: path by controller list of /proc/<pid>/cgroup; "" is the unified hierarchy.
    """

    pid: int
    uid_map: tuple[tuple[int, int, int], ...]
    gid_map: tuple[tuple[int, int, int], ...]
    seccomp: int
    no_new_privileges: bool
    capabilities: Mapping[str, int]
    uids: tuple[int, ...]
    gids: tuple[int, ...]
    namespace_pids: tuple[int, ...]
    namespaces: Mapping[str, int]
    cgroups: Mapping[str, str]


def process_facts(pid: int) -> ProcessFacts:
    """Facts on `pid`, all of the same process even if the number is taken again meanwhile.

    :raises ProcessLookupError: when it is gone, or goes while being read.
    """
    try:
        proc = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _facts(pid, proc)
        finally:
            os.close(proc)
    except FileNotFoundError as error:
        raise ProcessLookupError(3, "no such process", str(pid)) from error


def _facts(pid: int, proc: int) -> ProcessFacts:
    namespaces = _namespaces(proc)
    # Read after the namespaces: whoever is alive now was so when they were read.
    status = dict(line.split(":", 1) for line in _read(proc, "status").splitlines() if ":" in line)
    if status.get("State", "").strip()[:1] in ("Z", "X"):
        raise ProcessLookupError(3, "the process has ended", str(pid))
    return ProcessFacts(
        pid=pid,
        uid_map=_map(_read(proc, "uid_map")),
        gid_map=_map(_read(proc, "gid_map")),
        seccomp=int(status.get("Seccomp", "0")),
        no_new_privileges=status.get("NoNewPrivs", "0").strip() == "1",
        capabilities={name: int(status[key], 16) for key, name in _CAPABILITY_SETS.items()},
        uids=_numbers(status["Uid"]),
        gids=_numbers(status["Gid"]),
        namespace_pids=_numbers(status.get("NSpid", str(pid))),
        namespaces=namespaces,
        cgroups=_cgroups(_read(proc, "cgroup")),
    )


def _read(proc: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="surrogateescape")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


def _map(text: str) -> tuple[tuple[int, int, int], ...]:
    rows = (_numbers(line) for line in text.splitlines())
    return tuple((row[0], row[1], row[2]) for row in rows)


def _namespaces(proc: int) -> dict[str, int]:
    found = {}
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        with contextlib.suppress(FileNotFoundError):  # an older kernel's namespaces are fewer
            found[kind] = os.stat(f"ns/{kind}", dir_fd=proc).st_ino
    return found


def _cgroups(text: str) -> dict[str, str]:
    rows = (line.split(":", 2) for line in text.splitlines())
    return {row[1]: row[2] for row in rows}
