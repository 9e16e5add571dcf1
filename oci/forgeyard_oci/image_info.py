"""What a store tells of its images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from forgeyard_oci.records import LayerRecord
from forgeyard_oci.store_parts import StoredImage, StoreParts


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One image of the store.

    :param names: references that name it, tags first. :param digest: its manifest's.
    :param indexes: digests of the indexes it was found through.
    :param size: bytes of its blobs. :param unpacked: bytes of its trees' files. Both may be shared with others.
    :param last_used: UTC. :param held: a running job uses it.
    """

    names: tuple[str, ...]
    digest: str
    indexes: tuple[str, ...]
    platform: str
    size: int
    unpacked: int
    last_used: datetime
    held: bool


@dataclass(frozen=True, slots=True)
class ImageDetails:
    """One image in full. `layers` lowest first; `user` as the image has it."""

    info: ImageInfo
    config: str
    layers: tuple[LayerRecord, ...]
    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    user: str
    workdir: str
    stop_signal: int
    volumes: tuple[str, ...]
    exposed_ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """What an rm took away: names, images by their manifest's digest, and bytes freed on the disk."""

    names: tuple[str, ...]
    images: tuple[str, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune took away, and `kept`: images it would have taken if no job used them."""

    names: tuple[str, ...]
    images: tuple[str, ...]
    kept: tuple[str, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the store that is not as it should be.

    :param kind: "blob", "tree", "record" or "name". :param what: a digest, folder or name.
    :param repaired: it was removed, and the next pull makes it again. :param held: left alone, a job uses it.
    """

    kind: str
    what: str
    problem: str
    repaired: bool = False
    held: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verify looked at, and what it found."""

    blobs: int
    trees: int
    bytes: int
    problems: tuple[Problem, ...]


def image_info(parts: StoreParts, image: StoredImage, names: Mapping[str, str]) -> ImageInfo:
    """One image, with those of `names` (digest by name) that mean it."""
    called = sorted((name for name, digest in names.items() if image.is_called(digest)), key=lambda n: ("@" in n, n))
    documents = [document.digest for used in image.records for document in used.record.documents[:-2]]
    return ImageInfo(
        names=tuple(called),
        digest=image.digest,
        indexes=tuple(dict.fromkeys(documents)),
        platform=image.records[0].record.platform,
        size=sum(image.blobs().values()),
        unpacked=sum(image.folders().values()),
        last_used=datetime.fromtimestamp(image.used, UTC),
        held=parts.holds.is_held(image.digest),
    )


def image_details(parts: StoreParts, image: StoredImage) -> ImageDetails:
    """One image in full."""
    record = image.records[0].record
    plan = record.plan
    return ImageDetails(
        info=image_info(parts, image, parts.names.all()),
        config=record.documents[-1].digest,
        layers=record.layers,
        env=plan.env,
        entrypoint=plan.entrypoint,
        cmd=plan.cmd,
        user=record.user,
        workdir=plan.workdir,
        stop_signal=plan.stop_signal,
        volumes=plan.volumes,
        exposed_ports=plan.exposed_ports,
    )
