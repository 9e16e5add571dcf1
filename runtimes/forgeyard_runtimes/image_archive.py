"""An image as one tar stream, as Podman and Docker load it: made while it is sent, never whole in memory or on disk."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Final

from forgeyard_runtimes.image_layout import Blob, LaidImage

REPOSITORY: Final = "forgeyard.invalid/store"
"""Nobody would pull this by chance. What has this name was put there by us, and may be taken away by us."""


def store_tag(state: str, manifest: str) -> str:
    """How a loaded image is marked as ours, since a label would give it another digest. It is never run by this name.

    :param state: what names the state directory.
    """
    return f"{tag_prefix(state)}{manifest.removeprefix('sha256:')}"


def tag_prefix(state: str) -> str:
    """What tags of one state directory begin with; the digest of a manifest follows."""
    return f"{REPOSITORY}:{state or 'none'}-"


def oci_archive(image: LaidImage, name: str) -> Iterator[bytes]:
    """An OCI layout in a tar: the blobs as they are, compressed or not."""
    entry = {
        "mediaType": image.manifest.media_type,
        "digest": image.manifest.digest,
        "size": image.manifest.size,
        "annotations": {"org.opencontainers.image.ref.name": name},
    }
    yield from _file("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    yield from _file("index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    blobs = {blob.digest: blob for blob in (image.manifest, image.config, *image.layers)}
    for blob in blobs.values():
        yield from _blob(f"blobs/{blob.digest.replace(':', '/')}", image, blob)
    yield _end()


def docker_archive(image: LaidImage, name: str) -> Iterator[bytes]:
    """What `docker save` writes, with each layer as it is: the daemon finds out by itself how one is compressed."""
    config = f"{image.config.digest.removeprefix('sha256:')}.json"
    layers = [f"{layer.digest.removeprefix('sha256:')}.tar" for layer in image.layers]
    manifest = [{"Config": config, "RepoTags": [name], "Layers": layers}]
    yield from _file("manifest.json", json.dumps(manifest).encode())
    yield from _blob(config, image, image.config)
    for file, layer in dict(zip(layers, image.layers, strict=True)).items():
        yield from _blob(file, image, layer)
    yield _end()


def _file(name: str, data: bytes) -> Iterator[bytes]:
    yield _header(name, len(data))
    yield data + _padding(len(data))


def _blob(name: str, image: LaidImage, blob: Blob) -> Iterator[bytes]:
    yield _header(name, blob.size)
    yield from image.pieces(blob)
    yield _padding(blob.size)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _end() -> bytes:
    return bytes(2 * tarfile.BLOCKSIZE)
