"""From a reference to one image: verification of every hop, platforms, attestations, odd manifests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import build
import pytest

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, ForgeyardError, SandboxError
from forgeyard_oci.image_manifest import ConfigFile, Index, Manifest, parse_json, parse_manifest
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.image_resolve import ResolvedImage, resolve_image
from forgeyard_oci.layout import ImageLayout

AMD64 = Platform.parse("linux/amd64")
LAYER = build.tar([build.Entry("f", b"x")])


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """An empty layout to write images into."""
    return build.LayoutWriter(tmp_path / "layout")


class Parser:
    """Reads documents in this process: here it is the rules that count, not who applies them."""

    def document(self, data: bytes, declared: str, digest: str) -> Index | Manifest:
        """A manifest or index."""
        return parse_manifest(data, declared, digest)

    def config(self, data: bytes, digest: str) -> ConfigFile:
        """A config."""
        return parse_json(ConfigFile, data, f"config {digest}")


def resolve(writer: Any, digest: str, host: Platform = AMD64) -> ResolvedImage:
    """What a pinned reference to `digest` resolves to."""
    if not (writer.path / "index.json").exists():
        writer.finish()
    return resolve_image(ImageLayout(writer.path), Parser(), digest, host)


def refusal(writer: Any, digest: str, host: Platform = AMD64) -> Any:
    """The error that a pinned reference to `digest` ends in."""
    with pytest.raises(ForgeyardError) as caught:
        resolve(writer, digest, host)
    return caught.value


def blob(writer: Any, digest: str) -> Path:
    """The file of a blob."""
    return Path(writer.path / "blobs" / digest.replace(":", "/"))


@pytest.mark.parametrize("docker", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_a_manifest_by_digest(writer: Any, docker: bool, compress: bool) -> None:
    """OCI and Docker manifests give their own digest, their layers lowest first, and the config."""
    image = writer.image([LAYER, build.tar([])], {"User": "app"}, docker=docker, compress=compress)
    found = resolve(writer, image["digest"])
    assert found.digest == image["digest"]
    assert [layer.diff_id for layer in found.layers] == [build.sha256(LAYER), build.sha256(build.tar([]))]
    assert found.config.config is not None
    assert found.config.config.user == "app"


@pytest.mark.parametrize("docker", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_attestations_are_never_chosen(writer: Any, docker: bool, position: int) -> None:
    """The image for this host is found wherever the attestation stands (field case C38)."""
    image = writer.image([LAYER], docker=docker, platform=build.platform("amd64"))
    other = writer.image([LAYER], architecture="arm64", docker=docker, platform=build.platform("arm64", "v8"))
    entries = [image, other]
    entries.insert(position, writer.attestation(image["digest"]))
    assert resolve(writer, writer.index(entries, docker=docker)["digest"]).digest == image["digest"]


def test_only_an_attestation(writer: Any) -> None:
    """An index of nothing that runs says so; pinning the attestation itself does not run it either."""
    attestation = writer.attestation("sha256:" + "0" * 64)
    error = refusal(writer, writer.index([attestation])["digest"])
    assert (error.kind, error.reason) == (ExecutorErrorKind.UNSUPPORTED, "no_platform")
    assert refusal(writer, attestation["digest"]).failure_class is FailureClass.CONFIGURATION


def test_no_matching_platform_lists_the_real_ones(writer: Any) -> None:
    """The message names what the image is for, without attestations."""
    entries = [writer.image([LAYER], architecture=name, platform=build.platform(name)) for name in ("arm64", "s390x")]
    error = refusal(writer, writer.index([*entries, writer.attestation(entries[0]["digest"])])["digest"])
    assert error.reason == "wrong_architecture"
    assert "image is linux/arm64, linux/s390x, host is linux/amd64, no binfmt handler" in str(error)


def test_wrong_architecture_of_a_manifest(writer: Any) -> None:
    """A pinned manifest is held to its config's architecture."""
    error = refusal(writer, writer.image([LAYER], architecture="arm64")["digest"])
    assert "image is arm64, host is amd64, no binfmt handler" in str(error)


