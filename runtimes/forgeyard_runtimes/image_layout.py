"""An image of a layout on disk, as an engine is given it: its documents and layers by digest.

The layout is our own store's, or one that a job names. The image was judged and unpacked by our own reader before: what
is read here has the digest that was accepted then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

_MAX_DOCUMENT: Final = 16 << 20
"""Bytes of a manifest or a config; the reader takes no larger ones."""
_PIECE: Final = 1 << 20
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, slots=True)
class Blob:
    """One blob, by its descriptor."""

    digest: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class LaidImage:
    """One image of a layout. Layers and their diff ids lowest first.

    :param volumes: paths that its config declares as volumes.
    """

    layout: Path
    manifest: Blob
    config: Blob
    layers: tuple[Blob, ...]
    diff_ids: tuple[str, ...]
    volumes: tuple[str, ...]

    def path(self, blob: Blob) -> Path:
        """A blob's file."""
        return _file(self.layout, blob.digest)

    def pieces(self, blob: Blob) -> Iterator[bytes]:
        """A blob's bytes, exactly as many as its descriptor says. Whoever takes them verifies the digest.

        :raises ExecutorError: PREPARE, when it is not there, or of another size.
        """
        left = blob.size
        try:
            with self.path(blob).open("rb") as file:
                while data := file.read(min(_PIECE, left + 1)):
                    left -= len(data)
                    if left < 0:
                        break
                    yield data
        except OSError as error:
            raise _spoiled(blob.digest, str(error)) from error
        if left:
            raise _spoiled(blob.digest, f"it has not the {blob.size} bytes that the image says")


def read_image(layout: Path, manifest: str) -> LaidImage:
    """The image whose manifest has that digest. Blocking.

    :raises ExecutorError: PREPARE, when a document is not there, or is another one.
    """
    raw = _document(layout, manifest)
    words: dict[str, Any] = json.loads(raw)
    config = _blob(words["config"])
    settings: dict[str, Any] = json.loads(_document(layout, config.digest))
    return LaidImage(
        layout=layout,
        manifest=Blob(manifest, len(raw), words.get("mediaType", _MANIFEST)),
        config=config,
        layers=tuple(_blob(layer) for layer in words["layers"]),
        diff_ids=tuple(settings["rootfs"]["diff_ids"]),
        volumes=tuple(sorted((settings.get("config") or {}).get("Volumes") or ())),
    )


def _blob(words: dict[str, Any]) -> Blob:
    return Blob(words["digest"], words["size"], words["mediaType"])


def _document(layout: Path, digest: str) -> bytes:
    try:
        with _file(layout, digest).open("rb") as file:
            data = file.read(_MAX_DOCUMENT + 1)
    except OSError as error:
        raise _spoiled(digest, str(error)) from error
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise _spoiled(digest, "its bytes have another digest")
    return data


def _file(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _spoiled(digest: str, details: str) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.PREPARE,
        "image_blob",
        f"blob {digest} of the image can't be read",
        details=details,
        resolution="pull the image again, or mend its layout",
    )
