"""Images on their way to an engine: read, put into a stream, found again as directories, and checked."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from small_images import image as make_image

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_model.plan import EngineImage
from forgeyard_runtimes.docker.images import DockerImages, refuse_storage, volumes_to_cover
from forgeyard_runtimes.engine_layers import HeldLayers, known_images, layer_directories
from forgeyard_runtimes.image_archive import docker_archive, oci_archive, store_tag, tag_prefix
from forgeyard_runtimes.image_layout import Blob, LaidImage, read_image
from forgeyard_runtimes.podman.images import PodmanImages, on_image, root_folded


@pytest.fixture
def laid(tmp_path: Path) -> LaidImage:
    """A small image in a layout."""
    reference = make_image(tmp_path / "image", {"Volumes": {"/data": {}}})
    return read_image(tmp_path / "image", reference.partition("@")[2])


def members(archive: Any) -> dict[str, bytes]:
    """What a tar stream holds."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as opened:
        return {entry.name: opened.extractfile(entry).read() for entry in opened}  # type: ignore[union-attr]  # files


def test_an_image_is_read_by_its_digest(laid: LaidImage) -> None:
    """Descriptors and diff ids come from documents that have the digests they were asked by."""
    assert [layer.size for layer in laid.layers] == [laid.path(layer).stat().st_size for layer in laid.layers]
    assert len(laid.diff_ids) == len(laid.layers) == 1
    assert laid.volumes == ("/data",)


def test_a_document_with_other_bytes_is_refused(laid: LaidImage) -> None:
    """A layout that changed since it was accepted is an error that names the blob."""
    laid.path(laid.config).write_bytes(b"{}")
    with pytest.raises(ExecutorError) as caught:
        read_image(laid.layout, laid.manifest.digest)
    assert laid.config.digest in caught.value.brief
    laid.path(laid.manifest).unlink()
    with pytest.raises(ExecutorError, match="can't be read"):
        read_image(laid.layout, laid.manifest.digest)


@pytest.mark.parametrize("change", [b"", b"more than there was"])
def test_a_blob_of_another_size_breaks_the_stream(laid: LaidImage, change: bytes) -> None:
    """Never a stream with the wrong length: its headers say how long each blob is."""
    blob = Blob(laid.config.digest, laid.config.size, "")
    path = laid.path(blob)
    path.write_bytes(path.read_bytes() + change if change else b"{")
    with pytest.raises(ExecutorError, match="can't be read"):
        list(laid.pieces(blob))


def test_an_oci_archive_is_the_layout_with_one_name(laid: LaidImage) -> None:
    """Each blob as it is, and an index that gives the image our mark."""
    found = members(oci_archive(laid, store_tag("s", laid.manifest.digest)))
    (entry,) = json.loads(found["index.json"])["manifests"]
    assert entry["digest"] == laid.manifest.digest
    assert entry["annotations"]["org.opencontainers.image.ref.name"].startswith(tag_prefix("s"))
    for blob in (laid.manifest, laid.config, *laid.layers):
        assert found[f"blobs/{blob.digest.replace(':', '/')}"] == laid.path(blob).read_bytes()


def test_a_docker_archive_has_the_config_by_its_digest(laid: LaidImage) -> None:
    """Docker makes the image's id of these bytes."""
    found = members(docker_archive(laid, "name:tag"))
    (manifest,) = json.loads(found["manifest.json"])
    assert manifest["RepoTags"] == ["name:tag"]
    assert found[manifest["Config"]] == laid.path(laid.config).read_bytes()
    assert [found[name] for name in manifest["Layers"]] == [laid.path(layer).read_bytes() for layer in laid.layers]


def test_layers_that_were_removed_and_made_again_are_others(tmp_path: Path) -> None:
    """A path that leads to another directory than before is found out."""
    layer = tmp_path / "layer"
    layer.mkdir()
    held = HeldLayers.open([str(layer)])
    try:
        assert held.same()
        shutil.rmtree(layer)
        assert not held.same()
        layer.mkdir()
        assert not held.same()
    finally:
        held.close()
        held.close()


def test_layers_of_an_image_topmost_first(tmp_path: Path) -> None:
    """As the drivers of both engines tell them; one without directories is refused with a cure."""
    graph = {"Name": "overlay2", "Data": {"UpperDir": f"{tmp_path}/c", "LowerDir": f"{tmp_path}/b:{tmp_path}/a"}}
    assert layer_directories(graph, "docker") == tuple(f"{tmp_path}/{name}" for name in "cba")
    with pytest.raises(ExecutorError) as caught:
        layer_directories({"Name": "vfs", "Data": None}, "docker")
    assert "vfs" in caught.value.brief
    assert "own" in caught.value.resolution


@pytest.mark.parametrize(
    ("info", "named"),
    [({"Driver": "vfs"}, "vfs"), ({"Driver": "overlay2", "SecurityOptions": ["name=userns"]}, "userns-remap")],
)
def test_a_docker_whose_images_are_of_no_use(info: dict[str, Any], named: str) -> None:
    """Refused when the executor opens, naming what is in the way."""
    with pytest.raises(ExecutorError, match=named):
        refuse_storage(info)
    refuse_storage({"Driver": "overlay2"})


