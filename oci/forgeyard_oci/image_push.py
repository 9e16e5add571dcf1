"""Copies an image from the store, or from a layout on disk, into a registry: blobs first, what points to them last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from forgeyard_model.errors import ForgeyardError, InvalidRequest, SandboxError
from forgeyard_oci.image_errors import refused
from forgeyard_oci.image_manifest import Descriptor, Index, Manifest
from forgeyard_oci.image_resolve import Parser, media_type_of
from forgeyard_oci.layout import ImageLayout
from forgeyard_oci.reference import RegistryReference
from forgeyard_oci.registry.budget import Budget, Progress

if TYPE_CHECKING:
    from forgeyard_oci.registry.client import RegistryClient

_UPLOADS: Final = 4
_MAX_DEPTH: Final = 4


@dataclass(frozen=True, slots=True)
class _Upload:
    """A manifest or index, to be pushed after the blobs and the documents it points to."""

    digest: str
    data: bytes
    media_type: str


class ImagePush:
    """One push. Blocking."""

    def __init__(
        self, layout: ImageLayout, parser: Parser, client: RegistryClient, budget: Budget, progress: Progress
    ) -> None:
        self._layout, self._parser, self._client = layout, parser, client
        self._budget, self._progress = budget, progress

    def run(self, start: Descriptor | str, destination: RegistryReference) -> str:
        """Push what `start` names, an index with all its manifests; the pinned destination.

        :raises InvalidRequest: a destination whose digest is another one.
        :raises SandboxError: something of the image is not here.
        """
        digest, declared = (start, "") if isinstance(start, str) else (start.digest, start.media_type)
        if destination.digest not in (None, digest):
            raise InvalidRequest("destination", destination, f"the image has the digest {digest}: leave the other out")
        uploads: list[_Upload] = []
        blobs: dict[str, Descriptor] = {}
        self._collect(digest, declared, uploads, blobs, depth=0)
        with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="image-push") as pool:
            for _ in pool.map(lambda blob: self._push_blob(destination, blob), blobs.values()):
                self._budget.check()
        for upload in uploads:
            which = (destination.tag or digest) if upload.digest == digest else upload.digest
            self._client.push_manifest(destination, which, upload.data, upload.media_type, self._budget)
        return destination.pinned(digest)

    def _collect(
        self, digest: str, declared: str, uploads: list[_Upload], blobs: dict[str, Descriptor], depth: int
    ) -> None:
        if depth >= _MAX_DEPTH:
            raise refused("bad_manifest", f"{digest} nests more than {_MAX_DEPTH} indexes")
        data = self._layout.read(digest)
        document = self._parser.document(data, declared, digest)
        if isinstance(document, Index):
            for entry in document.manifests:
                self._check_entry(entry, digest)
                self._collect(entry.digest, entry.media_type, uploads, blobs, depth + 1)
        else:
            blobs.update({blob.digest: blob for blob in _blobs(document)})
        uploads.append(_Upload(digest, data, media_type_of(document, declared)))

    def _check_entry(self, entry: Descriptor, index: str) -> None:
        try:
            os.close(self._layout.open_blob(entry))
        except SandboxError as error:
            words = entry.platform
            place = f"{words.os}/{words.architecture}" if words is not None else "no platform"
            raise refused(
                "incomplete_image",
                f"index {index} can't be pushed: its image for {place} is not here",
                details=entry.digest,
                resolution="push the one image by its manifest's digest, or copy the index from a whole layout",
            ) from error

    def _push_blob(self, destination: RegistryReference, blob: Descriptor) -> None:
        def source() -> BinaryIO:
            return os.fdopen(self._layout.open_blob(blob), "rb")

        self._progress.begin(blob.digest, blob.size, "layer")
        try:
            sent = self._client.push_blob(
                destination,
                blob.digest,
                blob.size,
                source,
                self._budget,
                lambda total: self._progress.advance(blob.digest, total),
            )
        except ForgeyardError:
            self._progress.done(blob.digest, "failed")
            raise
        self._progress.done(blob.digest, "pushed" if sent else "present")


def _blobs(manifest: Manifest) -> Iterator[Descriptor]:
    yield from manifest.layers
    yield manifest.config
