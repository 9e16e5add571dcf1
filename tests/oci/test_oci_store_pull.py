"""Pulls into the image store: what is asked of a registry, how often, and what comes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import build
import pytest
from bad_registry import BadRegistry, Call, cut_at, flip, reply, with_body
from registry_images import (
    Served,
    contents,
    go,
    layers,
    leftovers,
    open_store,
    preparing,
    real_registry,
    serve,
)

from forgeyard_model.errors import ExecutorError, FailureClass, ForgeyardError, SandboxError
from forgeyard_oci.image_store import ImageStore, PullPolicy
from forgeyard_oci.registry.budget import Budget

pytestmark = pytest.mark.kernel


@pytest.fixture
def registry() -> Iterator[BadRegistry]:
    """An empty registry of our own."""
    with BadRegistry() as server:
        yield server


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """An empty layout to make images in."""
    return build.LayoutWriter(tmp_path / "layout")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """An empty store."""
    store = open_store(tmp_path / "store")
    yield store
    store.wait_synced()
    store.close()


class News:
    """A Progress that keeps what it hears."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[int, str]] = {}
        self.received: dict[str, int] = {}
        self.states: dict[str, list[str]] = {}

    def begin(self, digest: str, size: int, what: str) -> None:
        """Note it."""
        self.begun[digest] = (size, what)

    def advance(self, digest: str, total_received: int) -> None:
        """Note it."""
        self.received[digest] = total_received

    def done(self, digest: str, state: str) -> None:
        """Note it."""
        self.states.setdefault(digest, []).append(state)


def an_index(registry: BadRegistry, writer: Any, config: Any = None, *tags: str) -> tuple[Served, Any]:
    """An index of an attestation, an arm64 and an amd64 image of three layers; and that last one."""
    image = writer.image(layers(3), config, platform=build.platform("amd64"))
    other = writer.image(layers(1), architecture="arm64", platform=build.platform("arm64", "v8"))
    index = writer.index([writer.attestation(image["digest"]), other, image])
    return serve(registry, writer, index, *tags), image


def test_a_pinned_index(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """The right image of an index is pulled (C38), each document and layer is asked for once, and progress is told."""
    served, image = an_index(registry, writer, {"User": "7:8", "Env": ["A=1"], "Cmd": ["c"], "Volumes": {"/v": {}}})
    news = News()
    plan = store.prepare(served.pinned, None, tmp_path, progress=news)
    assert (plan.identity, dict(plan.env), plan.cmd, plan.volumes) == (image["digest"], {"A": "1"}, ("c",), ("/v",))
    assert (plan.user.uid, plan.user.gid) == (7, 8)
    assert set(contents(plan)) == {"d/f0", "d/f1", "d/f2"}
    assert plan.notes == ()
    paths = [seen.path for seen in registry.seen()]
    assert len(paths) == len(set(paths)) == 2 + 1 + 3
    manifest = json.loads(served.blob(image["digest"]))
    for layer in manifest["layers"]:
        assert news.begun[layer["digest"]] == (layer["size"], "layer")
        assert news.received[layer["digest"]] == layer["size"]
        assert news.states[layer["digest"]] == ["pulled", "unpacked"]
    assert leftovers(store) == []


def test_what_is_here_is_not_asked_for(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """A pinned image that is here needs no registry, in this process or another; nor does its manifest's digest."""
    served, image = an_index(registry, writer)
    plan = store.prepare(served.pinned, None, tmp_path)
    asked = len(registry.requests)
    assert store.prepare(served.pinned, None, tmp_path) == plan
    again = open_store(store.root)
    assert again.prepare(served.pinned, None, tmp_path) == plan
    assert again.prepare(f"{served.repository}@{image['digest']}", None, tmp_path) == plan
    assert again.pull(served.pinned, policy=PullPolicy.ALWAYS).digest == image["digest"]
    again.close()
    assert len(registry.requests) == asked


def test_tags_and_policies(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """missing takes the tag as it is known, always asks again, never doesn't ask; each tells what it resolved to."""
    one = serve(registry, writer, writer.image(layers(1)), "1")
    text = f"{one.repository}:1"
    with pytest.raises(SandboxError) as caught:
        store.prepare(text, None, tmp_path, policy=PullPolicy.NEVER)
    assert caught.value.reason == "not_present"
    assert registry.requests == []
    first = store.prepare(text, None, tmp_path)
    assert first.notes == (f"image {text} resolved to {one.pinned}",)
    assert store.resolve(text, None, tmp_path) == one.pinned
    two = serve(registry, writer, writer.image(layers(1)), "1")
    asked = len(registry.requests)
    assert store.prepare(text, None, tmp_path).identity == one.digest
    assert store.prepare(text, None, tmp_path, policy=PullPolicy.NEVER).identity == one.digest
    assert len(registry.requests) == asked
    assert store.prepare(text, None, tmp_path, policy=PullPolicy.ALWAYS).identity == two.digest
    assert store.prepare(text, None, tmp_path).identity == two.digest, "the tag has moved"
    assert [info.names for info in store.ls()] == [(text,), ()]


def test_tag_and_digest(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """The digest decides; the tag is not even asked for."""
    served = serve(registry, writer, writer.image(layers(1)))
    plan = store.prepare(f"{served.repository}:nosuch@{served.digest}", None, tmp_path)
    assert (plan.identity, plan.notes) == (served.digest, ())


def test_docker_types_and_repeated_layers(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path
) -> None:
    """Docker's manifests work; a layer that comes twice is downloaded once."""
    base, empty = layers(1)[0], build.tar([])
    image = writer.image([empty, base, empty, empty], docker=True, platform=build.platform("amd64"))
    served = serve(registry, writer, writer.index([image], docker=True))
    plan = store.prepare(served.pinned, None, tmp_path)
    assert set(contents(plan)) == {"d/f0"}
    assert len(plan.lowers) == len(set(plan.lowers)) == 2
    blobs = [seen.path for seen in registry.seen("/blobs/")]
    assert len(blobs) == len(set(blobs)) == 3


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"schemaVersion": 1, "name": "x", "fsLayers": []}, "schema 1"),
        ({"schemaVersion": 2, "mediaType": "application/vnd.example.v9+json"}, "application/vnd.example.v9+json"),
    ],
)
def test_manifests_we_do_not_read(
    store: ImageStore, registry: BadRegistry, tmp_path: Path, document: Any, said: str
) -> None:
    """Schema 1 and unknown kinds are refused by name, whatever the registry calls them (C42)."""
    digest = registry.add_manifest(json.dumps(document).encode(), media_type="application/octet-stream")
    with pytest.raises(ExecutorError, match=re.escape(said)) as caught:
        store.prepare(f"{registry.host}/team/app@{digest}", None, tmp_path)
    assert (caught.value.reason, caught.value.failure_class) == ("manifest_type", FailureClass.CONFIGURATION)