def test_volumes_inside_the_sandboxes_own_places_are_refused() -> None:
    """Docker would mount one of its own there."""
    spec = {"mounts": [{"destination": "/tmp"}, {"destination": "/data"}]}
    assert volumes_to_cover(spec, None) == ()
    assert volumes_to_cover(spec, EngineImage("x", "h", ("/data", "/srv"))) == ("/srv",)
    for path in ("/tmp/x", "/"):
        with pytest.raises(SandboxError, match=f"image.Volumes.{path}"):
            volumes_to_cover(spec, EngineImage("x", "h", (path,)))


def test_an_old_docker_is_not_given_zstd(laid: LaidImage) -> None:
    """It would fail in the middle of a load."""
    from dataclasses import replace

    packed = replace(laid, layers=(Blob("sha256:0", 1, "application/vnd.oci.image.layer.v1.tar+zstd"),))
    with pytest.raises(ExecutorError, match=r"\+zstd"):
        DockerImages(None, "20.10.24")._refuse_compression(packed)  # type: ignore[arg-type]  # asks no daemon
    DockerImages(None, "28.0.1")._refuse_compression(packed)  # type: ignore[arg-type]  # as above


class _Service:
    """A Podman that says of every container what it was told to say."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    async def call(self, method: str, what: str) -> dict[str, Any]:
        """Any call."""
        return self.answer


@pytest.mark.parametrize(
    ("image", "below", "reason"),
    [("b" * 64, "layer", "image_differs"), ("a" * 64, "layer", ""), ("a" * 64, "mapped", "podman_rootfs")],
)
def test_what_podman_reports_of_a_container_is_compared(tmp_path: Path, image: str, below: str, reason: str) -> None:
    """Another image, or a copy of its layers made for a range of ids, ends the attempt."""
    for name in ("layer", "mapped"):
        (tmp_path / name).mkdir()
    answer = {"Image": image, "GraphDriver": {"Data": {"LowerDir": str(tmp_path / below)}}}
    images = PodmanImages(_Service(answer), None)  # type: ignore[arg-type]  # a fake: Podman does not do this on demand
    images._held["h"] = HeldLayers.open([str(tmp_path / "layer")])
    wanted = EngineImage(f"sha256:{'a' * 64}", "h")

    async def main() -> str:
        try:
            await images.check("fy-x", wanted)
        except ExecutorError as error:
            return error.reason
        finally:
            await images.release("h")
        return ""

    assert asyncio.run(main()) == reason


def podman_spec(root: Path, *, readonly: bool = False) -> dict[str, Any]:
    """As much of a bundle as roots are about."""
    mounts = [{"destination": "/tmp", "type": "bind", "source": "/var/tmp"}, {"destination": "/proc", "type": "proc"}]
    return {"root": {"path": str(root), "readonly": readonly}, "mounts": mounts}


@pytest.mark.parametrize("readonly", [False, True])
def test_the_parts_of_a_root_are_bound_and_folded_again(tmp_path: Path, readonly: bool) -> None:
    """Podman's root counts as ours only when every part is there, with the root's own flags."""
    for name in ("etc", "tmp", "proc"):
        (tmp_path / name).mkdir()
    (tmp_path / "lib").symlink_to("etc")
    (tmp_path / "file").write_text("")
    spec = podman_spec(tmp_path, readonly=readonly)
    body = {"rootfs": str(tmp_path), "rootfs_overlay": False, "command": ["/.forgeyard/init", "x"], "mounts": []}
    made = on_image(body, EngineImage("sha256:abc", "h"), spec)
    assert {mount["destination"] for mount in made["mounts"]} == {"/etc", "/file"}
    assert all(("ro" in mount["options"]) is readonly for mount in made["mounts"])
    assert (made["image"], made["entrypoint"], made["command"]) == ("abc", ["/.forgeyard/init"], ["x"])
    assert "rootfs" not in made
    applied = {"root": {"path": "/podmans", "readonly": True}, "mounts": [*made["mounts"], *spec["mounts"]]}
    folded = root_folded(applied, spec)
    assert (folded["root"]["path"], folded["mounts"]) == (str(tmp_path), spec["mounts"])
    weaker = {**applied["mounts"][0], "options": ["bind", "nodev"]}
    for wrong in ([*applied["mounts"][1:]], [weaker, *applied["mounts"][1:]]):
        assert root_folded({**applied, "mounts": wrong}, spec)["root"]["path"] == "/podmans"
    writable = {**applied, "root": {"path": "/podmans"}}
    assert root_folded(writable, spec)["root"]["path"] == "/podmans"


def test_no_store_knows_no_image(tmp_path: Path) -> None:
    """A sweep asks for what the store has; one that was never made has nothing."""
    assert known_images("") == known_images(str(tmp_path)) == frozenset()
