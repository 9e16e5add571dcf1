"""From a digest to one image for one platform; every hop is verified, every choice is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from forgeyard_model.errors import ExecutorError
from forgeyard_oci.image_errors import refused, unsupported
from forgeyard_oci.image_manifest import (
    ATTESTATION,
    CONFIG_TYPES,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    ConfigFile,
    Descriptor,
    Index,
    Manifest,
)
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.names import Document
from forgeyard_oci.reference import is_digest

_MAX_DEPTH: Final = 4
_MAX_LAYERS: Final = 500
"""Lower layers that one overlay takes (kernel, OVL_MAX_STACK)."""
_MAX_LAYER: Final = 32 << 30
_MAX_IMAGE: Final = 64 << 30
"""Bytes of one compressed layer, and of all; what claims more is refused before anything is downloaded."""


class Documents(Protocol):
    """Where manifests, indexes and configs come from. What it gives agrees with the digest, and with a known size."""

    def manifest(self, digest: str, size: int | None) -> bytes:
        """A manifest or index, at most 4 MiB. size: what the descriptor said, None when nobody did."""

    def config(self, descriptor: Descriptor) -> bytes:
        """A config, at most 4 MiB."""


class Parser(Protocol):
    """Reads documents from outside."""

    def document(self, data: bytes, declared: str, digest: str) -> Index | Manifest:
        """As parse_manifest()."""

    def config(self, data: bytes, digest: str) -> ConfigFile:
        """A config."""


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One layer: its blob, and the digest of its tar once uncompressed."""

    blob: Descriptor
    diff_id: str


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """The image a digest named. Layers lowest first.

    :param documents: from what was asked for down to the manifest, then the config.
    """

    documents: tuple[Document, ...]
    layers: tuple[ImageLayer, ...]
    config: ConfigFile

    @property
    def digest(self) -> str:
        """The manifest's own."""
        return self.documents[-2].digest


def resolve_image(
    documents: Documents, parser: Parser, start: Descriptor | str, platform: Platform, *, declared: str = ""
) -> ResolvedImage:
    """Follow `start`, an entry of an index or a digest, to the image for `platform`.

    :param declared: the media type that came with a bare digest.
    :raises SandboxError: missing, damaged or contradicting blobs, absurd sizes.
    :raises ExecutorError: UNSUPPORTED, for another architecture or a kind of manifest we don't read.
    """
    entry = None if isinstance(start, str) else start
    digest, size = start if isinstance(start, str) else "", None
    hops: list[Document] = []
    for _ in range(_MAX_DEPTH):
        if entry is not None:
            digest, declared, size = entry.digest, entry.media_type, entry.size
        if size is not None and size > MAX_MANIFEST:
            raise refused("manifest_too_large", f"{digest} is said to have {size} bytes", details="the limit is 4 MiB")
        data = documents.manifest(digest, size)
        document = parser.document(data, declared, digest)
        hops.append(Document(digest, len(data), media_type_of(document, declared)))
        if isinstance(document, Manifest):
            _check_image(document, entry, digest)
            described = document.config
            config = parser.config(documents.config(described), described.digest)
            _check_platform(config, entry, platform)
            last = Document(described.digest, described.size, described.media_type)
            return ResolvedImage((*hops, last), _layers(document, config, digest), config)
        entry = _choose(document, platform)
    raise refused("bad_manifest", f"{hops[0].digest} nests more than {_MAX_DEPTH} indexes")


def media_type_of(document: Index | Manifest, declared: str) -> str:
    """What a document says it is; what came with it, or OCI's own type, where it says nothing."""
    return document.media_type or declared or (OCI_INDEX if isinstance(document, Index) else OCI_MANIFEST)


