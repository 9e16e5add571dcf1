"""rm, prune and sweep: what goes, what stays, and how many bytes that made."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import pytest
from bad_registry import BadRegistry
from registry_images import Served, contents, layers, leftovers, open_store, serve

from forgeyard_model.errors import SandboxError
from forgeyard_oci.claims import Claim, claimed
from forgeyard_oci.image_store import ImageStore
from forgeyard_oci.store_paths import StorePaths

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def registry() -> Iterator[BadRegistry]:
    """A registry of our own."""
    with BadRegistry() as server:
        yield server


SHARED = build.tar([build.Entry("shared", b"s" * 3000)])


@pytest.fixture(scope="module")
def origin(registry: BadRegistry, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Served]]:
    """A store of three images, the first the oldest; the first two share a layer."""
    base = tmp_path_factory.mktemp("origin")
    writer, store = build.LayoutWriter(base / "layout"), open_store(base / "store")
    served = []
    for number, below in enumerate(([SHARED], [SHARED], []), start=1):
        served.append(serve(registry, writer, writer.image([*below, *layers(1, number * 10_000)]), str(number)))
        store.pull(f"{served[-1].repository}:{number}")
    for age, image in enumerate(reversed(served), start=1):
        (record,) = (store.root / "records").glob(f"{image.digest[7:]}*")
        os.utime(record, (time.time() - age * 1000,) * 2)
    store.close()
    return store.root, served


@pytest.fixture
def store(origin: tuple[Path, list[Served]], tmp_path: Path) -> Iterator[ImageStore]:
    """A copy of that store."""
    shutil.copytree(origin[0], tmp_path / "store")
    store = open_store(tmp_path / "store")
    yield store
    store.wait_synced()
    store.close()


@pytest.fixture
def images(origin: tuple[Path, list[Served]]) -> list[Served]:
    """What is in it."""
    return origin[1]


def digests(store: ImageStore) -> list[str]:
    """The images of a store, the last used first."""
    return [info.digest for info in store.ls()]


def disk(store: ImageStore) -> set[str]:
    """Names of all blobs and trees."""
    return {*os.listdir(store.root / "layout/blobs/sha256"), *os.listdir(store.root / "layers")}


def test_ls_and_inspect(store: ImageStore, images: list[Served], tmp_path: Path) -> None:
    """Names, digests, sizes and times; the last used comes first."""
    infos = store.ls()
    assert [info.digest for info in infos] == [image.digest for image in reversed(images)]
    assert infos[2].names == (f"{images[0].repository}:1",)
    manifest = images[0].manifest
    blobs = [images[0].digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]
    assert infos[2].size == sum(len(images[0].blob(digest)) for digest in blobs)
    assert (infos[2].unpacked, infos[2].platform, infos[2].held) == (13_000, "linux/amd64", False)
    details = store.inspect(f"{images[0].repository}:1")
    assert details.info == infos[2]
    assert (details.config, len(details.layers)) == (manifest["config"]["digest"], 2)
    assert next(layer.diff_id for layer in details.layers) == build.sha256(SHARED)
    with pytest.raises(SandboxError, match="is not in the store"):
        store.inspect("nosuch:1")
    with pytest.raises(SandboxError, match="is not in the store"):
        store.rm("nosuch:1")


def test_use_makes_it_young(store: ImageStore, images: list[Served], tmp_path: Path) -> None:
    """Preparing an image counts as use."""
    store.hold(store.prepare(images[0].pinned, None, tmp_path)).close()
    assert digests(store)[0] == images[0].digest


def test_rm_of_a_name(store: ImageStore, images: list[Served], registry: BadRegistry) -> None:
    """A name goes alone while there is another; the last takes the image and what only it needed."""
    registry.manifests["again"] = registry.manifests[images[0].digest]
    store.pull(f"{images[0].repository}:again")
    before = disk(store)
    report = store.rm(f"{images[0].repository}:1")
    assert (report.names, report.images, report.freed) == ((f"{images[0].repository}:1",), (), 0)
    assert disk(store) == before
    report = store.rm(f"{images[0].repository}:again")
    assert (report.images, report.freed > 20_000) == ((images[0].digest,), True)
    assert build.sha256(SHARED)[7:] in disk(store), "another image needs that layer"
    assert len(before - disk(store)) == 4, "manifest, config, one blob, one tree"
    assert digests(store) == [images[2].digest, images[1].digest]
    assert leftovers(store) == []


def test_rm_of_a_digest(store: ImageStore, images: list[Served]) -> None:
    """By digest the image goes with all its names."""
    report = store.rm(images[2].pinned)
    assert (report.names, report.images) == ((f"{images[2].repository}:3",), (images[2].digest,))
    with pytest.raises(SandboxError, match="is not in the store"):
        store.rm(images[2].pinned)


def test_prune_by_age(store: ImageStore, images: list[Served], tmp_path: Path) -> None:
    """Exactly those that nobody used for that long."""
    report = store.prune(unused_for=1500, keep_bytes=None)
    assert report.images == (images[0].digest, images[1].digest)
    assert digests(store) == [images[2].digest]
    assert contents(store.prepare(images[2].pinned, None, tmp_path)).keys() == {"d/f0"}
    assert store.prune(unused_for=None, keep_bytes=None).images == ()


def test_prune_by_size(store: ImageStore, images: list[Served]) -> None:
    """The least recently used go until the rest fits; shared layers count once."""
    total = sum(info.size + info.unpacked for info in store.ls()[:2])
    report = store.prune(unused_for=None, keep_bytes=total)
    assert report.images == (images[0].digest,)
    assert 20_000 < report.freed < 25_000
    assert store.prune(unused_for=None, keep_bytes=0).images == (images[1].digest, images[2].digest)
    assert disk(store) == set()
    assert store.ls() == ()


def test_prune_to_free(store: ImageStore, images: list[Served]) -> None:
    """As many as it takes for that much room, and no more."""
    report = store.prune(unused_for=None, keep_bytes=None, free_bytes=25_000)
    assert report.images == (images[0].digest, images[1].digest)
    assert report.freed >= 25_000
    assert len(report.names) == 2


def make_old(path: Path) -> None:
    """Let a file or directory be two hours old."""
    os.utime(path, (time.time() - 7200,) * 2)


def test_what_nothing_needs(store: ImageStore, images: list[Served]) -> None:
    """Blobs, trees and downloads that no image needs go when they are an hour old, not before."""
    before = disk(store)
    strays = [store.root / place / ("0" * 64) for place in ("layout/blobs/sha256", "layers", "ingest")]
    for stray in strays:
        stray.mkdir() if stray.parent.name == "layers" else stray.write_bytes(b"x" * 100)
    assert store.sweep(everything=True) == 0
    for stray in strays:
        assert stray.exists()
        make_old(stray)
    assert store.sweep(everything=True) == 3
    assert disk(store) == before
    assert leftovers(store) == []
    assert sorted(os.listdir(store.root / "locks")) == ["store"]


def test_whole_sweeps_are_rare(store: ImageStore, images: list[Served]) -> None:
    """A sweep looks for old things when an hour has gone by since the last that did."""
    stray = store.root / "layout/blobs/sha256" / ("0" * 64)
    stray.touch()
    make_old(stray)
    assert store.sweep() == 0
    make_old(store.root / "swept")
    assert store.sweep() == 1
    assert not stray.exists()


def test_claimed_things_stay(store: ImageStore, images: list[Served]) -> None:
    """What a pull in progress is about to use is not taken from under it, however old it is."""
    paths = StorePaths(store.root)
    tree = images[2].manifest["layers"][0]["digest"]
    diff_id = store.inspect(images[2].pinned).layers[0].diff_id
    with Claim(paths.claims, paths.store_lock) as claim:
        claim.add(tree, diff_id)
        assert images[2].digest in store.prune(unused_for=0, keep_bytes=0).images
        assert disk(store) == {tree[7:], diff_id[7:]}
    assert claimed(paths.claims) == set()
    for path in (store.root / "layers" / diff_id[7:], store.root / "layout/blobs/sha256" / tree[7:]):
        make_old(path)
    assert store.sweep(everything=True) == 2


def test_names_of_nothing_go(store: ImageStore, images: list[Served]) -> None:
    """A name whose image lost its record is taken away."""
    for record in (store.root / "records").glob(f"{images[2].digest[7:]}*"):
        record.unlink()
    store.sweep(everything=True)
    names: Any = [name for info in store.ls() for name in info.names]
    assert sorted(names) == [f"{image.repository}:{n}" for n, image in enumerate(images[:2], start=1)]
