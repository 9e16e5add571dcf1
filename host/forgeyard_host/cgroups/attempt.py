"""The group of one attempt: its parent in every hierarchy is ours, the leaves below it are the runtime's."""

# ruff: noqa: PTH102, PTH103, PTH106, PTH112  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from forgeyard_host.cgroups import files, kill
from forgeyard_host.cgroups.detect import CgroupHost, CgroupMode
from forgeyard_host.cgroups.evidence import AppliedLimits, read_evidence, read_limits, read_live, read_usage
from forgeyard_host.failures import cleanup_failed, describe
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.live import LiveUsage
from forgeyard_model.result import Evidence, ResourceUsage

_REMOVE_SECONDS: Final = 2.0
_MAKE_TRIES: Final = 100
_WANTED: Final = ("cpu", "cpuset", "io", "memory", "pids", "hugetlb")


@dataclass(frozen=True, slots=True)
class AttemptCgroup:
    """`path`: below each hierarchy's mountpoint, base included."""

    host: CgroupHost
    path: str

    @classmethod
    def create(cls, host: CgroupHost, parent_path: str) -> Self:
        """Make the group `parent_path` ("/forgeyard/<executor>/<ulid>") in every hierarchy.

        On v2 the controllers are passed on down to it, so that limits on a leaf work. Existing ones are fine.

        :raises SandboxError: RESOURCE_LIMIT_FAILED.
        """
        group = cls.at(host, parent_path)
        try:
            for directory in host.paths(group.path):
                _make(directory)
            if host.mode is CgroupMode.V2:
                group._pass_controllers_on()
        except OSError as error:
            raise _not_made(error) from error
        return group

    @classmethod
    def at(cls, host: CgroupHost, parent_path: str) -> Self:
        """The group as `create` would make it, without making it: to kill and remove what a crash left."""
        return cls(host, f"{host.base}/{parent_path.strip('/')}")

    def _pass_controllers_on(self) -> None:
        point = self.host.hierarchies[0]
        directory = f"{point}{self.host.base}"
        for name in ("", *self.path.removeprefix(self.host.base).strip("/").split("/")):
            directory += f"/{name}" if name else ""
            there = (files.read(f"{directory}/cgroup.controllers") or "").split()
            passed = (files.read(f"{directory}/cgroup.subtree_control") or "").split()
            missing = [name for name in _WANTED if name in there and name not in passed]
            if missing:
                files.write(f"{directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in missing))

    def bound(self, *, memory: int | None, pids: int | None) -> None:
        """Limit the whole attempt as well, to the sum of what its containers have. Where a controller is missing, not.

        A container meets its own limit first, so that whose evidence counts what does not change.

        :raises SandboxError: RESOURCE_LIMIT_FAILED.
        """
        v2 = self.host.mode is CgroupMode.V2
        files_of = (
            ("memory", "memory.max" if v2 else "memory.limit_in_bytes", memory),
            ("pids", "pids.max", pids),
        )
        try:
            for controller, name, value in files_of:
                point = self.host.hierarchies[0] if v2 else self.host.controllers.get(controller)
                if value is not None and point is not None and files.read(f"{point}{self.path}/{name}") is not None:
                    files.write(f"{point}{self.path}/{name}", str(value))
        except OSError as error:
            raise _not_made(error) from error

    def leaf(self, name: str) -> str:
        """The OCI cgroupsPath of a container of this attempt; the runtime makes and removes it."""
        return f"{self.path}/{name}"

    def evidence(self, leaf: str) -> Evidence:
        """Memory and pids evidence of `leaf` (a name), with disk left empty. Read it before the runtime's delete.

        On v2, counters of a leaf that is gone come from this group, which sums its containers.
        """
        return read_evidence(self.host, self.path, self.leaf(leaf))

    def usage(self, leaf: str) -> ResourceUsage:
        """What `leaf` used so far; the fields this host cannot tell are None."""
        return read_usage(self.host, self.path, self.leaf(leaf))

    def live(self, leaf: str) -> LiveUsage:
        """What `leaf` uses now, but for its disk."""
        return read_live(self.host, self.path, self.leaf(leaf))

    def applied(self, leaf: str) -> AppliedLimits:
        """The limits that the kernel really has for `leaf`."""
        return read_limits(self.host, self.leaf(leaf))

    def kill(self, leaf: str | None = None, *, seconds: float = 5.0) -> bool:
        """Kill everything in `leaf`, or in the whole attempt, and wait until it is empty. False after `seconds`."""
        return kill.kill_group(self.host, self.leaf(leaf) if leaf else self.path, seconds)

    def empty(self, leaf: str | None = None) -> bool:
        """Whether no process is in `leaf`, or in the whole attempt, in any hierarchy. A missing group is empty."""
        return kill.is_empty(self.host, self.leaf(leaf) if leaf else self.path)

    def processes(self, leaf: str) -> tuple[int, ...]:
        """Processes in `leaf` itself, as one hierarchy has them."""
        point = self.host.controllers.get("pids", self.host.hierarchies[0])
        return tuple(files.processes(point + self.leaf(leaf)))

    def remove_at_once(self, leaves: Iterable[str] = ()) -> bool:
        """Remove the group and `leaves` if nothing is in them, without a look first: the kernel refuses otherwise.

        True proves that no process was left in any hierarchy.
        """
        gone = True
        for path in self.host.paths(self.path):
            for group in (*(f"{path}/{leaf}" for leaf in leaves), path):
                try:
                    os.rmdir(group)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                        raise
                    gone = False
        return gone

    def exists(self) -> bool:
        """Whether any hierarchy still has the group."""
        return any(os.path.isdir(path) for path in self.host.paths(self.path))

    def remove(self) -> None:
        """Remove the group and everything below it, in every hierarchy, retrying while the kernel lets go of it.

        :raises SandboxError: CLEANUP_FAILED, naming the groups that are left.
        """
        deadline = time.monotonic() + _REMOVE_SECONDS
        problems = [problem for path in self.host.paths(self.path) if (problem := _remove(path, deadline))]
        if problems:
            raise cleanup_failed(f"control groups of {self.path} are left", problems)


def _make(directory: str) -> None:
    """Make the group with its ancestors, of which another executor that ends may take an empty one away meanwhile."""
    for _ in range(_MAKE_TRIES):
        try:
            os.mkdir(directory, 0o755)
        except FileExistsError:
            return
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                os.makedirs(directory.rpartition("/")[0], 0o755, exist_ok=True)
        else:
            return
    os.mkdir(directory, 0o755)


def _remove(path: str, deadline: float) -> str:
    """Returns what stayed, or ""."""
    pause = 0.0005
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > deadline:
                return describe(error)
        else:
            return ""
        if not _remove_children(path):
            time.sleep(pause)
            pause = min(pause * 2, 0.05)


def _remove_children(path: str) -> bool:
    """Whether one more group is gone than before."""
    removed = False
    for group in files.groups_below(path):
        if group != path:
            try:
                os.rmdir(group)
                removed = True
            except FileNotFoundError:
                removed = True
            except OSError:
                continue  # still busy: the caller comes back until its deadline
    return removed


def _not_made(error: OSError) -> SandboxError:
    if error.errno == errno.EBUSY:
        cure = "start the executor in a child of its delegated group (Delegate=yes, DelegateSubgroup=executor)"
    else:
        cure = "run as root, or in a group that is delegated to this user"
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED,
        "no_cgroup",
        "cannot make the attempt's control groups",
        details=describe(error),
        resolution=cure,
    )