def _choose(index: Index, wanted: Platform) -> Descriptor:
    """The entry that runs on `wanted`; attestations and entries of no known platform never do."""
    entries = [entry for entry in index.manifests if not _is_attestation(entry)]
    placed = [(entry, _platform(entry)) for entry in entries]
    known = [(entry, place) for entry, place in placed if place is not None]
    best = wanted.best([place for _, place in known])
    if best is not None:
        return known[best][0]
    bare = [entry for entry, place in placed if place is None]
    if len(entries) == len(bare) == 1:
        # An index of one that names no platform: its config does, and is checked below.
        return bare[0]
    raise _no_match([place for _, place in known], wanted)


def _is_attestation(entry: Descriptor) -> bool:
    words = entry.platform
    return bool(entry.annotation(ATTESTATION)) or (words is not None and "unknown" in (words.os, words.architecture))


def _platform(entry: Descriptor) -> Platform | None:
    words = entry.platform
    return Platform.of(words.os, words.architecture, words.variant) if words and words.architecture else None


def _no_match(offered: Sequence[Platform], wanted: Platform) -> ExecutorError:
    shown = ", ".join(sorted({str(place) for place in offered})[:20])
    if not shown:
        return unsupported("no_platform", "the index holds no image that can run", details=f"wanted {wanted}")
    return unsupported(
        "wrong_architecture",
        f"image is {shown}, host is {wanted}, no binfmt handler is used",
        resolution=f"name an image built for {wanted}",
    )


def _check_image(manifest: Manifest, entry: Descriptor | None, digest: str) -> None:
    described = manifest.config
    if described.media_type not in CONFIG_TYPES or (entry is not None and _is_attestation(entry)):
        raise unsupported("not_an_image", f"{digest} is not an image", details=f"its config is {described.media_type}")
    if described.size > MAX_MANIFEST:
        raise refused("manifest_too_large", f"config {described.digest} is said to have {described.size} bytes")


def _check_platform(config: ConfigFile, entry: Descriptor | None, wanted: Platform) -> None:
    """The config has the last word: an index may claim anything."""
    words = config if config.architecture else entry.platform if entry is not None else None
    if words is None or not words.architecture:
        raise unsupported("no_platform", "the image does not say which platform it is for")
    place = Platform.of(words.os or "linux", words.architecture, words.variant)
    if not wanted.runs(place):
        image = place.architecture if place.os == wanted.os else str(place)
        host = wanted.architecture if place.os == wanted.os else str(wanted)
        if image == host:
            image, host = str(place), str(wanted)
        raise unsupported(
            "wrong_architecture",
            f"image is {image}, host is {host}, no binfmt handler is used",
            resolution=f"name an image built for {wanted}",
        )


def _layers(manifest: Manifest, config: ConfigFile, digest: str) -> tuple[ImageLayer, ...]:
    diff_ids = config.rootfs.diff_ids
    if len(diff_ids) != len(manifest.layers) or not all(is_digest(diff_id) for diff_id in diff_ids):
        raise refused(
            "bad_manifest",
            f"image {digest} has {len(manifest.layers)} layers and {len(diff_ids)} diff ids",
            resolution="rebuild the image",
        )
    if len(diff_ids) > _MAX_LAYERS:
        raise refused("too_many_layers", f"image {digest} has {len(diff_ids)} layers; an overlay takes {_MAX_LAYERS}")
    _check_sizes(manifest, digest)
    return tuple(ImageLayer(blob, diff_id) for blob, diff_id in zip(manifest.layers, diff_ids, strict=True))


def _check_sizes(manifest: Manifest, digest: str) -> None:
    for blob in manifest.layers:
        if blob.size > _MAX_LAYER:
            raise refused(
                "layer_too_large",
                f"layer {blob.digest} is said to have {blob.size} bytes",
                details=f"the limit is {_MAX_LAYER}",
            )
    total = sum({blob.digest: blob.size for blob in manifest.layers}.values())
    if total > _MAX_IMAGE:
        raise refused(
            "image_too_large", f"image {digest} is said to have {total} bytes", details=f"the limit is {_MAX_IMAGE}"
        )
