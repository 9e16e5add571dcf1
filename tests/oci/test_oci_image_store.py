"""The image store: once per layer, across threads and processes, and nothing trusted that a crash left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import build
import pytest
import trees

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import ExecutorError, InvalidRequest, SandboxError
from forgeyard_model.plan import JobUser
from forgeyard_oci.claims import Claim
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.image_store import ImageStore
from forgeyard_oci.store_paths import StorePaths

Entry, folder, whiteout, opaque = build.Entry, build.folder, build.whiteout, build.opaque

pytestmark = pytest.mark.kernel

BASE = [folder("etc"), Entry("etc/passwd", b"app:x:1000:1000::/:/bin/sh\n"), folder("d"), Entry("d/old", b"old")]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """A store of a host that runs amd64, whatever runs the test."""
    return ImageStore(tmp_path / "store", host=Platform.parse("linux/amd64"))


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """An empty layout to write images into."""
    return build.LayoutWriter(tmp_path / "layout")


def reference(writer: Any, image: Any) -> str:
    """A pinned reference, relative to the layout's parent."""
    writer.finish(image)
    return f"oci:layout@{image['digest']}"


def test_a_plan_holds_everything(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """Layer trees topmost first, the manifest's digest, and the config's words."""
    config = {"User": "app", "Env": ["A=1"], "Entrypoint": ["/e"], "Cmd": ["c"], "WorkingDir": "/d"}
    image = writer.image([build.tar(BASE), build.tar([folder("d"), Entry("d/new"), whiteout("d/old")])], config)
    plan = store.prepare(reference(writer, image), None, tmp_path)
    assert (plan.kind, plan.writable, plan.identity) == (ExecutorKind.CONTAINER, True, image["digest"])
    assert (plan.user, dict(plan.env)) == (JobUser(1000, 1000, (), "app"), {"A": "1"})
    assert (plan.entrypoint, plan.cmd, plan.workdir) == (("/e",), ("c",), "/d")
    shown = trees.overlay_names([Path(lower) for lower in plan.lowers], tmp_path)
    assert set(shown) == {"etc", "etc/passwd", "d", "d/new"}


def test_the_busybox_image(store: ImageStore, tmp_path: Path) -> None:
    """A real image through an index with an attestation: the merged tree runs."""
    if build.BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    path, digest = build.busybox_layout(tmp_path / "cache")
    assert build.busybox_layout(tmp_path / "cache") == (path, digest), "the second time is the same"
    host_store = ImageStore(tmp_path / "host")
    plan = host_store.prepare(f"oci:{path}@{digest}", None, Path("/"))
    shown = trees.overlay_names([Path(lower) for lower in plan.lowers], tmp_path)
    assert shown["srv/data/new"] == "kept\n"
    assert not {"srv/data/old", "etc/removed"} & set(shown)
    assert host_store.prepare(f"oci:{path}:app", None, Path("/")).user == JobUser(1000, 1000, (2000,), "app")
    assert host_store.prepare(f"oci:{path}:numeric", None, Path("/")).entrypoint == ("/bin/echo", "hello")
    run = subprocess.run(["chroot", plan.lowers[-1], "/bin/echo", "runs"], capture_output=True, text=True, check=True)
    assert run.stdout == "runs\n"


def test_the_second_prepare_touches_nothing(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """A pinned image that was prepared needs its layout no more; a user is looked up once."""
    text = reference(writer, writer.image([build.tar(BASE)]))
    first = store.prepare(text, None, tmp_path, user="app")
    (tmp_path / "layout").rename(tmp_path / "gone")
    assert store.prepare(text, None, tmp_path, user="app") == first
    assert store.prepare(text, None, tmp_path).user == JobUser(0, 0, (), "root")


def test_another_process_reuses_layers(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """Unpacked layers are found again without their blobs, which are not read."""
    image = writer.image([build.tar(BASE)])
    text = reference(writer, image)
    plan = store.prepare(text, None, tmp_path)
    for path in (tmp_path / "layout/blobs/sha256").iterdir():
        if path.read_bytes()[:1] != b"{":
            path.unlink()
    again = ImageStore(store.root, host=store.host)
    assert again.prepare(text, None, tmp_path) == plan


def test_layers_that_were_removed_are_unpacked_again(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """A store that lost a layer behind our back notices at the next prepare."""
    text = reference(writer, writer.image([build.tar(BASE)]))
    plan = store.prepare(text, None, tmp_path)
    store.wait_synced()  # it puts its mark beside the tree
    trees.build.shutil.rmtree(Path(plan.lowers[0]).parent)
    assert store.prepare(text, None, tmp_path) == plan
    assert Path(plan.lowers[0], "d/old").read_bytes() == b"old"


def test_images_share_layers(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """A base layer is unpacked once for all images on it; one that depends on what lies below, once for each."""
    upper = build.tar([Entry("d/new")])
    other = build.tar([folder("d", mode=0o700)])
    one = store.prepare(reference(writer, writer.image([build.tar(BASE), upper])), None, tmp_path)
    two = store.prepare(reference(writer, writer.image([build.tar(BASE), other, upper])), None, tmp_path)
    assert one.lowers[-1] == two.lowers[-1]
    assert one.lowers[0] != two.lowers[0]
    assert [os.stat(f"{plan.lowers[0]}/d").st_mode & 0o777 for plan in (one, two)] == [0o755, 0o700]


def test_repeated_and_empty_layers(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """An overlay takes no directory twice, and not none: neither reaches it."""
    empty, base = build.tar([]), build.tar(BASE)
    plan = store.prepare(reference(writer, writer.image([empty, base, empty, empty])), None, tmp_path)
    assert len(plan.lowers) == len(set(plan.lowers)) == 2
    (lower,) = store.prepare(reference(writer, writer.image([])), None, tmp_path).lowers
    assert os.listdir(lower) == []


def test_an_opaque_root_cuts_the_chain(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """A layer that hides everything below is the lowest that is mounted."""
    image = writer.image([build.tar(BASE), build.tar([opaque(""), Entry("f")]), build.tar([Entry("g")])])
    plan = store.prepare(reference(writer, image), None, tmp_path)
    assert set(trees.overlay_names([Path(lower) for lower in plan.lowers], tmp_path)) == {"f", "g"}


def test_users_and_platforms(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """The job's user beats the image's; unknown ones and other platforms are refused."""
    text = reference(writer, writer.image([build.tar(BASE)], {"User": "nosuch"}))
    with pytest.raises(InvalidRequest, match="nosuch") as caught:
        store.prepare(text, None, tmp_path)
    assert caught.value.field == "image USER"
    assert store.prepare(text, None, tmp_path, user="app").user == JobUser(1000, 1000, (), "app")
    for user in ("other", ""):
        with pytest.raises(InvalidRequest) as caught:
            store.prepare(text, None, tmp_path, user=user)
        assert caught.value.field == "user"
    assert store.prepare(text, "linux/amd64", tmp_path, user="0").user == JobUser(0, 0, (), "0")
    with pytest.raises(ExecutorError, match="platform linux/arm64 was asked for, host is linux/amd64"):
        store.prepare(text, "linux/arm64", tmp_path)


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "diff id", "hostile", "zstd", "foreign"])
def test_a_refused_image_leaves_nothing(store: ImageStore, writer: Any, tmp_path: Path, damage: str) -> None:
    """Damaged or hostile layers leave no tree, no partial one and no lock held."""
    layer = build.tar([*BASE, Entry("../out")] if damage == "hostile" else BASE)
    image = writer.image([layer], compress=False)
    blob = tmp_path / "layout/blobs" / build.sha256(layer).replace(":", "/")
    if damage == "changed":
        blob.write_bytes(layer.replace(b"old", b"new"))
    elif damage == "truncated":
        blob.write_bytes(layer[:-100])
    elif damage == "missing":
        blob.unlink()
    elif damage in ("diff id", "zstd", "foreign"):
        image = _tampered(writer, image, damage)
    expected = {
        "changed": "digest_mismatch",
        "missing": "missing_blob",
        "diff id": "diff_id_mismatch",
        "hostile": "escape",
        "zstd": "layer_type",
        "foreign": "layer_type",
    }
    with pytest.raises((SandboxError, ExecutorError)) as caught:
        store.prepare(reference(writer, image), None, tmp_path)
    assert caught.value.reason == expected.get(damage, damage)
    assert os.listdir(store.root / "layers") == os.listdir(store.root / "partial") == []
    if damage == "zstd":
        assert "zstd" in str(caught.value)


def _tampered(writer: Any, image: Any, damage: str) -> Any:
    """The same image with another diff id, or another layer type."""
    manifest = build.json.loads((writer.path / "blobs" / image["digest"].replace(":", "/")).read_bytes())
    config = build.json.loads((writer.path / "blobs" / manifest["config"]["digest"].replace(":", "/")).read_bytes())
    if damage == "diff id":
        config["rootfs"]["diff_ids"] = ["sha256:" + "1" * 64]
        manifest["config"] = writer.json(config, manifest["config"]["mediaType"])
    else:
        types = {"zstd": "application/vnd.oci.image.layer.v1.tar+zstd", "foreign": "application/vnd.example"}
        manifest["layers"][0]["mediaType"] = types[damage]
    return writer.json(manifest, manifest["mediaType"])


def test_threads_unpack_once(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """Eight prepares at once give one plan and one tree."""
    text = reference(writer, writer.image([build.tar([Entry(f"f{n}", b"x" * 100) for n in range(500)])]))
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda _: store.prepare(text, None, tmp_path), range(8)))
    assert all(plan == plans[0] for plan in plans)
    assert len(os.listdir(store.root / "layers")) == 1


_CHILD = """
import sys, os
from pathlib import Path
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.image_store import ImageStore
from forgeyard_oci.reader import ImageReader
store = ImageStore(Path(sys.argv[1]), host=Platform.parse("linux/amd64"))
real = ImageReader.unpack
def counted(*arguments, **more):
    os.write(1, b"unpack\\n")
    return real(*arguments, **more)
ImageReader.unpack = counted
os.write(1, b"ready\\n")
sys.stdin.readline()
store.prepare(sys.argv[2], None, Path(sys.argv[3]))
os.write(1, b"done\\n")
"""


def _child(store: ImageStore, text: str, base: Path) -> subprocess.Popen[str]:
    """A process that prepares `text` once a line comes on its stdin."""
    command = [sys.executable, "-c", _CHILD, str(store.root), text, str(base)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_two_processes_unpack_once(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """The second process waits for the first and uses its tree."""
    layers = [build.tar([Entry(f"f{n}", b"x" * 1000) for n in range(500)]), build.tar([Entry("g")])]
    text = reference(writer, writer.image(layers))
    children = [_child(store, text, tmp_path) for _ in range(2)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    output = "".join(child.communicate()[0] for child in children)
    assert [child.returncode for child in children] == [0, 0]
    assert output.count("unpack") == 2, "each of the two layers once"


@pytest.fixture
def memory_store() -> Iterator[ImageStore]:
    """A store in memory: ext4 gets slow at making files where as many were just removed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield ImageStore(Path(path) / "store", host=Platform.parse("linux/amd64"))


def test_a_killed_process_leaves_nothing_trusted(memory_store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """SIGKILL at any moment of unpacking: the next prepare gives the whole tree, and sweep removes the rest."""
    store = memory_store
    entries = [Entry(f"d{n // 100}/f{n}", b"x" * 500) for n in range(1000)]
    text = reference(writer, writer.image([build.tar(entries)], compress=False))
    generator = random.Random(11)
    killed_midway = 0
    for _ in range(4):
        with _child(store, text, tmp_path) as child:
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "unpack\n"
            target, wanted = store.root / "partial", generator.randrange(1, 900)
            while child.poll() is None and sum(len(files) for _, _, files in os.walk(target)) < wanted:
                pass
            child.send_signal(signal.SIGKILL)
            child.communicate()
        killed_midway += child.returncode == -signal.SIGKILL
        if os.listdir(store.root / "layers"):
            build.shutil.rmtree(next((store.root / "layers").iterdir()))
    assert killed_midway >= 3
    fresh = ImageStore(store.root, host=store.host)
    plan = fresh.prepare(text, None, tmp_path)
    assert len(trees.names(Path(plan.lowers[0]))) == 1000
    (store.root / "partial" / ("0" * 64) / "tree").mkdir(parents=True)
    assert fresh.sweep() == 1, "what the killed ones left of this layer went with its next unpacking"
    assert os.listdir(store.root / "partial") == []


def test_sweep_spares_what_is_being_unpacked(store: ImageStore) -> None:
    """A partial tree of a layer that somebody claims belongs to a living process."""
    digest = "ab" * 32
    (store.root / f"partial/{digest}.1").mkdir()
    paths = StorePaths(store.root)
    with Claim(paths.claims, paths.store_lock) as claim:
        claim.add(f"sha256:{digest}")
        assert store.sweep() == 0
    assert store.sweep() == 1


def test_the_store_is_private(store: ImageStore) -> None:
    """Trees hold setuid programs: no other user of the host may walk into the store."""
    assert os.stat(store.root).st_mode & 0o777 == 0o700


def test_no_descriptor_is_left_open(store: ImageStore, writer: Any, tmp_path: Path) -> None:
    """Preparing, refused or not, gives back every descriptor."""
    good = reference(writer, writer.image([build.tar(BASE)]))
    bad = reference(writer, writer.image([build.tar([Entry("../x")])]))
    before = len(os.listdir("/proc/self/fd"))
    store.prepare(good, None, tmp_path, user="app")
    with pytest.raises(SandboxError):
        store.prepare(bad, None, tmp_path)
    store.close()
    store.wait_synced()
    assert len(os.listdir("/proc/self/fd")) <= before
