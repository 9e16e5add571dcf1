"""Snapshots of caches on disk. A snapshot is never written to once it has its place.

::

    <root>/entries/<digest>/        one cache: of one tenant, one level of trust, one key
        entry.json                  whose it is and its key, as they were given; its mtime is the last use
        current -> <snapshot>       what the next job sees; replaced by rename
        <snapshot>/tree/            the files; <snapshot>/snapshot.json what was counted
    <root>/partial/<snapshot>/      being built, or on its way out; nothing there is ever trusted
    <root>/empty/                   what a job sees where there is nothing yet
    <root>/lock                     flock'ed while something gets or loses its place in entries/

Who uses a snapshot, or builds one, holds a flock on its directory, which goes with its process. The root is 0700: no
user of this host reaches what jobs left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_executor.cache_copy import STORED
from forgeyard_host.files import remove_tree
from forgeyard_host.syscalls import syncfs

log: Final = logging.getLogger("forgeyard.executor")

_CURRENT: Final = "current"
_ENTRY: Final = "entry.json"
_SNAPSHOT: Final = "snapshot.json"
_TREE: Final = "tree"
_TRIES: Final = 2000
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class CacheName:
    """Which cache. Two different names never share a directory: it is the digest of all three parts."""

    tenant: str
    trusted: bool
    key: str

    @property
    def directory(self) -> str:
        """Its name below entries/."""
        parts = json.dumps([self.tenant, self.trusted, self.key])
        return hashlib.sha256(parts.encode()).hexdigest()


@dataclass(slots=True)
class Snapshot:
    """One snapshot, locked through `fd`; `close` lets go."""

    path: Path
    fd: int

    @property
    def tree(self) -> Path:
        """Its files."""
        return self.path / _TREE

    @property
    def bytes(self) -> int:
        """What was counted when it was made; 0 when that is not known."""
        return _counted(self.path)

    def close(self) -> None:
        """Let go of it. Again is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """One cache on disk. `last_used`: seconds since the epoch. `held`: a job uses it."""

    name: CacheName
    bytes: int
    last_used: float
    held: bool
    path: Path