def test_an_index_that_lies_about_the_platform(writer: Any) -> None:
    """The config has the last word."""
    image = writer.image([LAYER], architecture="arm64", platform=build.platform("amd64"))
    assert refusal(writer, writer.index([image])["digest"]).reason == "wrong_architecture"


def test_an_index_entry_without_platform(writer: Any) -> None:
    """A single entry of no platform is held to its config; beside others it is not guessed at."""
    image = writer.image([LAYER])
    assert resolve(writer, writer.index([image])["digest"]).digest == image["digest"]
    other = writer.image([build.tar([])])
    assert refusal(writer, writer.index([image, other])["digest"]).reason == "no_platform"


def test_nested_indexes(writer: Any) -> None:
    """An index may hold an index; too many of them is refused."""
    image = writer.image([LAYER], platform=build.platform("amd64"))
    nested = writer.index([image], platform=build.platform("amd64"))
    assert resolve(writer, writer.index([nested])["digest"]).digest == image["digest"]
    for _ in range(5):
        nested = writer.index([nested], platform=build.platform("amd64"))
    assert refusal(writer, nested["digest"]).reason == "bad_manifest"


def test_tags(writer: Any) -> None:
    """A tag is the ref.name of an entry of index.json; an unknown or doubled one is refused."""
    one, two = writer.image([LAYER]), writer.image([])
    named = [
        {**image, "annotations": {build_ref: tag}} for image, tag in ((one, "a"), (two, "b"), (one, "c"), (two, "c"))
    ]
    writer.finish(*named)

    def tagged(tag: str) -> str:
        layout = ImageLayout(writer.path)
        return resolve_image(layout, Parser(), layout.tagged(tag), AMD64).digest

    assert tagged("b") == two["digest"]
    with pytest.raises(SandboxError, match="no image tagged 'x': tags: a, b, c"):
        tagged("x")
    with pytest.raises(SandboxError, match="more than one image"):
        tagged("c")


build_ref = "org.opencontainers.image.ref.name"


@pytest.mark.parametrize("what", ["index", "manifest", "config"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "directory", "fifo"])
def test_every_hop_is_verified(writer: Any, what: str, damage: str) -> None:
    """A damaged index, manifest or config is refused, never read as far as it goes."""
    image = writer.image([LAYER], platform=build.platform("amd64"))
    index = writer.index([image])
    config = json.loads(blob(writer, image["digest"]).read_bytes())["config"]["digest"]
    path = blob(writer, {"index": index["digest"], "manifest": image["digest"], "config": config}[what])
    data = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(data.replace(b"amd64", b"arm64").replace(b"linux", b"Linux").replace(b"vnd", b"Vnd"))
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    elif damage == "directory":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    expected = {"changed": {"digest_mismatch"}, "truncated": {"digest_mismatch", "size_mismatch"}}
    assert refusal(writer, index["digest"]).reason in expected.get(damage, {"missing_blob"})


def test_manifests_over_four_mebibytes(writer: Any) -> None:
    """A manifest that is too large is refused by what its pointer says, and by what is there."""
    large = writer.blob(b'{"manifests": [' + b" " * (4 << 20) + b"]}", "application/vnd.oci.image.index.v1+json")
    assert refusal(writer, large["digest"]).reason == "manifest_too_large"
    lying = {**writer.image([LAYER], platform=build.platform("amd64")), "size": 1 << 40}
    assert refusal(writer, writer.index([lying])["digest"]).reason == "manifest_too_large"


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"schemaVersion": 1, "name": "x", "fsLayers": []}, "manifest_type"),
        ({"mediaType": "application/vnd.docker.distribution.manifest.v1+prettyjws"}, "manifest_type"),
        ({"mediaType": "application/vnd.example.unknown+json"}, "manifest_type"),
        ({}, "manifest_type"),
        ({"manifests": [], "config": {}}, "bad_manifest"),
        ({"mediaType": "application/vnd.oci.image.manifest.v1+json", "manifests": []}, "bad_manifest"),
        ({"config": {"digest": "md5:1", "size": 1}}, "bad_manifest"),
        ({"config": {"digest": "sha256:" + "0" * 64, "size": -1}}, "bad_manifest"),
        ({"config": {"digest": "sha256:../../../../etc/passwd", "size": 1}}, "bad_manifest"),
        ([], "bad_manifest"),
    ],
)
def test_odd_manifests(writer: Any, document: Any, reason: str) -> None:
    """Schema 1, unknown kinds and contradictions each get their own words (field case C42)."""
    assert refusal(writer, writer.json(document, "application/json")["digest"]).reason == reason


