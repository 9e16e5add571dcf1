"""The blobs of a store's image layout: nothing gets its name there before its digest and size agree."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from forgeyard_model.errors import ExecutorError
from forgeyard_oci.durable import filesystem_of, write_whole
from forgeyard_oci.image_errors import host_failure
from forgeyard_oci.locks import locked
from forgeyard_oci.reference import sha256
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.store_paths import StorePaths, hex_of

_LAYOUT: Final = b'{"imageLayoutVersion":"1.0.0"}'
_EMPTY_INDEX: Final = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}'
_INGEST: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class BlobStore:
    """Blobs by digest. Safe between threads and processes."""

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self._folder = paths.layout / "blobs" / "sha256"

    def make(self) -> None:
        """Create the layout if it isn't there."""
        if (self._paths.layout / "index.json").exists():
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._paths.layout / "oci-layout", _LAYOUT)
        with locked(self._paths.locks / "index", Budget()):
            if not (self._paths.layout / "index.json").exists():
                write_whole(self._paths.layout / "index.json", _EMPTY_INDEX)

    def path(self, digest: str) -> Path:
        """A blob's file."""
        return self._folder / hex_of(digest)

    def has(self, digest: str, size: int) -> bool:
        """Whether a blob of that size is there. Its bytes are verified whenever they are used."""
        try:
            status = self.path(digest).stat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size

    def read(self, digest: str, limit: int) -> bytes | None:
        """A document's verified bytes; None when it isn't there. One that a crash spoiled is removed."""
        try:
            with self.path(digest).open("rb") as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        if sha256(data) == digest:
            return data
        self.remove(digest)
        return None

    def put(self, digest: str, data: bytes) -> None:
        """Store a document whose digest was verified.

        :raises ExecutorError: IO_FAILED.
        """
        try:
            write_whole(self.path(digest), data)
        except OSError as error:
            raise self.failure(error, "storing an image") from error

    def fetch(self, digest: str, size: int, download: Callable[[int], None], budget: Budget) -> bool:
        """Make a blob be there, once however many ask; whether it had to be downloaded.

        :param download: writes the blob into a descriptor, going on after what the file holds already, verifies
            digest and size, and raises when they differ.
        :raises SandboxError, ExecutorError: what `download` raises; IO_FAILED; TIMEOUT or cancelled while waiting.
        """
        try:
            with locked(self._paths.locks / hex_of(digest), budget):
                if self.has(digest, size):
                    return False
                self._ingest(digest, download)
        except OSError as error:
            raise self.failure(error, "downloading an image") from error
        return True

    def _ingest(self, digest: str, download: Callable[[int], None]) -> None:
        partial = self._paths.ingest / hex_of(digest)
        fd = os.open(partial, _INGEST, 0o600)
        try:
            download(fd)
            partial.rename(self.path(digest))
        except BaseException as error:
            # A good beginning is worth keeping; wrong bytes are not, and a full disk needs the room.
            if _is_useless(error) or not os.fstat(fd).st_size:
                partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def remove(self, digest: str) -> int:
        """Remove a blob; the bytes it had."""
        try:
            size = self.path(digest).stat().st_size
            self.path(digest).unlink()
        except FileNotFoundError:
            return 0
        return size

    def all(self) -> Iterator[tuple[str, Path]]:
        """Every blob, with its digest."""
        for path in sorted(self._folder.iterdir()):
            if not path.name.startswith("."):
                yield f"sha256:{path.name}", path

    def problem(self, digest: str) -> str:
        """What is wrong with a blob's bytes; "" for nothing, also when it went away meanwhile."""
        try:
            with self.path(digest).open("rb") as file:
                actual = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"can't be read: {error.strerror}"
        return "" if actual == digest else f"its bytes hash to {actual}"

    def failure(self, error: OSError, doing: str) -> ExecutorError:
        """A failed system call as our own error, which names the store's file system."""
        return host_failure(error, doing, f"file system {filesystem_of(self._paths.root)}")


def _is_useless(error: BaseException) -> bool:
    """Whether what a failed download left is nothing to go on with."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "reason", "") in ("digest_mismatch", "size_mismatch", "no_space")
