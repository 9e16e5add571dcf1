"""A layer's bytes on their way from the blob to the tar reader: hashed, inflated, bounded, hashed again."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from typing import Final

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import refused, unsupported
from forgeyard_oci.unpack_limits import UnpackLimits

_CHUNK: Final = 256 << 10
_BLOCK: Final = 1 << 20
_GZIP_WINDOW: Final = 31  # zlib: 15 bits of window, +16 for the gzip wrapper
_MAGIC: Final = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_PREFIXES: Final = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)


def layer_compression(media_type: str) -> str:
    """ "gzip" or "" for a layer's media type, as the registry or layout names it.

    :raises ExecutorError: UNSUPPORTED, for zstd and for what is no tar layer.
    """
    for prefix in _PREFIXES:
        rest = media_type.removeprefix(prefix)
        if rest == media_type:
            continue
        if rest in ("", "+gzip", ".gzip"):
            return rest[1:]
        if rest in ("+zstd", ".zstd"):
            raise _zstd(media_type)
    raise unsupported("layer_type", f"unsupported layer: {media_type[:100] or 'no media type'}")


def _zstd(details: str) -> Exception:
    return unsupported(
        "layer_type",
        "layers compressed with zstd can't be read by this version",
        details=details,
        resolution="rebuild or copy the image with gzip layers",
    )


class LayerStream:
    """Reads a layer forward. Nothing read may be trusted before `finish` returned.

    :param fd: the blob; stays the caller's.
    :param digest: of the blob, `diff_id`: of the tar, both ``sha256:…``. size: bytes of the blob.
    """

    def __init__(self, fd: int, *, media_type: str, digest: str, size: int, diff_id: str, limits: UnpackLimits) -> None:
        self._compression = layer_compression(media_type)
        self._fd, self._digest, self._size, self._diff_id, self._limits = fd, digest, size, diff_id, limits
        self._blob_hash = hashlib.sha256()
        # A plain tar is its own blob: one hash does for both.
        self._diff_hash = hashlib.sha256() if self._compression else self._blob_hash
        self._raw = 0
        self._blocks = self._gunzip() if self._compression == "gzip" else self._chunks()
        self._block = memoryview(b"")
        self.expanded = 0

    def take(self, most: int) -> memoryview:
        """The next bytes, at most `most`, without a copy; empty at the end."""
        if not self._block:
            self._block = self._next_block()
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
        while self.take(_BLOCK):
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
        while chunk := os.read(self._fd, _CHUNK):
            self._raw += len(chunk)
            self._blob_hash.update(chunk)
        if self._raw != self._size:
            raise refused("truncated", f"layer {self._digest} has {self._raw} of {self._size} bytes")
        if (actual := f"sha256:{self._blob_hash.hexdigest()}") != self._digest:
            raise refused(
                "digest_mismatch", f"layer {self._digest} has other contents", details=f"they hash to {actual}"
            )

    def _next_block(self) -> memoryview:
        block = next(self._blocks, b"")
        if self._diff_hash is not self._blob_hash:
            self._diff_hash.update(block)
        self.expanded += len(block)
        if self.expanded > self._limits.expanded:
            raise refused("layer_too_large", f"layer {self._digest} expands beyond {self._limits.expanded} bytes")
        if self.expanded > self._limits.ratio_from and self.expanded > self._raw * self._limits.ratio:
            raise refused("layer_bomb", f"layer {self._digest} expands more than {self._limits.ratio} times")
        return memoryview(block)

    def _chunks(self) -> Iterator[bytes]:
        while chunk := os.read(self._fd, _CHUNK):
            first = not self._raw
            self._raw += len(chunk)
            self._blob_hash.update(chunk)
            if first:
                self._check_magic(chunk)
            yield chunk

    def _check_magic(self, chunk: bytes) -> None:
        actual = next((name for name, magic in _MAGIC.items() if chunk.startswith(magic)), "")
        if actual != self._compression:
            words = {"": "a plain tar", "gzip": "gzip", "zstd": "zstd"}
            raise refused(
                "layer_type",
                f"layer {self._digest} is labelled {words[self._compression]} but is {words[actual]}",
                resolution="rebuild the image",
            )

    def _gunzip(self) -> Iterator[bytes]:
        """Members one after another, as gzip files may have them; zero padding at the end is taken, garbage is not."""
        decoder = zlib.decompressobj(_GZIP_WINDOW)
        whole = False
        for chunk in self._chunks():
            data, full = chunk, False
            while data or full:
                if whole:
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    decoder, whole = zlib.decompressobj(_GZIP_WINDOW), False
                out = self._inflate(decoder, data)
                full = len(out) == _BLOCK and not decoder.eof
                whole = decoder.eof
                data = decoder.unused_data if whole else decoder.unconsumed_tail
                if out:
                    yield out
        if not whole:
            raise self._broken("it ends in the middle")

    def _inflate(self, decoder: zlib._Decompress, data: bytes) -> bytes:
        try:
            return decoder.decompress(data, _BLOCK)
        except zlib.error as error:
            raise self._broken(str(error)) from error

    def _broken(self, details: str) -> SandboxError:
        return refused("bad_compression", f"layer {self._digest} is not whole gzip data", details=details)
