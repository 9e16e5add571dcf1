"""verify: every kind of damage is found by name, repaired on request, and pulled again afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import build
import pytest
from bad_registry import BadRegistry
from registry_images import Served, contents, layers, open_store, serve

from forgeyard_oci.image_store import ImageStore

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    """A store with an image of two layers under a tag, and the registry it came from."""
    base = tmp_path_factory.mktemp("origin")
    with BadRegistry() as registry:
        writer, store = build.LayoutWriter(base / "layout"), open_store(base / "store")
        served = serve(registry, writer, writer.image(layers(2)), "1")
        store.pull(f"{served.repository}:1")
        store.close()
        yield store.root, served


@pytest.fixture
def store(origin: tuple[Path, Served], tmp_path: Path) -> Iterator[ImageStore]:
    """A copy of that store."""
    shutil.copytree(origin[0], tmp_path / "store")
    store = open_store(tmp_path / "store")
    yield store
    store.wait_synced()
    store.close()


@pytest.fixture
def image(origin: tuple[Path, Served]) -> Served:
    """What is in it."""
    return origin[1]


def blob(store: ImageStore, digest: str) -> Path:
    """A blob's file in the store."""
    return store.root / "layout/blobs" / digest.replace(":", "/")


def tree_file(store: ImageStore) -> Path:
    """A file of some tree."""
    return next((store.root / "layers").glob("*/tree/d/f*"))


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


DAMAGE: dict[str, tuple[str, Callable[[ImageStore, Served], None]]] = {
    "manifest changed": ("blob", lambda store, image: _flip(blob(store, image.digest))),
    "layer changed": ("blob", lambda store, image: _flip(blob(store, image.manifest["layers"][0]["digest"]))),
    "layer missing": ("record", lambda store, image: blob(store, image.manifest["layers"][0]["digest"]).unlink()),
    "manifest missing": ("record", lambda store, image: blob(store, image.digest).unlink()),
    "file changed": ("tree", lambda store, _: _flip(tree_file(store))),
    "file missing": ("tree", lambda store, _: tree_file(store).unlink()),
    "file more": ("tree", lambda store, _: (tree_file(store).parent / "more").touch()),
    "mode": ("tree", lambda store, _: tree_file(store).chmod(0o4755)),
    "owner": ("tree", lambda store, _: os.chown(tree_file(store), 5, 5)),
    "no record of the files": ("tree", lambda store, _: next((store.root / "layers").glob("*/files")).unlink()),
    "tree missing": ("record", lambda store, _: shutil.rmtree(next((store.root / "layers").iterdir()))),
}


def test_a_good_store(store: ImageStore, image: Served) -> None:
    """Nothing is found, and everything was looked at."""
    report = store.verify(repair=True)
    assert report.problems == ()
    assert (report.blobs, report.trees) == (4, 2)
    assert report.bytes == sum(path.stat().st_size for path in blob(store, image.digest).parent.iterdir())


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(store: ImageStore, image: Served, tmp_path: Path, damage: str) -> None:
    """Found and named; gone after a repair; and the image is right after the next pull."""
    whole = contents(store.prepare(image.pinned, None, tmp_path))
    kind, harm = DAMAGE[damage]
    harm(store, image)
    store.close()
    found = store.verify().problems
    assert kind in {problem.kind for problem in found}
    assert not any(problem.repaired for problem in found)
    repaired = store.verify(repair=True).problems
    assert all(problem.repaired for problem in repaired)
    assert store.verify().problems == ()
    fresh = open_store(store.root)
    fresh.pull(f"{image.repository}:1")
    plan = fresh.prepare(image.pinned, None, tmp_path)
    assert contents(plan) == whole
    assert fresh.verify().problems == ()
    fresh.close()


def test_what_is_held_is_left_alone(store: ImageStore, image: Served, tmp_path: Path) -> None:
    """A bad tree of a running job is reported, and repaired when the job has ended."""
    plan = store.prepare(image.pinned, None, tmp_path)
    with store.hold(plan):
        tree_file(store).unlink()
        (problem,) = store.verify(repair=True).problems
        assert (problem.kind, problem.repaired, problem.held) == ("tree", False, True)
        assert all(map(os.path.isdir, plan.lowers))
    first: Any = store.verify(repair=True).problems[0]
    assert (first.repaired, first.held) == (True, False)