class SnapshotStore:
    """The directory of all caches. Blocking; safe in several threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries, self.partial, self.empty = root / "entries", root / "partial", root / "empty"
        for folder in (root, self.entries, self.partial, self.empty):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        os.chown(self.empty, STORED, STORED)
        self.empty.chmod(0o755)

    def current(self, name: CacheName) -> Snapshot | None:
        """The snapshot that a job under `name` sees, held; None when there is none."""
        entry = self.entries / name.directory
        for _ in range(_TRIES):
            try:
                snapshot = entry / (entry / _CURRENT).readlink()
            except FileNotFoundError:
                return None
            if (found := _hold(snapshot, fcntl.LOCK_SH)) is not None:
                with suppress(FileNotFoundError):
                    os.utime(entry / _ENTRY)
                return found
            # Removed between the two calls, and then the link is a new one by now; or somebody looks whether it is in
            # use, which takes no time.
            time.sleep(0.001)
        return None

    def begin(self) -> Snapshot:
        """A new snapshot with an empty tree, still in partial/."""
        while True:
            path = self.partial / secrets.token_hex(10)
            path.mkdir(mode=0o700)
            if (found := _hold(path, fcntl.LOCK_EX)) is not None:
                found.tree.mkdir(mode=0o700)
                return found

    def publish(self, name: CacheName, snapshot: Snapshot, size: int) -> None:
        """Give `snapshot` its place, so that the next job sees it. A crash before the end leaves the one before.

        :raises OSError: and then the one before stays.
        """
        (snapshot.path / _SNAPSHOT).write_text(json.dumps({"bytes": size}))
        # Or after a power cut the link could lead to files without their contents.
        syncfs(snapshot.fd, str(snapshot.path))
        entry = self.entries / name.directory
        with self._locked():
            entry.mkdir(mode=0o700, exist_ok=True)
            label = {"tenant": name.tenant, "trusted": name.trusted, "key": name.key}
            (entry / _ENTRY).write_text(json.dumps(label))
            placed = entry / snapshot.path.name
            snapshot.path = snapshot.path.rename(placed)
            fcntl.flock(snapshot.fd, fcntl.LOCK_SH)  # others may use it from here on; it stays in use by us
            link = entry / f".{placed.name}"
            link.symlink_to(placed.name)
            link.replace(entry / _CURRENT)
        self.reap(name.directory)

    def reap(self, directory: str) -> None:
        """Remove the snapshots of one cache that are no longer current and that nobody uses."""
        entry = self.entries / directory
        with self._locked():
            current = _link_target(entry / _CURRENT)
            gone = [held for path in _snapshots(entry) if path.name != current and (held := self._withdraw(path))]
        self._destroy(gone)

    def remove(self, directory: str) -> bool:
        """Remove one cache, unless a job uses it."""
        entry = self.entries / directory
        with self._locked():
            found = [(path, _hold(path, fcntl.LOCK_EX)) for path in _snapshots(entry)]
            held = [snapshot for _, snapshot in found if snapshot is not None]
            if len(held) < len(found):
                for snapshot in held:
                    snapshot.close()
                return False
            # The link goes first: what it leads to must never be half there.
            (entry / _CURRENT).unlink(missing_ok=True)
            for snapshot in held:
                snapshot.path = snapshot.path.rename(self.partial / snapshot.path.name)
            _remove(entry)
        self._destroy(held)
        return True

    def sweep(self) -> int:
        """Remove what was being built or removed by processes that are gone; how many there were."""
        left = [held for path in self.partial.iterdir() if (held := _hold(path, fcntl.LOCK_EX)) is not None]
        self._destroy(left)
        return len(left)

    def all(self) -> tuple[CacheInfo, ...]:
        """Every cache, the longest unused first."""
        found = [info for entry in self.entries.iterdir() if (info := _info(entry)) is not None]
        return tuple(sorted(found, key=lambda info: info.last_used))

    def discard(self, snapshot: Snapshot) -> None:
        """Remove one that was begun and not published."""
        self._destroy([snapshot])

    def _withdraw(self, path: Path) -> Snapshot | None:
        """Out of sight, when nobody uses it."""
        snapshot = _hold(path, fcntl.LOCK_EX)
        if snapshot is not None:
            snapshot.path = path.rename(self.partial / path.name)
        return snapshot

    @staticmethod
    def _destroy(snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            _remove(snapshot.path)
            snapshot.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    """What can't be removed is said, and a later sweep tries again; it is out of every job's sight already."""
    try:
        remove_tree(str(path))
    except* OSError as group:
        log.warning("removing %s: %s", path, "; ".join(map(str, group.exceptions)))


def _hold(path: Path, kind: int) -> Snapshot | None:
    """The directory `path`, locked; None when somebody else has it, or it has gone or moved meanwhile."""
    try:
        fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        mine, there = os.fstat(fd), path.lstat()
        if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
            return Snapshot(path, fd)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _snapshots(entry: Path) -> list[Path]:
    try:
        return [path for path in entry.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []


def _link_target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def _counted(snapshot: Path) -> int:
    try:
        return int(json.loads((snapshot / _SNAPSHOT).read_text())["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _info(entry: Path) -> CacheInfo | None:
    """None for an entry that is being made or removed."""
    try:
        label = json.loads((entry / _ENTRY).read_text())
        name = CacheName(label["tenant"], label["trusted"], label["key"])
        used = (entry / _ENTRY).stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return _unlabelled(entry)
    snapshots = _snapshots(entry)
    held = False
    for path in snapshots:
        snapshot = _hold(path, fcntl.LOCK_EX)
        held = held or snapshot is None
        if snapshot is not None:
            snapshot.close()
    return CacheInfo(name, sum(map(_counted, snapshots)), used, held, entry)


def _unlabelled(entry: Path) -> CacheInfo | None:
    """A crash of the machine may leave an entry without its label: it can only be removed, so it comes first."""
    with suppress(OSError):
        if entry.stat().st_mtime < time.time() - 3600:
            return CacheInfo(CacheName("", trusted=False, key=""), 0, 0.0, held=False, path=entry)
    return None
