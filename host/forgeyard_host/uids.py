"""Ranges of host ids for user namespaces: one per attempt, from an operator's block, locked across processes.

Each range has a lock file. While an attempt uses the range the file says which one. An executor that dies lets go of
the lock but leaves the text: such a range is not handed out again before the attempt is known to be gone.
"""

# ruff: noqa: PTH208  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_host.cgroups.attempt import AttemptCgroup
from forgeyard_host.cgroups.detect import CgroupHost
from forgeyard_host.failures import describe
from forgeyard_host.locks import lock_alone
from forgeyard_host.processes import boot_id
from forgeyard_model.errors import SandboxError, SandboxErrorKind

DEFAULT_BASE: Final = 2_000_000_000
DEFAULT_SIZE: Final = 65536 * 2048


class UidRanges:
    """The ranges of one block. Safe to use from several threads and, through the lock files, several processes."""

    def __init__(
        self,
        block_base: int = DEFAULT_BASE,
        block_size: int = DEFAULT_SIZE,
        range_size: int = 65536,
        lock_dir: str = "/run/forgeyard/uids",
        *,
        etc: str = "/etc",
        cgroup_host: CgroupHost | None = None,
    ) -> None:
        """
        :param etc: where subuid, subgid, passwd and group are read from.
        :param cgroup_host: where a dead executor's groups are looked for; None: this host, looked at when needed.
        """
        self._base = block_base
        self._count = range_size
        self._slots = block_size // range_size
        self._lock_dir = lock_dir
        self._etc = etc
        self._cgroup_host = cgroup_host
        self._lock = threading.Lock()
        self._free: dict[int, int] = {}  # slot -> fd of its lock file, locked by this process
        self._used: dict[int, int] = {}
        self._next = 0
        self._taken: list[range] | None = None

    @property
    def block(self) -> range:
        """All ids that leases can hold; what Host has to be told."""
        return range(self._base, self._base + self._slots * self._count)

    def acquire(self, sandbox_id: str, owner: str, *, cgroup: str | None = None) -> UidLease:
        """A range that nobody else has.

        :param owner: id of the executor.
        :param cgroup: the attempt's group as given to AttemptCgroup.create. After a crash the range stays unused
            for as long as that group exists.
        :raises SandboxError: NAMESPACE_FAILED; reasons uid_ranges_exhausted, uid_locks_unusable.
        """
        text = {"sandbox": str(sandbox_id), "owner": owner, "cgroup": cgroup, "boot_id": boot_id()}
        try:
            with self._lock:
                slot, fd = self._free.popitem() if self._free else self._lock_new()
                os.pwrite(fd, json.dumps(text).encode(), 0)
                self._used[slot] = fd
        except OSError as error:
            raise _unusable(self._lock_dir, error) from error
        base = self._base + slot * self._count
        return UidLease(base, self._count, slot, f"{self._lock_dir}/{slot}.lock", self)

    def give_back(self, lease: UidLease) -> None:
        """The end of a lease: its range stays with this process, for the next attempt."""
        with self._lock:
            fd = self._used.pop(lease.slot, None)
            if fd is not None:
                os.ftruncate(fd, 0)
                self._free[lease.slot] = fd

    def close(self) -> None:
        """Let go of every range. One still leased keeps its text, and so its protection."""
        with self._lock:
            for fd in (*self._free.values(), *self._used.values()):
                os.close(fd)
            self._free.clear()
            self._used.clear()

    def _lock_new(self) -> tuple[int, int]:
        Path(self._lock_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        for step in range(self._slots):
            slot = (self._next + step) % self._slots
            if slot in self._used or self._overlaps(slot):
                continue
            fd = lock_alone(f"{self._lock_dir}/{slot}.lock")
            if fd is None:
                continue
            if self._clean(slot, fd):
                self._next = slot + 1
                return slot, fd
            os.close(fd)
        raise SandboxError(
            SandboxErrorKind.NAMESPACE_FAILED,
            "uid_ranges_exhausted",
            f"all {self._slots} uid ranges from {self._base} on are in use",
            details=f"{len(self._used)} of them by this executor",
            resolution="run fewer jobs at once, run `forgeyard gc`, or configure a larger uid block",
        )

    def _clean(self, slot: int, fd: int) -> bool:
        """Whether nothing of the range's last attempt is left; its text is removed then."""
        last = _text(fd)
        if last is None:
            return True
        # No process outlives its boot.
        if last.get("boot_id") == boot_id() and (
            self._group_exists(last.get("cgroup")) or _in_use(self._base + slot * self._count, self._count)
        ):
            return False
        os.ftruncate(fd, 0)
        return True

    def _group_exists(self, cgroup: object) -> bool:
        # A group cannot be removed with a process in it: its absence is proof, while a look at /proc can be dodged
        # by processes that fork faster than it reads.
        if not isinstance(cgroup, str):
            return False
        host = self._cgroup_host = self._cgroup_host or CgroupHost.detect()
        return AttemptCgroup.at(host, cgroup).exists()

    def _overlaps(self, slot: int) -> bool:
        if self._taken is None:
            self._taken = sorted(_taken_ids(self._etc), key=lambda ids: ids.start)
        first = self._base + slot * self._count
        return any(ids.start < first + self._count and first < ids.stop for ids in self._taken)


@dataclass(frozen=True, slots=True)
class UidLease:
    """Host ids base .. base+count-1, for users and groups. `lock_file` goes into the ledger."""

    base: int
    count: int
    slot: int
    lock_file: str
    ranges: UidRanges

    def release(self) -> None:
        """Give the range back, once nothing runs with its ids. A second call is fine."""
        self.ranges.give_back(self)


def foreign_ids(block: range, etc: str = "/etc") -> list[range]:
    """Ids of accounts and of others' subordinate ranges that lie in `block`. Ranges that touch them go unused."""
    return [ids for ids in _taken_ids(etc) if ids.start < block.stop and block.start < ids.stop]


def clear_slot(lock_file: str, sandbox_id: str) -> bool:
    """Free the range that a dead executor's attempt held; call it once that attempt is known to be gone.

    False when a living process has the range: then it is that process's to give back.
    """
    if not Path(lock_file).exists():
        return True
    fd = lock_alone(lock_file)
    if fd is None:
        return False
    try:
        last = _text(fd)
        if last is not None and last.get("sandbox") == sandbox_id:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    return True


def _text(fd: int) -> dict[str, Any] | None:
    raw = os.pread(fd, 4096, 0)
    if not raw:
        return None
    try:
        parsed = json.loads(raw)
    except ValueError:
        # A torn write of this boot or an older one: nobody can tell, so the look at /proc has to decide.
        return {"boot_id": boot_id()}
    return parsed if isinstance(parsed, dict) else {"boot_id": boot_id()}


def _in_use(base: int, count: int) -> bool:
    """Whether a process has an id of the range as any of its real, effective, saved or filesystem ids."""
    ids = range(base, base + count)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            status = Path(f"/proc/{name}/status").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in status.splitlines():
            if line.startswith(("Uid:", "Gid:")) and any(int(word) in ids for word in line.split()[1:]):
                return True
    return False


def _taken_ids(etc: str) -> Iterator[range]:
    for name in ("subuid", "subgid"):
        for fields in _rows(f"{etc}/{name}", 3):
            yield range(fields[1], fields[1] + fields[2])
    for fields in _rows(f"{etc}/passwd", 4):
        yield from (range(fields[2], fields[2] + 1), range(fields[3], fields[3] + 1))
    for fields in _rows(f"{etc}/group", 3):
        yield range(fields[2], fields[2] + 1)


def _rows(path: str, least: int) -> Iterator[list[int]]:
    """The fields of a colon-separated file, as numbers where they are; rows without enough of them are passed over."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        fields = [int(field) if field.isdecimal() else -1 for field in line.split(":")]
        if len(fields) >= least and not line.startswith("#"):
            yield fields


def _unusable(lock_dir: str, error: OSError) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NAMESPACE_FAILED,
        "uid_locks_unusable",
        f"cannot use the uid locks in {lock_dir}",
        details=describe(error),
        resolution="make the directory writable for the executor, or configure another one",
    )
