"""What a crash leaves: of the process, of the machine, of the disk's space. Nothing of it is trusted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import build
import pytest
from bad_registry import BadRegistry, Call
from registry_images import Served, contents, go, leftovers, open_store, preparing, serve

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_oci.image_store import ImageStore

pytestmark = pytest.mark.kernel


@pytest.fixture
def registry() -> Iterator[BadRegistry]:
    """An empty registry of our own."""
    with BadRegistry() as server:
        yield server


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: what is killed at random is started often."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def image(registry: BadRegistry, memory: Path) -> Served:
    """An image of four layers, the third of which needs the first, served in pieces."""
    writer = build.LayoutWriter(memory / "layout")
    made = writer.image(
        [
            build.tar([build.folder("a", mode=0o711), *(build.Entry(f"a/{n}", os.urandom(500)) for n in range(300))]),
            build.tar([build.folder("b"), build.Entry("b/large", os.urandom(300_000))]),
            build.tar([build.Entry("a/late", b"late"), build.whiteout("a/7")]),
            build.tar([build.folder("c"), *(build.Entry(f"c/{n}", b"c" * 700) for n in range(200))]),
        ]
    )
    registry.on("/blobs/", in_pieces)
    return serve(registry, writer, made)


def in_pieces(call: Call) -> bool:
    """A slow line: the good answer with a moment between its pieces."""
    call.head()
    for start in range(0, len(call.answer.body), 20_000):
        call.write(call.answer.body[start : start + 20_000])
        call.registry.closing.wait(0.002)
    return True


def everything(root: Path) -> int:
    """How many files and directories there are, as a measure of how far a pull is."""
    count = 0
    for _, folders, files in os.walk(root):
        count += len(folders) + len(files)
    return count


def size_of_ingest(root: Path) -> int:
    """Bytes of downloads in progress."""
    total = 0
    for entry in os.scandir(root / "ingest"):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def wait_until(child: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Watch a child's traces on the disk until they are so many, or it has ended."""
    while child.poll() is None and not reached():
        if child.stdout in _readable(child):
            return


def _readable(child: subprocess.Popen[str]) -> list[Any]:
    import select

    return select.select([child.stdout], [], [], 0)[0]


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment(image: Served, memory: Path, seed: int) -> None:
    """SIGKILL anywhere in a pull, several times over: the next one that is let through gives the right image."""
    generator = random.Random(seed)
    store = open_store(memory / "store")
    right = contents(open_store(memory / "right").prepare(image.pinned, None, memory))
    for _ in range(3):
        base = everything(store.root)
        with preparing(store, image.pinned, memory) as child:
            go(child)
            if generator.random() < 0.5:
                goal = generator.randrange(1, 600)
                wait_until(child, lambda base=base, goal=goal: everything(store.root) >= base + goal)
            else:
                goal = generator.randrange(1, 400_000)
                wait_until(child, lambda goal=goal: size_of_ingest(store.root) >= goal)
            child.send_signal(signal.SIGKILL)
            child.communicate()
    fresh = open_store(store.root)
    plan = fresh.prepare(image.pinned, None, memory)
    fresh.hold(plan).close()
    assert contents(plan) == right
    assert fresh.verify().problems == ()
    fresh.sweep(everything=True)
    assert leftovers(fresh) == []
    assert len(fresh.ls()) == 1
    fresh.wait_synced()


def test_a_killed_download_is_resumed(image: Served, registry: BadRegistry, memory: Path) -> None:
    """What a killed process had of a blob is not asked for again."""
    store = open_store(memory / "store")
    with preparing(store, image.pinned, memory) as child:
        go(child)
        wait_until(child, lambda: size_of_ingest(store.root) > 100_000)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    store.prepare(image.pinned, None, memory)
    assert any(seen.headers.get("range") for seen in registry.seen("/blobs/"))
    store.wait_synced()
    store.close()


def another_boot(store: ImageStore, *, keep_marks: bool) -> None:
    """Let the store's trees be of an earlier boot of the machine; without marks it went down at once."""
    for path in [*(store.root / "layers").glob("*/layer.json"), *(store.root / "records").iterdir()]:
        words = json.loads(path.read_bytes())
        path.write_text(json.dumps({**words, "boot": "00000000-0000-0000-0000-000000000000"}))
    for mark in (store.root / "layers").glob("*/synced"):
        if not keep_marks:
            mark.unlink()


