"""A layer's bytes on their way from the blob to the tar reader: hashed, inflated, bounded, hashed again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Final

from forgeyard_oci.image_errors import refused
from forgeyard_oci.unpack_ahead import ReadAhead
from forgeyard_oci.unpack_decode import BLOCK, CHUNK, check_magic, decoder, layer_compression
from forgeyard_oci.unpack_limits import UnpackLimits

_SMALL: Final = 128 << 10
"""Blobs up to this size, in bytes, are not worth a thread."""


class LayerStream:
    """Reads a layer forward. Nothing read may be trusted before `finish` returned.

    :param fd: the blob; stays the caller's.
    :param digest: of the blob, `diff_id`: of the tar, both ``sha256:…``. size: bytes of the blob.
    :ivar expanded: bytes of the tar so far; may run ahead of what was taken.
    """

    def __init__(self, fd: int, *, media_type: str, digest: str, size: int, diff_id: str, limits: UnpackLimits) -> None:
        self._compression = layer_compression(media_type)
        self._fd, self._digest, self._size, self._diff_id, self._limits = fd, digest, size, diff_id, limits
        self._blob_hash = hashlib.sha256()
        # A plain tar is its own blob: one hash does for both.
        self._diff_hash = hashlib.sha256() if self._compression else self._blob_hash
        self._raw = self.expanded = 0
        blocks = self._bounded(decoder(self._compression)(self._chunks(), digest))
        self._ahead = ReadAhead(blocks) if size > _SMALL else None
        self._blocks: Iterator[bytes] = self._ahead or blocks
        self._block = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """The next bytes, at most `most`, without a copy; empty at the end."""
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        piece, self._block = self._block[:most], self._block[most:]
        return piece

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes, fewer only at the end."""
        piece = self.take(count)
        if len(piece) == count:
            return bytes(piece)
        pieces = [piece]
        missing = count - len(piece)
        while missing and (piece := self.take(missing)):
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def finish(self) -> None:
        """Read what is left and hold the whole to its digests.

        :raises SandboxError: truncated, or not the bytes that manifest and config name.
        """
        while self.take(BLOCK):
            pass
        self.check_blob()
        if (actual := f"sha256:{self._diff_hash.hexdigest()}") != self._diff_id:
            raise refused(
                "diff_id_mismatch",
                f"layer {self._digest} unpacks to {actual}",
                details=f"its config says {self._diff_id}",
            )

    def check_blob(self) -> None:
        """Hold the blob as it is stored to its digest, without expanding the rest of it.

        For when unpacking failed: a damaged blob should be called that, and not by what its damage looks like.

        :raises SandboxError: truncated, or other bytes than the manifest names.
        """
        self.close()
        while chunk := os.read(self._fd, CHUNK):
            self._raw += len(chunk)
            self._blob_hash.update(chunk)
        if self._raw != self._size:
            raise refused("truncated", f"layer {self._digest} has {self._raw} of {self._size} bytes")
        if (actual := f"sha256:{self._blob_hash.hexdigest()}") != self._digest:
            raise refused(
                "digest_mismatch", f"layer {self._digest} has other contents", details=f"they hash to {actual}"
            )

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _bounded(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        limits = self._limits
        for block in blocks:
            self.expanded += len(block)
            if self.expanded > limits.expanded:
                raise refused("layer_too_large", f"layer {self._digest} expands beyond {limits.expanded} bytes")
            if self.expanded > limits.ratio_from and self.expanded > self._raw * limits.ratio:
                raise refused("layer_bomb", f"layer {self._digest} expands more than {limits.ratio} times")
            if self._diff_hash is not self._blob_hash:
                self._diff_hash.update(block)
            yield block

    def _chunks(self) -> Iterator[bytes]:
        while chunk := os.read(self._fd, CHUNK):
            first = not self._raw
            self._raw += len(chunk)
            self._blob_hash.update(chunk)
            if first:
                check_magic(chunk, self._compression, self._digest)
            yield chunk
