"""The image of a container: links and empty places of its root's top, and nothing that runs.

Docker takes no root file system of ours, so its own is this: read-only, with every top entry of our root bound on it.
An image's id is the digest of its configuration, known before Docker has seen it, and the same for every root with the
same top.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from forgeyard_runtimes.labels import STATE

SKELETON_LABEL: Final = "forgeyard.skeleton"
REPOSITORY: Final = "forgeyard/skeleton"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Top of a root: targets of links by name, and names of places with whether each is a directory."""

    links: tuple[tuple[str, str], ...]
    places: tuple[tuple[str, bool], ...]

    @classmethod
    def of(cls, links: Mapping[str, str], places: Mapping[str, bool]) -> Self:
        """The skeleton of these, whatever their order."""
        return cls(tuple(sorted(links.items())), tuple(sorted(places.items())))


@dataclass(frozen=True, slots=True)
class SkeletonImage:
    """An image as Docker loads it. `identity`: its id, ``sha256:…``; `tag` keeps `docker image prune` from it."""

    identity: str
    tag: str
    archive: bytes


@lru_cache(maxsize=64)
def build_image(skeleton: Skeleton, state: str, machine: str) -> SkeletonImage:
    """The image of `skeleton`, labelled with `state`. The same input gives the same bytes."""
    layer = _layer(skeleton)
    config = _json(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Labels": {SKELETON_LABEL: "1", STATE: state}},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "history": [{"created_by": "forgeyard"}],
        }
    )
    digest = hashlib.sha256(config).hexdigest()
    tag = f"{REPOSITORY}:{digest[:16]}"
    manifest = _json([{"Config": f"{digest}.json", "RepoTags": [tag], "Layers": ["layer.tar"]}])
    archive = _tar({f"{digest}.json": config, "layer.tar": layer, "manifest.json": manifest})
    return SkeletonImage(f"sha256:{digest}", tag, archive)


def _layer(skeleton: Skeleton) -> bytes:
    buffer = io.BytesIO()
    # PAX: a name or a target may be longer than the old format takes.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, directory in skeleton.places:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = (tarfile.DIRTYPE, 0o755) if directory else (tarfile.REGTYPE, 0o644)
            archive.addfile(entry)
        for name, target in skeleton.links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, target
            archive.addfile(entry)
    return buffer.getvalue()


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