def test_trees_of_another_boot(image: Served, registry: BadRegistry, memory: Path) -> None:
    """Those that had reached the disk are used as they are; the others are unpacked again, from the blobs here."""
    store = open_store(memory / "store")
    plan = store.prepare(image.pinned, None, memory)
    whole = contents(plan)
    store.wait_synced()
    store.close()
    asked = len(registry.requests)
    for keep_marks in (True, False):
        another_boot(store, keep_marks=keep_marks)
        victim = Path(plan.lowers[-1], "a/9")
        victim.write_bytes(b"")  # as a file system may leave a file whose data was never written
        fresh = open_store(store.root)
        again = fresh.prepare(image.pinned, None, memory)
        assert again == plan
        assert (victim.read_bytes() == b"") == keep_marks
        fresh.wait_synced()
        fresh.close()
    assert contents(plan) == whole
    assert len(registry.requests) == asked
    assert len(list((store.root / "layers").glob("*/synced"))) == 4


def test_a_sweep_marks_what_a_short_process_left(image: Served, memory: Path) -> None:
    """Trees whose process ended before they were on the disk are written and marked by a later one."""
    store = open_store(memory / "store")
    store.prepare(image.pinned, None, memory)
    store.wait_synced()
    store.close()
    marks = list((store.root / "layers").glob("*/synced"))
    for mark in marks:
        mark.unlink()
    store.sweep(everything=True)
    for thread in threading.enumerate():
        if thread.name == "image-sync":
            thread.join()
    assert all(mark.exists() for mark in marks)


def test_an_unmarked_tree_shows_in_verify(image: Served, memory: Path) -> None:
    """A tree that may have lost something is reported before anybody wants it."""
    store = open_store(memory / "store")
    store.prepare(image.pinned, None, memory)
    store.wait_synced()
    store.close()
    another_boot(store, keep_marks=False)
    assert len([problem for problem in store.verify().problems if problem.kind == "tree"]) == 4


@pytest.mark.parametrize("what", ["document", "layer", "record", "layer.json", "index.json"])
def test_files_that_came_back_empty(image: Served, memory: Path, what: str) -> None:
    """A file whose data a crash of the machine lost is made again, not believed and not tripped over."""
    store = open_store(memory / "store")
    plan = store.prepare(image.pinned, None, memory)
    whole = contents(plan)
    store.wait_synced()
    store.close()
    blobs = store.root / "layout/blobs"
    layer = blobs / image.manifest["layers"][1]["digest"].replace(":", "/")
    paths = {
        "document": [blobs / image.digest.replace(":", "/")],
        "layer": [layer],
        "record": [],
        "layer.json": list((store.root / "layers").glob("*/layer.json")),
        "index.json": [store.root / "layout/index.json"],
    }
    for path in (*paths[what], *(store.root / "records").iterdir()):
        path.write_bytes(b"\0" * path.stat().st_size)
    if what == "layer":
        for folder in (store.root / "layers").iterdir():
            (folder / "layer.json").unlink()
    fresh = open_store(store.root)
    assert contents(fresh.prepare(image.pinned, None, memory)) == whole
    assert fresh.ls()[0].names
    assert fresh.verify().problems == ()
    fresh.wait_synced()
    fresh.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=2000", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


def big(kind: str) -> bytes:
    """A layer that fills the small disk: while it is downloaded, while it is unpacked, or by its mere names."""
    entries: dict[str, Any] = {
        "download": lambda: [build.Entry("f", os.urandom(9 << 20))],
        "unpack": lambda: [build.Entry("f", b"x" * (9 << 20))],
        "inodes": lambda: [build.Entry(f"f{n}") for n in range(2500)],
    }
    return build.tar(entries[kind]())


@pytest.mark.parametrize("kind", ["download", "unpack", "inodes"])
def test_a_full_disk(small_disk: Path, registry: BadRegistry, tmp_path: Path, kind: str) -> None:
    """no_space, naming the file system; nothing partial stays in the way; a retry works once there is room (C64)."""
    writer = build.LayoutWriter(tmp_path / "layout")
    served = serve(registry, writer, writer.image([big(kind)]))
    store = open_store(small_disk / "store")
    for _ in range(2):
        with pytest.raises(ExecutorError) as caught:
            store.prepare(served.pinned, None, tmp_path)
        assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.IO_FAILED, "no_space")
        assert str(small_disk) in str(caught.value)
        assert leftovers(store) == []
        assert list((store.root / "layers").iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=40m,nr_inodes=9000", str(small_disk)], check=True)
    assert len(contents(store.prepare(served.pinned, None, tmp_path))) == (2500 if kind == "inodes" else 1)
    store.wait_synced()
    store.close()


def _make_files(folder: Path, count: int) -> None:
    for n in range(count):
        (folder / f"n{n}").touch()


def test_sweeping_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """What dead processes left can be removed when there is no room for another byte or file."""
    store = open_store(small_disk / "store")
    partial = store.root / "partial" / ("a" * 64 + ".1")
    partial.mkdir()
    (partial / "f").write_bytes(b"x" * 1000)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(b"x" * (9 << 20))
    with pytest.raises(OSError, match="No space"):
        _make_files(small_disk, 3000)
    assert store.sweep() == 1
    assert leftovers(store) == []
    assert store.prune(unused_for=0, keep_bytes=0).images == ()
