"""What a job needs to know of an image that is ready, in one small file: no manifest is parsed for it again.

A record is keyed by the digest that was asked for (an index's or a manifest's) and the platform. It is believed when
its trees are there and come from this boot, or were on the disk before the last one ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.plan import ImageHealthcheck, JobUser, RootfsPlan
from forgeyard_oci.durable import write_whole
from forgeyard_oci.names import Document
from forgeyard_oci.store_paths import StorePaths, hex_of

_VERSION: Final = 2
_TOUCH: Final = 60.0
"""Seconds; the time of last use is kept no more exactly than this."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer: its blob, its digest once uncompressed, its folder in layers/ and the bytes of its files."""

    digest: str
    size: int
    media_type: str
    diff_id: str
    folder: str
    unpacked: int


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image, ready for one platform.

    :param documents: from what was asked for down to the manifest, then the config.
    :param lowers: folders in layers/, topmost first. :param plan: with no lowers and no user.
    :param stored: its blobs are in the store's own layout. :param boot: the boot its trees were last believed in.
    """

    platform: str
    documents: tuple[Document, ...]
    layers: tuple[LayerRecord, ...]
    lowers: tuple[str, ...]
    plan: RootfsPlan
    user: str
    default_user: JobUser | None
    stored: bool
    boot: str

    @property
    def requested(self) -> str:
        """The digest that was asked for."""
        return self.documents[0].digest

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return self.documents[-2].digest

    def blobs(self) -> dict[str, int]:
        """Size by digest of every blob."""
        sizes = {document.digest: document.size for document in self.documents}
        return sizes | {layer.digest: layer.size for layer in self.layers}

    def folders(self) -> dict[str, int]:
        """Unpacked bytes by folder in layers/."""
        return {layer.folder: layer.unpacked for layer in self.layers}

    def rootfs(self, layers: Path) -> RootfsPlan:
        """The plan, its lowers below the store's folder `layers`."""
        return replace(self.plan, lowers=tuple(f"{layers}/{folder}" for folder in self.lowers))


@dataclass(frozen=True, slots=True)
class UsedRecord:
    """A record, its file, and when it was last used (seconds since the epoch)."""

    record: ImageRecord
    path: Path
    used: float


class Records:
    """The records of a store."""

    def __init__(self, paths: StorePaths) -> None:
        self._folder = paths.records

    def path(self, digest: str, platform: str) -> Path:
        """A record's file."""
        return self._folder / f"{hex_of(digest)}-{platform.replace('/', '_')}"

    def load(self, digest: str, platform: str) -> ImageRecord | None:
        """A record; None when there is none that can be read."""
        return _load(self.path(digest, platform))

    def save(self, record: ImageRecord) -> None:
        """Write a record for whoever comes next."""
        write_whole(self.path(record.requested, record.platform), json.dumps(_encoded(record)).encode())

    def use(self, digest: str, platform: str) -> bool:
        """Note that an image is used now; False when it has no record any more."""
        path = self.path(digest, platform)
        try:
            if time.time() - path.stat().st_mtime > _TOUCH:
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def all(self) -> Iterator[UsedRecord]:
        """Every record that can be read, in no order."""
        for path in self._folder.iterdir():
            record = None if path.name.startswith(".") else _load(path)
            if record is not None:
                with suppress(FileNotFoundError):
                    yield UsedRecord(record, path, path.stat().st_mtime)


def _load(path: Path) -> ImageRecord | None:
    try:
        return _decoded(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # of another version, or spoiled by a crash: the image is looked at again


def _encoded(record: ImageRecord) -> dict[str, Any]:
    plan = record.plan
    return {
        "version": _VERSION,
        "platform": record.platform,
        "documents": [asdict(document) for document in record.documents],
        "layers": [asdict(layer) for layer in record.layers],
        "lowers": record.lowers,
        "user": record.user,
        "default_user": record.default_user and asdict(record.default_user),
        "stored": record.stored,
        "boot": record.boot,
        "plan": {
            "identity": plan.identity,
            "env": dict(plan.env),
            "entrypoint": plan.entrypoint,
            "cmd": plan.cmd,
            "workdir": plan.workdir,
            "stop_signal": int(plan.stop_signal),
            "notes": plan.notes,
            "volumes": plan.volumes,
            "exposed_ports": plan.exposed_ports,
            "healthcheck": plan.healthcheck and asdict(plan.healthcheck),
        },
    }


def _decoded(words: dict[str, Any]) -> ImageRecord:
    if words["version"] != _VERSION:
        raise ValueError("another version")
    user = words["default_user"]
    return ImageRecord(
        platform=words["platform"],
        documents=tuple([Document(**document) for document in words["documents"]]),
        layers=tuple([LayerRecord(**layer) for layer in words["layers"]]),
        lowers=tuple(words["lowers"]),
        plan=_plan(words["plan"]),
        user=words["user"],
        default_user=user and JobUser(**{**user, "groups": tuple(user["groups"])}),
        stored=words["stored"],
        boot=words["boot"],
    )


def _plan(words: dict[str, Any]) -> RootfsPlan:
    health = words["healthcheck"]
    return RootfsPlan(
        kind=ExecutorKind.CONTAINER,
        lowers=(),
        identity=words["identity"],
        writable=True,
        env=MappingProxyType(words["env"]),
        entrypoint=tuple(words["entrypoint"]),
        cmd=tuple(words["cmd"]),
        workdir=words["workdir"],
        stop_signal=words["stop_signal"],
        notes=tuple(words["notes"]),
        volumes=tuple(words["volumes"]),
        exposed_ports=tuple(words["exposed_ports"]),
        healthcheck=health and ImageHealthcheck(**{**health, "test": tuple(health["test"])}),
    )
