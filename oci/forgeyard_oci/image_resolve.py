"""From a reference to one image for one platform; every hop is verified, every choice is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import ExecutorError
from forgeyard_oci.image_errors import refused, unsupported
from forgeyard_oci.image_manifest import (
    ATTESTATION,
    CONFIG_TYPES,
    ConfigFile,
    Descriptor,
    Index,
    Manifest,
    parse_json,
    parse_manifest,
)
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.layout import ImageLayout
from forgeyard_oci.reference import ImageReference, is_digest

_MAX_DEPTH: Final = 4
_MAX_LAYERS: Final = 500
"""Lower layers that one overlay takes (kernel, OVL_MAX_STACK)."""


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One layer: its blob, and the digest of its tar once uncompressed."""

    blob: Descriptor
    diff_id: str


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """The image a reference named. `digest` is the manifest's own; layers lowest first."""

    digest: str
    layers: tuple[ImageLayer, ...]
    config: ConfigFile


def resolve_image(layout: ImageLayout, reference: ImageReference, platform: Platform) -> ResolvedImage:
    """Follow `reference` to the image for `platform`.

    :raises SandboxError: missing, damaged or contradicting blobs.
    :raises ExecutorError: UNSUPPORTED, for another architecture or a kind of manifest we don't read.
    """
    layout.check()
    entry = None if reference.digest else layout.tagged(reference.tag or "")
    digest, declared, size = reference.digest or "", "", None
    for _ in range(_MAX_DEPTH):
        if entry is not None:
            digest, declared, size = entry.digest, entry.media_type, entry.size
        document = parse_manifest(layout.read(digest, size=size), declared, digest)
        if isinstance(document, Manifest):
            return _image(layout, digest, document, entry, platform)
        entry = _choose(document, platform)
    raise refused("bad_manifest", f"{reference} nests more than {_MAX_DEPTH} indexes")


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


def _image(
    layout: ImageLayout, digest: str, manifest: Manifest, entry: Descriptor | None, wanted: Platform
) -> ResolvedImage:
    if manifest.config.media_type not in CONFIG_TYPES or (entry is not None and _is_attestation(entry)):
        raise unsupported(
            "not_an_image", f"{digest} is not an image", details=f"its config is {manifest.config.media_type}"
        )
    data = layout.read(manifest.config.digest, size=manifest.config.size)
    config = parse_json(ConfigFile, data, f"config {manifest.config.digest}")
    _check_platform(config, entry, wanted)
    return ResolvedImage(digest, _layers(manifest, config, digest), config)


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
    return tuple(ImageLayer(blob, diff_id) for blob, diff_id in zip(manifest.layers, diff_ids, strict=True))
