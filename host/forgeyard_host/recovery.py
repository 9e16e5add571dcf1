"""Undoing an attempt from its ledger: the end of every attempt, and what follows a crash (seed, sections 195-200)."""

# ruff: noqa: PTH208  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from forgeyard_host.cgroups.attempt import AttemptCgroup
from forgeyard_host.cgroups.detect import CgroupHost
from forgeyard_host.failures import cleanup_failed, describe
from forgeyard_host.files import remove_tree
from forgeyard_host.host import Host
from forgeyard_host.ledger import LedgerRecord
from forgeyard_host.processes import boot_id, pidfd_open, send_signal, start_time, wait_ended
from forgeyard_host.uids import clear_slot
from forgeyard_model.errors import SandboxError

_KILL_SECONDS: Final = 10.0


def undo(record: LedgerRecord, host: Host, cgroup_host: CgroupHost, *, orphans: bool = True) -> None:
    """Undo all that `record` says was begun: processes, mounts, control groups, directory, uid range, spool.

    Every step is idempotent and tried whatever came of those before, but for one: a range stays locked away while a
    process may still run with its ids. The ledger file is removed when nothing is left.

    :param orphans: also end runtime processes that a killed executor left in the middle of a launch. An executor
        that undoes its own attempt has none and saves the look at every process.
    :raises SandboxError: CLEANUP_FAILED with everything that is left.
    """
    problems: list[str] = []
    unwind = _Unwind(record, problems)
    if orphans and record.boot_id == boot_id():
        unwind.each("container", _end_runtime)
        unwind.each("container", _end_init)
    unwind.each("cgroup", lambda data: _kill(cgroup_host, data))
    dead = not problems
    unwind.each("mounts", lambda data: host.unmount(data["directory"]))
    unwind.each("cgroup", lambda data: _remove_group(cgroup_host, data))
    keep_spare = dead and not orphans
    unwind.each("directory", lambda data: host.remove_directory(data["path"], keep_spare=keep_spare))
    if dead:
        unwind.each("uid_range", lambda data: _clear(record, data))
    unwind.each("spool", lambda data: _remove_spool(record, data))
    if problems:
        raise cleanup_failed(f"parts of attempt {record.sandbox} are left", problems)
    Path(record.path).unlink(missing_ok=True)


class _Unwind:
    """Runs undo steps over the entries of a kind, latest first, and collects what went wrong."""

    def __init__(self, record: LedgerRecord, problems: list[str]) -> None:
        self._record = record
        self._problems = problems

    def each(self, kind: str, step: Callable[[dict[str, Any]], list[str]]) -> None:
        for entry in reversed(self._record.entries):
            if entry.kind != kind:
                continue
            try:
                self._problems.extend(step(entry.data))
            except SandboxError as error:
                self._problems.append(str(error))
            except OSError as error:
                self._problems.append(describe(error))
            except (KeyError, TypeError, ValueError) as error:
                # A ledger of another version, or one that somebody edited.
                self._problems.append(f"unreadable entry {kind}: {error!r}")


def _kill(cgroup_host: CgroupHost, data: dict[str, Any]) -> list[str]:
    group = AttemptCgroup.at(cgroup_host, data["path"])
    if group.remove_at_once(data.get("leaves", ())):
        return []
    if group.kill(seconds=_KILL_SECONDS):
        return []
    return [f"processes in {group.path} do not die"]


def _remove_group(cgroup_host: CgroupHost, data: dict[str, Any]) -> list[str]:
    AttemptCgroup.at(cgroup_host, data["path"]).remove()
    return []


def _clear(record: LedgerRecord, data: dict[str, Any]) -> list[str]:
    # Held by a living process: that one gives the range back itself, as at the end of an ordinary attempt.
    clear_slot(data["lock_file"], record.sandbox.value)
    return []


def _remove_spool(record: LedgerRecord, data: dict[str, Any]) -> list[str]:
    expected = f"{record.state_dir}/spool/{record.sandbox}"
    if data["path"] != expected:
        return [f"{data['path']} is not the attempt's spool directory"]
    try:
        remove_tree(expected)
    except ExceptionGroup as group:
        return [describe(error) for error in group.exceptions if isinstance(error, OSError)]
    return []


def _end_init(data: dict[str, Any]) -> list[str]:
    """Kill the container's first process, if the ledger knows it and the number still means the same one."""
    pid, started = data.get("pid"), data.get("start_time")
    if not isinstance(pid, int) or not isinstance(started, int):
        return []
    return _end(pid, lambda: start_time(pid) == started)


def _end_runtime(data: dict[str, Any]) -> list[str]:
    """End a runtime's command that outlived the executor: it would go on and start the container after the cleanup.

    It is known by having this attempt's own runtime root as an argument, a path that no other command is given.
    """
    root = os.fsencode(str(data["runtime_root"]))
    problems: list[str] = []
    for pid in _pids():
        if _is_runtime(pid, root):
            problems.extend(_end(pid, partial(_is_runtime, pid, root)))
    return problems


def _is_runtime(pid: int, root: bytes) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return (b"--root", root) in pairwise(arguments) or b"--root=" + root in arguments


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _end(pid: int, still_it: Callable[[], bool]) -> list[str]:
    with contextlib.suppress(ProcessLookupError):
        pidfd = pidfd_open(pid)
        try:
            if still_it() and send_signal(pidfd, signal.SIGKILL) and not wait_ended(pidfd, _KILL_SECONDS):
                return [f"process {pid} does not die"]
        finally:
            os.close(pidfd)
    return []
