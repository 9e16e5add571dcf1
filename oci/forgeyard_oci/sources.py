"""Where a pull gets an image from: a layout on disk, read in place, or a registry, through the store's blobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forgeyard_model.errors import ForgeyardError
from forgeyard_oci.blobs import BlobStore
from forgeyard_oci.claims import Claim
from forgeyard_oci.image_errors import refused
from forgeyard_oci.image_manifest import MAX_MANIFEST, Descriptor
from forgeyard_oci.image_resolve import Documents
from forgeyard_oci.layout import ImageLayout
from forgeyard_oci.reference import LayoutReference, RegistryReference, sha256
from forgeyard_oci.registry.budget import Budget, Progress

if TYPE_CHECKING:
    from forgeyard_oci.registry.client import RegistryClient


class Source(Documents, Protocol):
    """One image's documents and blobs. Documents are verified; layers are verified while they are unpacked.

    stored: whether the blobs end up in the store.
    """

    stored: bool

    def start(self) -> tuple[Descriptor | str, str]:
        """What the reference names, and the media type that was declared for a bare digest."""

    def fetch(self, layer: Descriptor) -> bool:
        """Bring a layer's blob here; whether it had to be downloaded. Called from several threads."""

    def open(self, layer: Descriptor) -> int:
        """A fetched layer's blob; the caller closes it."""

    def refetch(self, layer: Descriptor) -> bool:
        """Fetch a layer again that turned out to be spoiled; False where there is nothing better to be had."""


class LayoutSource:
    """A layout on disk."""

    stored = False

    def __init__(self, reference: LayoutReference, base_dir: Path) -> None:
        self._reference = reference
        self._layout = ImageLayout(reference.layout_path(base_dir))
        self.manifest = self._layout.manifest
        self.config = self._layout.config
        self.open = self._layout.open_blob

    def start(self) -> tuple[Descriptor | str, str]:
        """See Source."""
        self._layout.check()
        return self._reference.digest or self._layout.tagged(self._reference.tag or ""), ""

    def fetch(self, layer: Descriptor) -> bool:
        """Nothing to do: blobs are read where they are."""
        return False

    def refetch(self, layer: Descriptor) -> bool:
        """There is one copy."""
        return False


@dataclass(frozen=True, slots=True)
class Transfer:
    """How blobs come here. client: makes the client, at the first blob that isn't here; None never asks a registry."""

    client: Callable[[], RegistryClient] | None
    budget: Budget
    progress: Progress


class RegistrySource:
    """A registry, or what an earlier pull left of it here.

    :param digest: what is wanted, "" to ask what the tag names.
    """

    stored = True

    def __init__(
        self, reference: RegistryReference, digest: str, blobs: BlobStore, claim: Claim, transfer: Transfer
    ) -> None:
        self._reference, self._digest = reference, digest
        self._blobs, self._claim = blobs, claim
        self._client, self._budget, self._progress = transfer.client, transfer.budget, transfer.progress

    def start(self) -> tuple[Descriptor | str, str]:
        """See Source."""
        if self._digest:
            return self._digest, ""
        fetched = self._registry().manifest(self._reference, self._reference.tag or "", self._budget)
        self._keep(fetched.digest, fetched.data, None)
        return fetched.digest, fetched.media_type

    def manifest(self, digest: str, size: int | None) -> bytes:
        """See Source."""
        self._claim.add(digest)
        data = self._blobs.read(digest, MAX_MANIFEST)
        if data is None:
            data = self._registry().manifest(self._reference, digest, self._budget).data
            self._keep(digest, data, size)
        _check_size(digest, data, size)
        return data

    def config(self, descriptor: Descriptor) -> bytes:
        """See Source."""
        self._claim.add(descriptor.digest)
        data = self._blobs.read(descriptor.digest, MAX_MANIFEST)
        if data is None:
            self._download(descriptor, "config")
            data = self._blobs.read(descriptor.digest, MAX_MANIFEST)
        if data is None:
            raise refused("digest_mismatch", f"config {descriptor.digest} has other contents")
        _check_size(descriptor.digest, data, descriptor.size)
        return data

    def fetch(self, layer: Descriptor) -> bool:
        """See Source."""
        if self._blobs.has(layer.digest, layer.size):
            return False
        return self._download(layer, "layer")

    def open(self, layer: Descriptor) -> int:
        """See Source."""
        return os.open(self._blobs.path(layer.digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def refetch(self, layer: Descriptor) -> bool:
        """See Source."""
        self._blobs.remove(layer.digest)
        return self._download(layer, "layer")

    def _download(self, blob: Descriptor, what: str) -> bool:
        client = self._registry()
        digest = blob.digest
        self._progress.begin(digest, blob.size, what)

        def into(fd: int) -> None:
            client.blob(
                self._reference,
                digest,
                blob.size,
                fd,
                self._budget,
                lambda total: self._progress.advance(digest, total),
            )

        try:
            downloaded = self._blobs.fetch(digest, blob.size, into, self._budget)
        except ForgeyardError:
            self._progress.done(digest, "failed")
            raise
        self._progress.done(digest, "pulled" if downloaded else "present")
        return downloaded

    def _registry(self) -> RegistryClient:
        if self._client is None:
            raise refused(
                "not_present",
                f"image {self._reference} is not in the store",
                details="the pull policy is never",
                resolution="pull it first, or let the job pull what is missing",
            )
        return self._client()

    def _keep(self, digest: str, data: bytes, size: int | None) -> None:
        _check_size(digest, data, size)
        if (actual := sha256(data)) != digest:
            raise refused("digest_mismatch", f"manifest {digest} has other contents", details=f"they hash to {actual}")
        self._claim.add(digest)
        self._blobs.put(digest, data)


def _check_size(digest: str, data: bytes, size: int | None) -> None:
    if len(data) > MAX_MANIFEST:
        raise refused("manifest_too_large", f"{digest} has {len(data)} bytes", details="the limit is 4 MiB")
    if size is not None and len(data) != size:
        raise refused("size_mismatch", f"{digest} has {len(data)} bytes, its descriptor says {size}")
