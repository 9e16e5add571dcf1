"""Holds: an image in use stays, whoever wants it gone, and a dead process uses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import build
import pytest
from registry_images import go, layers, open_store, preparing

from forgeyard_model.errors import ExecutorError
from forgeyard_oci.holds import Holds
from forgeyard_oci.image_store import ImageStore

pytestmark = pytest.mark.kernel

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """An empty store."""
    store = open_store(tmp_path / "store")
    yield store
    store.wait_synced()
    store.close()


@pytest.fixture
def image(tmp_path: Path) -> str:
    """A pinned reference to an image of two layers."""
    writer = build.LayoutWriter(tmp_path / "layout")
    made = writer.image(layers(2))
    writer.finish(made)
    return f"oci:{writer.path}@{made['digest']}"


def prune_all(store: ImageStore) -> Any:
    """Remove all that may be removed."""
    return store.prune(unused_for=0, keep_bytes=0)


def test_a_held_image_stays(store: ImageStore, image: str, tmp_path: Path) -> None:
    """prune passes it over and says so, rm refuses and names the process; after close() both work."""
    plan = store.prepare(image, None, tmp_path)
    hold = store.hold(plan)
    assert store.ls()[0].held
    report = prune_all(store)
    assert (report.images, report.kept, report.freed) == ((), (plan.identity,), 0)
    with pytest.raises(ExecutorError, match=f"in use by process {os.getpid()}") as caught:
        store.rm(image)
    assert caught.value.reason == "image_in_use"
    assert all(map(os.path.isdir, plan.lowers))
    hold.close()
    hold.close()
    assert not store.ls()[0].held
    assert store.rm(image).images == (plan.identity,)
    assert not any(map(os.path.exists, plan.lowers))


def test_between_prepare_and_hold(store: ImageStore, image: str, tmp_path: Path) -> None:
    """What prepare returned can't be removed before hold() takes over, not by another store of the same directory."""
    other = open_store(store.root)
    plan = store.prepare(image, None, tmp_path)
    assert prune_all(other).kept == (plan.identity,)
    with store.hold(plan):
        assert prune_all(other).kept == (plan.identity,)
    assert prune_all(other).images == (plan.identity,)


def test_each_prepare_counts(store: ImageStore, image: str, tmp_path: Path) -> None:
    """Two prepared, one held and let go: the other is still waiting for its hold."""
    plans = [store.prepare(image, None, tmp_path) for _ in range(2)]
    store.hold(plans[0]).close()
    assert prune_all(store).kept == (plans[0].identity,)
    store.hold(plans[1]).close()
    assert prune_all(store).images == (plans[0].identity,)


def test_a_hold_that_comes_too_late(store: ImageStore, image: str, tmp_path: Path) -> None:
    """An image that went away is never held as if it were there; the next prepare brings it back."""
    plan = store.prepare(image, None, tmp_path)
    store.hold(plan).close()
    assert prune_all(store).images == (plan.identity,)
    with pytest.raises(ExecutorError) as caught:
        store.hold(plan)
    assert caught.value.reason == "image_gone"
    assert store.prepare(image, None, tmp_path) == plan


def test_a_hold_dies_with_its_process(store: ImageStore, image: str, tmp_path: Path) -> None:
    """Killed without a word, a process holds nothing."""
    with preparing(store, image, tmp_path) as child:
        go(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        with pytest.raises(ExecutorError, match=f"in use by process {child.pid}"):
            store.rm(image)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert len(store.rm(image).images) == 1


def test_prepares_that_no_hold_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end after a minute, and one that is newer does not end with them."""
    now = [100.0]
    monkeypatch.setattr("forgeyard_oci.holds.time.monotonic", lambda: now[0])
    holds = Holds(tmp_path)
    holds.keep(DIGEST)
    now[0] += 40
    holds.keep(DIGEST)
    now[0] += 40
    assert holds.is_held(DIGEST)
    now[0] += 40
    assert not holds.is_held(DIGEST)


def test_holding_and_pruning_at_once(store: ImageStore, image: str, tmp_path: Path) -> None:
    """However they meet: whoever holds an image has all of it, until it lets go."""
    done: list[str] = []

    def use(_: int) -> None:
        for _ in range(15):
            plan = store.prepare(image, None, tmp_path)
            with store.hold(plan):
                assert all(map(os.path.isdir, plan.lowers))
                assert all(os.listdir(lower) for lower in plan.lowers)
            done.append(plan.identity)

    other = open_store(store.root)
    with ThreadPoolExecutor(3) as pool:
        users = [pool.submit(use, n) for n in range(2)]
        removed = 0
        while not all(user.done() for user in users):
            removed += len(prune_all(other).images)
        for user in users:
            user.result()
    assert len(done) == 30
    assert removed, "nothing was removed: this showed nothing"
