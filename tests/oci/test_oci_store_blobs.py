"""The store's blobs and names: an image layout in which nothing appears before it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.blobs import BlobStore
from forgeyard_oci.image_errors import host_failure, refused
from forgeyard_oci.names import Document, Names
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.store_paths import StorePaths

DATA = b"blob" * 1000
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    """The folders of an empty store."""
    paths = StorePaths(tmp_path / "store")
    paths.make()
    return paths


@pytest.fixture
def blobs(paths: StorePaths) -> BlobStore:
    """An empty layout."""
    blobs = BlobStore(paths)
    blobs.make()
    return blobs


def writing(data: bytes) -> Callable[[int], None]:
    """A download that goes on where the file ends."""

    def download(fd: int) -> None:
        os.pwrite(fd, data[os.fstat(fd).st_size :], os.fstat(fd).st_size)

    return download


def test_an_empty_layout(blobs: BlobStore, paths: StorePaths) -> None:
    """A new store is an image layout of version 1 without images; making it again changes nothing."""
    assert json.loads((paths.layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = (paths.layout / "index.json").read_bytes()
    assert json.loads(index)["manifests"] == []
    blobs.make()
    assert (paths.layout / "index.json").read_bytes() == index


def test_fetch_once(blobs: BlobStore, paths: StorePaths) -> None:
    """What is there is not downloaded; eight at once make one download; no lock file is left."""
    counted, together = [], threading.Barrier(8)

    def download(fd: int) -> None:
        counted.append(fd)
        writing(DATA)(fd)

    def fetch(_: int) -> bool:
        together.wait(10)
        return blobs.fetch(DIGEST, len(DATA), download, Budget())

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(fetch, range(8))) == [False] * 7 + [True]
    assert len(counted) == 1
    assert blobs.path(DIGEST).read_bytes() == DATA
    assert (os.listdir(paths.locks), os.listdir(paths.ingest)) == (["store"], [])


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (refused("digest_mismatch", "other bytes"), False),
        (refused("not_found", "gone"), True),
        (host_failure(OSError(28, "full"), "writing", "/"), False),
        (OSError(28, "full"), False),
        (OSError(5, "broken"), True),
        (KeyboardInterrupt(), True),
    ],
)
def test_a_failed_download_has_no_name(blobs: BlobStore, paths: StorePaths, error: BaseException, kept: bool) -> None:
    """A beginning is kept to go on with, unless it is wrong or fills the disk; it is never visible as a blob."""

    def fail(fd: int) -> None:
        os.write(fd, DATA[:100])
        raise error

    with pytest.raises((SandboxError, ExecutorError, KeyboardInterrupt)) as caught:
        blobs.fetch(DIGEST, len(DATA), fail, Budget())
    if isinstance(error, OSError) and error.errno == 28:
        assert caught.value.reason == "no_space"  # type: ignore[union-attr]  # not a KeyboardInterrupt here
        assert "file system /" in str(caught.value)
    assert list(blobs.all()) == []
    assert (os.listdir(paths.ingest) != []) == kept
    assert blobs.fetch(DIGEST, len(DATA), writing(DATA), Budget())
    assert blobs.read(DIGEST, 1 << 20) == DATA
    assert os.listdir(paths.ingest) == []


def test_a_spoiled_document_is_removed(blobs: BlobStore) -> None:
    """A document that a crash left with other bytes is not read, and goes away; so it is fetched again."""
    blobs.put(DIGEST, b"\0" * len(DATA))
    assert blobs.has(DIGEST, len(DATA))
    assert "hash to" in blobs.problem(DIGEST)
    assert blobs.read(DIGEST, 1 << 20) is None
    assert not blobs.has(DIGEST, len(DATA))


def test_names(blobs: BlobStore, paths: StorePaths) -> None:
    """A name is set, moved and removed; what other tools put into index.json stays."""
    names = Names(paths)
    index = json.loads((paths.layout / "index.json").read_bytes())
    foreign = {"mediaType": "x", "digest": "sha256:1", "size": 1}
    (paths.layout / "index.json").write_text(json.dumps({**index, "annotations": {"a": "b"}, "manifests": [foreign]}))
    names.set("example.org/a:1", Document(DIGEST, 7, "application/x"))
    names.set("example.org/a:2", Document(DIGEST, 7, "application/x"))
    names.set("example.org/a:1", Document("sha256:2", 8, "application/y"))
    assert {name: digest for name, digest in names.all().items() if name} == {
        "example.org/a:1": "sha256:2",
        "example.org/a:2": DIGEST,
    }
    assert names.remove(lambda name, _: name == "example.org/a:1") == ("example.org/a:1",)
    written = json.loads((paths.layout / "index.json").read_bytes())
    assert written["annotations"] == {"a": "b"}
    assert foreign in written["manifests"]
    assert len(written["manifests"]) == 2


def test_names_set_at_once(blobs: BlobStore, paths: StorePaths) -> None:
    """No name gets lost between writers."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda n: Names(paths).set(f"example.org/{n}:1", Document(DIGEST, n, "x")), range(24)):
            pass
    assert len(Names(paths).all()) == 24


def test_an_index_that_cannot_be_read(blobs: BlobStore, paths: StorePaths) -> None:
    """Names are lost with it, nothing else: the next one makes it whole again."""
    (paths.layout / "index.json").write_bytes(b"\0" * 100)
    assert Names(paths).all() == {}
    Names(paths).set("example.org/a:1", Document(DIGEST, 7, "application/x"))
    assert Names(paths).all() == {"example.org/a:1": DIGEST}
