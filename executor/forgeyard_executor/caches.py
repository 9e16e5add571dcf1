"""Caches between jobs: what a job is shown, and what of it is kept (docs/caches.md).

How an attempt uses them, in this order:

1. ``leases = store.open(spec.caches, tenant=context.tenant, trusted=context.trusted)`` before planning
2. ``parts = cache_requests(leases, user)``: joins the plan's binds, overlays, scratch and mounts
3. ``make_mountpoints(requests, writable, (uid, gid))`` after the host's setup, before the container
4. ``lease.commit(left_in(lease, placed), ...)`` once the job's tree is dead and it succeeded, mounts still up;
   else ``lease.report("why not")``
5. ``lease.close()`` after the mounts are gone
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeyard_executor.cache_copy import Copied, Owners, TooLarge, copy_cache
from forgeyard_executor.cache_store import CacheInfo, CacheName, Snapshot, SnapshotStore
from forgeyard_host.files import open_beneath
from forgeyard_host.operations import BindRequest, IdMapKind, OverlayRequest, SandboxPlaced, ScratchDir
from forgeyard_model.cache import CacheMode, CacheReport, CacheRequest
from forgeyard_model.config import CacheRules, Space
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.plan import JobUser, MountKind, PlanMount

log = logging.getLogger("forgeyard.executor")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Caches removed, and their bytes as they were counted."""

    caches: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheParts:
    """What a plan and the host's setup need for an attempt's caches."""

    binds: tuple[BindRequest, ...] = ()
    overlays: tuple[OverlayRequest, ...] = ()
    scratch: tuple[ScratchDir, ...] = ()
    mounts: tuple[PlanMount, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """What a job left: `view` is all that it saw, `written` what of it lies in its own writable layer."""

    view: Path
    written: Path


class CacheStore:
    """Caches of all tenants. Blocking; safe in several threads and processes.

    :param root: <state>/caches.
    :param size_cap: bytes of one cache. `total_cap`: of all.
    :param keep_free: what saving leaves free on the file system.
    """

    def __init__(self, root: Path, *, size_cap: int, total_cap: int, keep_free: Space | None = None) -> None:
        self.snapshots = SnapshotStore(root)
        self.size_cap = size_cap
        self.total_cap = total_cap
        self._keep_free = keep_free or Space(0)

    @classmethod
    def configured(cls, root: Path, rules: CacheRules, keep_free: Space) -> CacheStore:
        """With the bounds of a configuration."""
        return cls(root, size_cap=rules.key_size, total_cap=rules.total_size, keep_free=keep_free)

    def open(self, caches: Sequence[CacheRequest], *, tenant: str, trusted: bool) -> tuple[CacheLease, ...]:
        """What an attempt sees of each cache, held until its lease is closed.

        An untrusted attempt reads what trusted ones left. Where there is nothing, it has caches of its own, which no
        trusted attempt ever reads.

        :raises ExecutorError: IO_FAILED.
        """
        leases: list[CacheLease] = []
        try:
            for index, cache in enumerate(caches):
                names = [CacheName(tenant, True, cache.key)]
                if not trusted:
                    names.append(CacheName(tenant, False, cache.key))
                leases.append(self._lease(f"cache-{index}", cache, names))
        except OSError as error:
            for lease in leases:
                lease.close()
            raise ExecutorError(
                ExecutorErrorKind.IO_FAILED,
                "cache_store",
                "the caches can't be read",
                details=str(error),
                resolution=f"check {self.snapshots.root}, or take caches out of the job",
            ) from error
        return tuple(leases)

    def _lease(self, slot: str, cache: CacheRequest, names: list[CacheName]) -> CacheLease:
        found = ((name, self.snapshots.current(name)) for name in names)
        source, snapshot = next(((name, held) for name, held in found if held is not None), (names[-1], None))
        return CacheLease(self, slot, cache, source, names[-1], snapshot)

    def room(self) -> int:
        """Bytes that one cache may have right now."""
        space = os.statvfs(self.snapshots.root)
        free = space.f_bavail * space.f_frsize - self._keep_free.of(space.f_blocks * space.f_frsize)
        return max(0, min(self.size_cap, free))

    def all(self) -> tuple[CacheInfo, ...]:
        """Every cache, the longest unused first."""
        return self.snapshots.all()

    def prune(
        self, *, unused_for: float | None = None, keep_bytes: int | None = None, free_bytes: int | None = None
    ) -> PruneReport:
        """Remove caches that no job uses, the longest unused first: all that one of the conditions names.

        :param unused_for: all that no job used for so many seconds.
        :param keep_bytes: until no more than that many bytes are kept.
        :param free_bytes: until that many bytes were removed.
        """
        caches, now = self.all(), time.time()
        total, removed, freed = sum(info.bytes for info in caches), 0, 0
        for info in caches:
            wanted = (
                (unused_for is not None and now - info.last_used > unused_for)
                or (keep_bytes is not None and total > keep_bytes)
                or (free_bytes is not None and freed < free_bytes)
            )
            if wanted and not info.held and self.snapshots.remove(info.path.name):
                total, removed, freed = total - info.bytes, removed + 1, freed + info.bytes
        return PruneReport(removed, freed)

    def tidy(self) -> None:
        """Hold the bound of all caches, and remove what killed processes left. What can't be is logged."""
        try:
            self.prune(keep_bytes=self.total_cap)
            self.sweep()
        except OSError as error:
            log.warning("tidying up the caches: %s", error)

    def sweep(self) -> int:
        """Remove what killed processes left half done."""
        return self.snapshots.sweep()


@dataclass(slots=True)
class CacheLease:
    """One cache of one attempt.

    :param source: whose snapshot is shown. `target`: where what the job leaves would go.
    :param snapshot: what is shown, held; None where nothing is kept under the key.
    """

    store: CacheStore
    slot: str
    request: CacheRequest
    source: CacheName
    target: CacheName
    snapshot: Snapshot | None

    @property
    def hit(self) -> bool:
        """Something is kept under the key."""
        return self.snapshot is not None

    @property
    def lower(self) -> str:
        """The directory to show: the snapshot's files, or an empty one."""
        return str(self.store.snapshots.empty if self.snapshot is None else self.snapshot.tree)

    @property
    def writable(self) -> bool:
        """The job may write to what it sees."""
        return self.request.mode is CacheMode.RW

    def report(self, why: str = "") -> CacheReport:
        """What became of it without a commit.

        :param why: why nothing was saved.
        """
        size = 0 if self.snapshot is None else self.snapshot.bytes
        return CacheReport(self.request.key, self.request.path, self.request.mode, self.hit, why=why, bytes=size)

    def commit(self, left: Left, *, uid_base: int, uid_count: int, job: tuple[int, int]) -> CacheReport:
        """Keep what the job left, for the next one; the last to do so wins. Only once nothing of the job runs.

        What can't be kept is no failure of the job: the report says why, and what was kept before stays.

        :param job: uid and gid of the job's user in its sandbox.
        """
        if not self.writable:
            return self.report()
        if self.hit and self.source != self.target:
            return self.report("an untrusted job only reads what trusted jobs share")
        try:
            if not _holds_anything(left.written):
                return self.report("nothing was changed")
            return self._save(left.view, Owners(uid_base, uid_count, *job))
        except TooLarge as error:
            return self.report(str(error))
        except OSError as error:
            return self.report(f"{error.strerror or error}")

    def _save(self, view: Path, owners: Owners) -> CacheReport:
        snapshots, target = self.store.snapshots, self.target
        new = snapshots.begin()
        published = False
        try:
            copied = self._copy(view, new, owners)
            snapshots.publish(target, new, copied.bytes)
            published = True
        finally:
            if published:
                new.close()
            else:
                snapshots.discard(new)
        self.store.tidy()
        request = self.request
        return CacheReport(request.key, request.path, request.mode, self.hit, True, "", copied.bytes, copied.notes)

    def _copy(self, view: Path, new: Snapshot, owners: Owners) -> Copied:
        fds = [os.open(path, _DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC) for path in (view, new.tree)]
        try:
            previous = None
            if self.snapshot is not None:
                previous = os.open(self.snapshot.tree, _DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                fds.append(previous)
            return copy_cache(fds[0], fds[1], owners, previous=previous, most=self.store.room())
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Let go of the snapshot, which is removed when another has taken its place. Again is fine."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            snapshot.close()
            try:
                self.store.snapshots.reap(self.source.directory)
            except OSError as error:  # the next saving tries again; this attempt has what it wanted
                log.warning("removing an old snapshot: %s", error)


def _holds_anything(directory: Path) -> bool:
    with os.scandir(directory) as entries:
        return next(entries, None) is not None


def cache_requests(leases: Sequence[CacheLease], user: JobUser) -> CacheParts:
    """How the caches of an attempt are shown to `user`: read-only, as a layer over a snapshot, or as a directory of
    the attempt's own where there is no snapshot. What is written counts as the job's disk. Pure."""
    binds, overlays, scratch, mounts = [], [], [], []
    for lease in leases:
        if not lease.writable:
            binds.append(BindRequest(lease.slot, lease.lower, IdMapKind.OWNER))
        elif lease.hit:
            overlays.append(OverlayRequest(lease.slot, (lease.lower,), IdMapKind.OWNER, upper=lease.slot))
        else:
            scratch.append(ScratchDir(lease.slot, lease.slot, 0o755, user.uid, user.gid))
        mounts.append(PlanMount(lease.request.path, MountKind.BIND, lease.slot, read_only=not lease.writable))
    return CacheParts(tuple(binds), tuple(overlays), tuple(scratch), tuple(mounts))


def left_in(lease: CacheLease, placed: SandboxPlaced) -> Left:
    """Where the files of a writable cache are once its job has ended, until its mounts are taken down."""
    view = Path(placed.sources[lease.slot])
    return Left(view, Path(placed.scratch, lease.slot, "upper") if lease.hit else view)


def make_mountpoints(caches: Sequence[CacheRequest], writable: Mapping[str, str], owner: tuple[int, int]) -> None:
    """Make the places of caches inside the job's writable directories, as the job's own.

    The runtime would make them as well, but owned by root of the sandbox, and then a job could put nothing beside
    its cache.

    :param writable: host path of each writable directory, by its path in the sandbox.
    :param owner: uid and gid on the host.
    :raises InvalidRequest: when something that is no directory is in the way.
    """
    for cache in caches:
        tops = [top for top in writable if cache.path.startswith(top + "/")]
        if tops:
            top = max(tops, key=len)
            try:
                _make_directories(writable[top], cache.path[len(top) + 1 :].split("/"), owner)
            except OSError as error:
                cure = f"can't be made in {top} ({error.strerror}): choose another path"
                raise InvalidRequest("caches.path", cache.path, cure) from error


def _make_directories(top: str, parts: Sequence[str], owner: tuple[int, int]) -> None:
    fd = os.open(top, _DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            try:
                os.mkdir(part, 0o755, dir_fd=fd)
                made = True
            except FileExistsError:
                made = False
            below = open_beneath(fd, part, _DIRECTORY, cross_mounts=False)
            os.close(fd)
            fd = below
            if made:
                os.fchmod(fd, 0o755)
                os.fchown(fd, *owner)
    finally:
        os.close(fd)
