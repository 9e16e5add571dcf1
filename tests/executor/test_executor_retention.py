"""Retention: what is kept unused for too long goes, what is in use stays, whatever else goes wrong."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgeyard_executor.caches import CacheStore, Left
from forgeyard_executor.retention import Keepers, apply_retention, remove_outputs
from forgeyard_executor.state import StatePaths
from forgeyard_host.ledger import ExecutorLock
from forgeyard_model.cache import CacheRequest
from forgeyard_model.config import Retention
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.identity import SandboxId

HOUR = 3600.0
Spool = Callable[..., Path]


@pytest.fixture
def paths(state_dir: Path) -> StatePaths:
    """A state directory that no executor has open."""
    paths = StatePaths(state_dir)
    paths.make()
    return paths


@pytest.fixture
def store(paths: StatePaths) -> CacheStore:
    """Its caches."""
    return CacheStore(paths.caches, size_cap=1 << 20, total_cap=1 << 20)


@pytest.fixture
def lock(paths: StatePaths) -> Iterator[ExecutorLock]:
    """A living executor."""
    lock = ExecutorLock(str(paths.root), SandboxId.mint().value)
    yield lock
    lock.release()


def keepers(paths: StatePaths, store: CacheStore, pruned: list[float | None] | None = None) -> Keepers:
    """The stores; images are only counted."""
    calls = [] if pruned is None else pruned
    return Keepers(paths, lambda: store, lambda unused, _: calls.append(unused))


def spool(paths: StatePaths, executor: str, *, age: float) -> Path:
    """Output of an attempt, last written `age` seconds ago."""
    path = paths.spool(executor, SandboxId.mint())
    path.mkdir(parents=True)
    for one in (path / "segment", path):
        if one != path:
            one.write_bytes(b"x")
        os.utime(one, (time.time() - age, time.time() - age))
    return path


def save(store: CacheStore, key: str, *, age: float) -> None:
    """A cache that was last used `age` seconds ago."""
    (lease,) = store.open((CacheRequest(key, "/c"),), tenant="", trusted=True)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "file").write_text(key)
        assert lease.commit(Left(Path(name), Path(name)), uid_base=0, uid_count=65536, job=(0, 0)).saved
    lease.close()
    (info,) = (info for info in store.all() if info.name.key == key)
    os.utime(info.path / "entry.json", (time.time() - age, time.time() - age))


def test_caches_that_no_job_used_go(paths: StatePaths, store: CacheStore) -> None:
    """By their last use; without a time they stay, and what a dead process left half done goes in any case."""
    save(store, "old", age=3 * HOUR)
    save(store, "new", age=HOUR)
    (store.snapshots.partial / "dead").mkdir()
    assert apply_retention(Retention(), keepers(paths, store)) == ()
    assert [info.name.key for info in store.all()] == ["old", "new"]
    assert list(store.snapshots.partial.iterdir()) == []
    assert apply_retention(Retention(caches=2 * HOUR), keepers(paths, store)) == ()
    assert [info.name.key for info in store.all()] == ["new"]


def test_output_that_nobody_collected_goes(paths: StatePaths, store: CacheStore, lock: ExecutorLock) -> None:
    """Of ended attempts, after the time; of one that runs, never; of dead executors as well."""
    old, new, running = (spool(paths, lock.executor_id, age=age) for age in (3 * HOUR, HOUR, 3 * HOUR))
    (paths.root / "ledger").mkdir(exist_ok=True)
    ledger = paths.root / "ledger" / f"{running.name}.jsonl"
    ledger.write_text("")
    dead = spool(paths, SandboxId.mint().value, age=3 * HOUR)
    assert apply_retention(Retention(outputs=2 * HOUR), keepers(paths, store)) == ()
    assert [path.exists() for path in (old, new, running, dead, dead.parent)] == [False, True, True, False, False]
    ledger.unlink()


def test_short_space_takes_only_what_dead_executors_left(paths: StatePaths, lock: ExecutorLock) -> None:
    """What a living caller may still read is no reserve."""
    mine = spool(paths, lock.executor_id, age=99 * HOUR)
    spool(paths, SandboxId.mint().value, age=0)
    assert remove_outputs(paths, older_than=None) == 1
    assert mine.exists()


def test_one_store_that_fails_does_not_stop_the_next(paths: StatePaths, store: CacheStore) -> None:
    """Said, and the rest is done."""
    paths.images.mkdir()
    save(store, "old", age=3 * HOUR)

    def broken(unused: float | None, free: int | None) -> None:
        raise ExecutorError(ExecutorErrorKind.IO_FAILED, "image_store", f"broken {unused} {free}")

    errors = apply_retention(Retention(images=HOUR, caches=HOUR), Keepers(paths, lambda: store, broken))
    assert errors == ("images: broken 3600.0 None",)
    assert store.all() == ()


def test_stores_that_are_not_there_are_not_made(paths: StatePaths) -> None:
    """A host that never had an image or a cache opens neither."""

    def never(*_: object) -> CacheStore:
        pytest.fail("opened")

    assert apply_retention(Retention(HOUR, HOUR, HOUR), Keepers(paths, never, never)) == ()
    assert not paths.caches.exists()


def test_what_makes_room_first(paths: StatePaths, store: CacheStore) -> None:
    """Output of the dead, then caches, then images, each asked for so many bytes."""
    asked: list[float | None] = []
    paths.images.mkdir()
    kinds = keepers(paths, store, asked).collectors()
    assert [kind.name for kind in kinds] == ["outputs", "caches", "images"]
    save(store, "k", age=0)
    for kind in kinds:
        kind.collect(1)
    assert (store.all(), asked) == ((), [None])