def test_a_manifest_without_media_type_is_read_by_its_shape(writer: Any) -> None:
    """mediaType is optional in OCI documents."""
    image = json.loads(blob(writer, writer.image([LAYER])["digest"]).read_bytes())
    del image["mediaType"]
    bare = writer.json(image, "application/octet-stream")
    assert resolve(writer, bare["digest"]).digest == bare["digest"]


def test_artifacts_are_no_images(writer: Any) -> None:
    """A manifest whose config is something else can't be run."""
    artifact = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": writer.blob(b"{}", "application/vnd.oci.empty.v1+json"),
        "layers": [],
    }
    assert refusal(writer, writer.json(artifact, "")["digest"]).reason == "not_an_image"


def test_layers_and_diff_ids_must_agree(writer: Any) -> None:
    """A layer without a diff id could not be verified."""
    image = json.loads(blob(writer, writer.image([LAYER, LAYER])["digest"]).read_bytes())
    image["layers"].pop()
    assert "1 layers and 2 diff ids" in str(refusal(writer, writer.json(image, "")["digest"]))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([33 << 30], "layer_too_large"),
        ([30 << 30, 30 << 30, 5 << 30], "image_too_large"),
        ([1 << 61], "layer_too_large"),
    ],
)
def test_absurd_sizes_are_refused_unseen(writer: Any, sizes: list[int], reason: str) -> None:
    """What a manifest claims is enough to refuse it: nothing of it is looked for."""
    image = json.loads(blob(writer, writer.image([LAYER] * len(sizes))["digest"]).read_bytes())
    for number, size in enumerate(sizes):
        image["layers"][number] |= {"size": size, "digest": f"sha256:{number:064x}"}
    assert refusal(writer, writer.json(image, "")["digest"]).reason == reason


def test_documents_from_the_question_to_the_config(writer: Any) -> None:
    """Each hop is told with its digest, size and type, so that a store can keep them."""
    image = writer.image([LAYER], platform=build.platform("amd64"))
    index = writer.index([image])
    found = resolve(writer, index["digest"]).documents
    assert [document.digest for document in found[:2]] == [index["digest"], image["digest"]]
    assert [document.size for document in found[:2]] == [index["size"], image["size"]]
    assert [document.media_type.rpartition(".image.")[2] for document in found] == [
        "index.v1+json",
        "manifest.v1+json",
        "config.v1+json",
    ]


def test_more_layers_than_an_overlay_takes(writer: Any) -> None:
    """500 layers resolve, 501 are refused with the number."""
    assert len(resolve(writer, writer.image([LAYER] * 500, compress=False)["digest"]).layers) == 500
    assert "501 layers" in str(refusal(writer, writer.image([LAYER] * 501, compress=False)["digest"]))


def test_what_is_no_layout(tmp_path: Path) -> None:
    """A missing directory, an empty one, a file, or another version: each is refused by path."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "future").mkdir()
    (tmp_path / "future/oci-layout").write_text('{"imageLayoutVersion":"2.0.0"}')
    for name in ("missing", "empty", "file", "future"):
        with pytest.raises(SandboxError, match=name) as caught:
            ImageLayout(tmp_path / name).check()
        assert caught.value.reason == "not_a_layout"


def test_linked_blobs_are_read(writer: Any, tmp_path: Path) -> None:
    """Some build systems make layouts of symbolic links; contents are held to their digest anyway."""
    image = writer.image([LAYER])
    path = blob(writer, image["digest"])
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert resolve(writer, image["digest"]).digest == image["digest"]


def test_unsupported_errors_are_configuration(writer: Any) -> None:
    """A scheduler must not retry what can't work here."""
    error = refusal(writer, writer.image([LAYER], architecture="arm64")["digest"])
    assert isinstance(error, ExecutorError)
    assert error.failure_class is FailureClass.CONFIGURATION
