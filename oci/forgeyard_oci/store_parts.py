"""The parts of one image store, as its operations share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeyard_oci.blobs import BlobStore
from forgeyard_oci.holds import Holds
from forgeyard_oci.layers import LayerStore
from forgeyard_oci.names import Names
from forgeyard_oci.records import Records, UsedRecord
from forgeyard_oci.store_paths import StorePaths


class StoreParts:
    """Everything below one root; folders are made when missing."""

    def __init__(self, root: Path) -> None:
        self.paths = StorePaths(root)
        self.blobs = BlobStore(self.paths)
        self.names = Names(self.paths)
        self.layers = LayerStore(self.paths)
        self.records = Records(self.paths)
        self.holds = Holds(self.paths.holds)
        self.paths.make()
        self.blobs.make()

    def images(self) -> Iterator[StoredImage]:
        """Every image, in no order."""
        groups: dict[str, list[UsedRecord]] = {}
        for used in self.records.all():
            groups.setdefault(used.record.digest, []).append(used)
        for digest, records in groups.items():
            yield StoredImage(digest, tuple(records))

    def forget(self, images: Sequence[StoredImage]) -> StoredImage | None:
        """Remove the records of images, all or none; the first that is held, if one is. Under the store's lock, alone.

        :raises ExecutorError: IO_FAILED.
        """
        seized: dict[str, int] = {}
        gone = False
        try:
            for image in images:
                if (fd := self.holds.seize(image.digest)) is None:
                    return image
                seized[image.digest] = fd
            for image in images:
                for used in image.records:
                    used.path.unlink(missing_ok=True)
            gone = True
        except OSError as error:
            raise self.blobs.failure(error, "removing an image") from error
        finally:
            for digest, fd in seized.items():
                self.holds.free(digest, fd, gone=gone)
        return None


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image by its manifest's digest, with a record for each digest it was asked for by."""

    digest: str
    records: tuple[UsedRecord, ...]

    @property
    def used(self) -> float:
        """When it was last used, in seconds since the epoch."""
        return max(used.used for used in self.records)

    def blobs(self) -> dict[str, int]:
        """Size by digest of its blobs."""
        return {digest: size for used in self.records for digest, size in used.record.blobs().items()}

    def folders(self) -> dict[str, int]:
        """Unpacked bytes by folder in layers/."""
        return {folder: size for used in self.records for folder, size in used.record.folders().items()}

    def is_called(self, digest: str) -> bool:
        """Whether `digest` is the image's, or that of an index it was found through."""
        return any(digest == document.digest for used in self.records for document in used.record.documents[:-1])
