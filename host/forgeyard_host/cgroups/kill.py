"""Killing all that is in a group, and seeing that it is gone: a fork bomb included (seed, section 112)."""

# ruff: noqa: PTH112  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from typing import Final

from forgeyard_host.cgroups import files
from forgeyard_host.cgroups.detect import CgroupHost, CgroupMode
from forgeyard_host.processes import pidfd_open, send_signal

_FREEZE_SECONDS: Final = 0.2
"""A process deep in the kernel may not freeze; it is then killed without, and the loop comes back for its children."""
_PATIENCE: Final = 0.005
"""Seconds that processes killed at once get to vanish."""


def is_empty(host: CgroupHost, group: str) -> bool:
    """Whether no hierarchy has a process in `group` or below it."""
    return not any(
        files.read(f"{nested}/cgroup.procs") for path in host.paths(group) for nested in files.groups_below(path)
    )


def kill_group(host: CgroupHost, group: str, seconds: float) -> bool:
    """SIGKILL until empty. Returns False when something outlived `seconds` (a process the kernel cannot end)."""
    deadline = time.monotonic() + seconds
    pause = 0.0002
    at_once = _kill_at_once(host, group)
    while not is_empty(host, group):
        # The dying take their time: the slower way follows only when some are left after a few milliseconds.
        if not at_once or pause > _PATIENCE:
            _kill_each(host, group)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True


def _kill_at_once(host: CgroupHost, group: str) -> bool:
    """cgroup.kill, where the host has it; on a hybrid one it reaches what the runtime put into `unified` as well."""
    try:
        files.write(f"{host.hierarchies[-1]}{group}/cgroup.kill", "1")
    except OSError:  # no v2 hierarchy, one before Linux 5.14, or no such group in it: _kill_each does it then
        return False
    return True


def _kill_each(host: CgroupHost, group: str) -> None:
    freezer = host.controllers.get("freezer") if host.mode is CgroupMode.V1 else host.hierarchies[0]
    killed: set[int] = set()
    if freezer is not None and os.path.isdir(freezer + group):
        if host.mode is CgroupMode.V1:
            killed = _kill_frozen(freezer + group, "freezer.state", "FROZEN", "THAWED")
        else:
            killed = _kill_frozen(freezer + group, "cgroup.freeze", "1", "0")
    # Those that are in the group of some hierarchy only, as a runtime killed while it placed its child leaves them.
    for path in host.paths(group):
        for nested in files.groups_below(path):
            for pid in files.processes(nested):
                if pid not in killed:
                    _kill_member(nested, pid)


def _kill_frozen(directory: str, name: str, frozen: str, thawed: str) -> set[int]:
    """Freeze, so that nothing forks away; kill all; thaw, since a frozen process does not die. Returns the pids."""
    killed: set[int] = set()
    try:
        files.write(f"{directory}/{name}", frozen)
        _wait_frozen(directory, name)
        for group in files.groups_below(directory):
            for pid in files.processes(group):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # gone meanwhile
            raise
    finally:
        # A paused container is frozen by its own leaf as well.
        for group in files.groups_below(directory):
            with contextlib.suppress(FileNotFoundError):
                files.write(f"{group}/{name}", thawed)
    return killed


def _wait_frozen(directory: str, name: str) -> None:
    deadline = time.monotonic() + _FREEZE_SECONDS
    while time.monotonic() < deadline:
        if name == "freezer.state":
            done = (files.read(f"{directory}/{name}") or "FROZEN").strip() == "FROZEN"
        else:
            done = files.keyed(f"{directory}/cgroup.events").get("frozen", 1) == 1
        if done:
            return
        time.sleep(0.0002)


def _kill_member(group: str, pid: int) -> None:
    """Kill `pid` if it is still in `group` once we hold it: by then the number may belong to a stranger."""
    try:
        pidfd = pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in files.processes(group):
            send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