def test_publisher_urls_are_never_fetched(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path
) -> None:
    """A foreign layer comes from its registry by digest, or not at all (C43)."""
    manifest = json.loads((writer.path / "blobs" / writer.image(layers(1))["digest"].replace(":", "/")).read_bytes())
    manifest["layers"][0] |= {
        "urls": [f"{registry.url}/elsewhere"],
        "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    }
    served = serve(registry, writer, writer.json(manifest, manifest["mediaType"]))
    registry.on(manifest["layers"][0]["digest"], reply(404), times=1)
    with pytest.raises(ForgeyardError):
        store.prepare(served.pinned, None, tmp_path)
    assert set(contents(store.prepare(served.pinned, None, tmp_path))) == {"d/f0"}
    assert registry.seen("elsewhere") == []


def test_a_size_that_lies(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """Absurd sizes are refused before a byte of the layer is asked for."""
    manifest = json.loads((writer.path / "blobs" / writer.image(layers(1))["digest"].replace(":", "/")).read_bytes())
    manifest["layers"][0]["size"] = 1 << 50
    served = serve(registry, writer, writer.json(manifest, manifest["mediaType"]))
    with pytest.raises(SandboxError, match="is said to have"):
        store.prepare(served.pinned, None, tmp_path)
    assert registry.seen(manifest["layers"][0]["digest"]) == []


@pytest.mark.parametrize("what", ["manifest", "config", "layer"])
def test_wrong_bytes_never_get_a_name(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path, what: str
) -> None:
    """One flipped bit anywhere: a digest mismatch, nothing kept of it, and the next pull is right (C63)."""
    served = serve(registry, writer, writer.image(layers(2)))
    manifest = served.manifest
    bad = {"manifest": served.digest, "config": manifest["config"]["digest"], "layer": manifest["layers"][1]["digest"]}
    registry.on(bad[what], with_body(flip))
    with pytest.raises(ForgeyardError) as caught:
        store.prepare(served.pinned, None, tmp_path)
    assert caught.value.reason == "digest_mismatch"  # type: ignore[attr-defined]  # both kinds of ours have one
    assert not (store.root / "layout/blobs" / bad[what].replace(":", "/")).exists()
    assert leftovers(store) == []
    registry._rules.clear()
    assert len(contents(store.prepare(served.pinned, None, tmp_path))) == 2


def test_a_broken_download_is_resumed(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """What is there of a layer when a pull fails is where the next one goes on (C63)."""
    data = os.urandom(500_000)
    served = serve(registry, writer, writer.image([build.tar([build.Entry("f", data)])]))
    layer = served.manifest["layers"][0]
    budget = Budget()

    def give_up(call: Call) -> bool:
        budget.cancelled.set()
        call.hang_up()
        return True

    registry.on(layer["digest"], cut_at(300_000), times=1)
    registry.on(layer["digest"], give_up, times=1)
    with pytest.raises(ExecutorError):
        store.prepare(served.pinned, None, tmp_path, budget=budget)
    assert leftovers(store) == [f"ingest/{layer['digest'][7:]}"]
    assert contents(store.prepare(served.pinned, None, tmp_path)) == {"f": data}
    assert registry.seen(layer["digest"])[-1].headers["range"] == "bytes=300000-"
    assert leftovers(store) == []


def slow(started: threading.Barrier) -> Callable[[Call], bool]:
    """Answer when all who are expected have asked."""

    def behave(call: Call) -> bool:
        started.wait(10)
        return False

    return behave


def test_layers_come_in_parallel(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """Four downloads are under way at once: each is answered only when all four were asked for."""
    served = serve(registry, writer, writer.image(layers(4)))
    barrier = threading.Barrier(4)
    for layer in served.manifest["layers"]:
        registry.on(layer["digest"], slow(barrier))
    assert len(contents(store.prepare(served.pinned, None, tmp_path))) == 4


def test_layers_are_unpacked_while_others_come(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path
) -> None:
    """The lowest layer is unpacked while the next is still held back."""
    served = serve(registry, writer, writer.image(layers(2)))
    arrived = threading.Event()

    def wait(call: Call) -> bool:
        assert arrived.wait(10)
        return False

    registry.on(served.manifest["layers"][1]["digest"], wait)
    lowest = served.manifest["layers"][0]["digest"]

    class Watch(News):
        def done(self, digest: str, state: str) -> None:
            if (digest, state) == (lowest, "unpacked"):
                arrived.set()

    store.prepare(served.pinned, None, tmp_path, progress=Watch())
    assert arrived.is_set()


def test_twenty_jobs_pull_once(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """Twenty at once, through two stores of one directory, ask for each thing once (C61)."""
    served, _ = an_index(registry, writer)
    stores = [store, open_store(store.root)]
    with ThreadPoolExecutor(20) as pool:
        plans = list(pool.map(lambda n: stores[n % 2].prepare(served.pinned, None, tmp_path), range(20)))
    assert all(plan == plans[0] for plan in plans)
    paths = [seen.path for seen in registry.seen()]
    assert len(paths) == len(set(paths)) == 6
    stores[1].wait_synced()
    stores[1].close()


def test_two_processes_pull_once(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """Two processes that want images which share a layer download and unpack it once."""
    shared, one, two = layers(3)
    first = serve(registry, writer, writer.image([shared, one]))
    second = serve(registry, writer, writer.image([shared, two]))
    children = [preparing(store, text, tmp_path) for text in (first.pinned, second.pinned)]
    for child in children:
        go(child)
    output = [child.communicate("end\n")[0] for child in children]
    assert output == ["done\n", "done\n"]
    paths = [seen.path for seen in registry.seen("/blobs/")]
    assert len(paths) == len(set(paths)) == 2 + 3
    assert len(os.listdir(store.root / "layers")) == 3


def test_cancelled_and_out_of_time(store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path) -> None:
    """A pull that nobody wants any more ends; so does one that waits for another's."""
    served = serve(registry, writer, writer.image(layers(1)))
    layer = served.manifest["layers"][0]["digest"]
    budget, release = Budget(), threading.Event()

    def hold_back(call: Call) -> bool:
        release.wait(10)
        return False

    registry.on(layer, hold_back)
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(store.prepare, served.pinned, None, tmp_path, budget=budget)
        registry.wait_for(1, layer)
        with pytest.raises(ExecutorError) as caught:
            store.prepare(served.pinned, None, tmp_path, budget=Budget.within(0.05))
        assert caught.value.reason == "image_timeout"
        budget.cancelled.set()
        release.set()
        with pytest.raises(ExecutorError) as caught:
            pulling.result()
    assert caught.value.reason == "cancelled"
    assert os.listdir(store.root / "claims") == []
    assert set(contents(store.prepare(served.pinned, None, tmp_path))) == {"d/f0"}


def test_a_failure_stops_the_other_downloads(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path
) -> None:
    """When one layer is refused, a slow one does not keep the error back until it is whole."""
    served = serve(registry, writer, writer.image([*layers(1), *layers(1, 200_000)]))
    first, second = (layer["digest"] for layer in served.manifest["layers"])
    begun, asked = threading.Event(), threading.Event()

    def endless(call: Call) -> bool:
        call.head()
        for start in range(0, len(call.answer.body), 1000):
            call.write(call.answer.body[start : start + 1000])
            begun.set()
            if call.registry.closing.wait(0.05):
                break
        asked.set()
        return True

    def refuse(call: Call) -> bool:
        assert begun.wait(10)
        return reply(404)(call)

    registry.on(second, endless)
    registry.on(first, refuse)
    with pytest.raises(SandboxError) as caught:
        store.prepare(served.pinned, None, tmp_path)
    assert caught.value.reason == "not_found"
    assert not asked.is_set(), "the slow one would have taken ten seconds"


def test_push_and_pull_with_a_real_registry(
    store: ImageStore, writer: Any, tmp_path: Path, require_tool: Callable[[str], str]
) -> None:
    """An index goes from a layout into docker-registry with all it holds, and comes back; then on from the store."""
    require_tool("docker-registry")
    image = writer.image(layers(2), platform=build.platform("amd64"))
    other = writer.image(layers(1), architecture="arm64", platform=build.platform("arm64"))
    index = writer.index([image, other])
    writer.finish({**index, "annotations": {"org.opencontainers.image.ref.name": "v1"}})
    with real_registry(tmp_path) as host:
        pinned = store.push(f"oci:{writer.path}:v1", f"{host}/team/app:v1")
        assert pinned == f"{host}/team/app@{index['digest']}"
        assert store.resolve(f"{host}/team/app:v1", None, tmp_path) == pinned
        info = store.pull(f"{host}/team/app:v1")
        assert (info.digest, info.indexes, info.names) == (
            image["digest"],
            (index["digest"],),
            (f"{host}/team/app:v1",),
        )
        with pytest.raises(SandboxError, match="linux/arm64 is not here") as caught:
            store.push(f"{host}/team/app:v1", f"{host}/other:v1")
        assert caught.value.reason == "incomplete_image"
        again = store.push(f"{host}/team/app@{image['digest']}", f"{host}/other:v1")
        assert again == f"{host}/other@{image['digest']}"
        fresh = open_store(tmp_path / "second")
        assert contents(fresh.prepare(again, None, tmp_path)) == contents(store.prepare(pinned, None, tmp_path))
        fresh.wait_synced()
        fresh.close()


def test_other_tools_read_the_layout(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path, require_tool: Callable[[str], str]
) -> None:
    """skopeo inspects and copies an image out of the store by its name, and umoci unpacks it."""
    served = serve(registry, writer, writer.image(layers(2), {"Env": ["A=1"]}), "1.0")
    info = store.pull(f"{served.repository}:1.0")
    layout = store.root / "layout"
    (name,) = info.names
    skopeo = require_tool("skopeo")
    seen = subprocess.run([skopeo, "inspect", f"oci:{layout}:{name}"], capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["Digest"] == served.digest
    copy = tmp_path / "copy"
    command = [skopeo, "copy", f"oci:{layout}:{name}", f"oci:{copy}:here"]
    subprocess.run(command, check=True, capture_output=True)
    umoci = [require_tool("umoci"), "unpack", "--image", f"{copy}:here", str(tmp_path / "bundle")]
    subprocess.run(umoci, check=True, capture_output=True)
    plan = store.prepare(f"{served.repository}:1.0", None, tmp_path)
    for path, data in contents(plan).items():
        assert (tmp_path / "bundle/rootfs" / path).read_bytes() == data


def test_warm_imports_neither_pydantic_nor_requests(
    store: ImageStore, registry: BadRegistry, writer: Any, tmp_path: Path
) -> None:
    """A job whose image is ready pays for no library that only pulls need."""
    served = serve(registry, writer, writer.image(layers(1)))
    store.pull(served.pinned)
    code = (
        "import sys; from pathlib import Path; from forgeyard_oci.image_store import ImageStore\n"
        "from forgeyard_oci.image_platform import Platform\n"
        f"store = ImageStore(Path({str(store.root)!r}), host=Platform.parse('linux/amd64'))\n"
        f"plan = store.prepare({served.pinned!r}, None, Path('/')); store.hold(plan).close()\n"
        "heavy = {'pydantic', 'requests', 'oras', 'ctypes', 'ssl', 'isal', 'subprocess', 'concurrent.futures'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([os.sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
