"""Layer compressions. Each decoder takes the blob's chunks and gives pieces of bounded size, whatever the input claims.

The media type decides which one reads a layer; the blob's first bytes have to agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final, cast

from isal import igzip_lib

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import refused, unsupported

BLOCK: Final = 512 << 10
"""Bytes of one decoded piece, at most. Small enough to be hashed while it is still in the processor's cache."""
CHUNK: Final = 256 << 10
"""Bytes of one read of the blob."""
ZSTD_WINDOW: Final = 128 << 20
"""Bytes of the largest window that a zstd frame may ask for: what the zstd program itself takes by default."""

_GZIP_ERROR: Final = cast("type[Exception]", igzip_lib.error)  # its stubs call the class an instance
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
# A zstd stream may start with frames that hold no data, as some builders' tables of contents do.
_ZSTD_SKIPPABLE: Final = tuple(bytes([0x50 + number]) + b"\x2a\x4d\x18" for number in range(16))
_WORDS: Final = {"": "a plain tar", "gzip": "gzip", "zstd": "zstd"}
_PREFIXES: Final = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)
_SUFFIXES: Final = {"": "", "+gzip": "gzip", ".gzip": "gzip", "+zstd": "zstd", ".zstd": "zstd"}

Decoder = Callable[[Iterator[bytes], str], Iterator[bytes]]


def layer_compression(media_type: str) -> str:
    """ "gzip", "zstd" or "" for a layer's media type, as the registry or layout names it.

    :raises ExecutorError: UNSUPPORTED, for what is no tar layer.
    """
    for prefix in _PREFIXES:
        rest = media_type.removeprefix(prefix)
        if rest != media_type and rest in _SUFFIXES:
            return _SUFFIXES[rest]
    raise unsupported("layer_type", f"unsupported layer: {media_type[:100] or 'no media type'}")


def check_magic(start: bytes, compression: str, digest: str) -> None:
    """Hold a blob's first bytes to its label.

    :raises SandboxError: layer_type; says what the blob is instead.
    """
    actual = "gzip" if start.startswith(_GZIP) else "zstd" if start.startswith((_ZSTD, *_ZSTD_SKIPPABLE)) else ""
    if actual != compression:
        raise refused(
            "layer_type",
            f"layer {digest} is labelled {_WORDS[compression]} but is {_WORDS[actual]}",
            resolution="rebuild the image",
        )


def decoder(compression: str) -> Decoder:
    """What turns the chunks of a blob into those of its tar."""
    return {"": _plain, "gzip": gunzip, "zstd": unzstd}[compression]


def _plain(chunks: Iterator[bytes], _digest: str) -> Iterator[bytes]:
    return chunks


def gunzip(chunks: Iterator[bytes], digest: str) -> Iterator[bytes]:
    """Members one after another, as gzip files may have them; zero padding at the end is taken, garbage is not.

    :raises SandboxError: bad_compression.
    """
    member: igzip_lib.IgzipDecompressor | None = None
    whole = False
    for chunk in chunks:
        data = chunk
        while data or (member is not None and not member.needs_input):
            if member is None:
                data = data.lstrip(b"\0") if whole else data
                if not data:
                    break
                member, whole = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP), False
            try:
                piece = member.decompress(data, BLOCK)
            except _GZIP_ERROR as error:
                raise _broken(digest, "gzip", str(error)) from error
            data = b""
            if member.eof:
                data, member, whole = member.unused_data, None, True
            elif not piece and not member.needs_input:
                raise _broken(digest, "gzip", "it gives no more data")
            if piece:
                yield piece
    if not whole:
        raise _broken(digest, "gzip", "it ends in the middle")


class _Source:
    """The chunks as the file object that zstandard reads from."""

    def __init__(self, chunks: Iterator[bytes], last: bytes) -> None:
        self._chunks, self._last = chunks, last
        self.empty = True

    def read(self, _size: int = -1) -> bytes:
        """The next chunk, however many bytes are asked for."""
        chunk = next(self._chunks, b"")
        if not chunk:
            chunk, self._last = self._last, b""
        else:
            self.empty = False
        return chunk


def unzstd(chunks: Iterator[bytes], digest: str) -> Iterator[bytes]:
    """Frames one after another, those without data skipped.

    :raises SandboxError: bad_compression.
    """
    import zstandard

    # The library does not tell an end in the middle from an end. A frame of our own, put behind the blob, comes out
    # again only when all frames before it were whole. It repeats itself: a cut off block can take it for its own
    # bytes as they are, but does not expand it.
    seal = os.urandom(16) * 8
    source = _Source(chunks, zstandard.ZstdCompressor(level=1).compress(seal))
    reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(
        source,  # type: ignore[arg-type]  # it is only read from
        read_size=CHUNK,
        read_across_frames=True,
    )
    held = b""
    while piece := _zstd_piece(reader.read, digest):
        if len(piece) < len(seal):
            held += piece
            continue
        if held:
            yield held
        held = piece
    if source.empty or not held.endswith(seal):
        raise _broken(digest, "zstd", "it ends in the middle")
    if len(held) > len(seal):
        yield held[: -len(seal)]


def _zstd_piece(read: Callable[[int], bytes], digest: str) -> bytes:
    import zstandard

    try:
        return read(BLOCK)
    except zstandard.ZstdError as error:
        raise _broken(digest, "zstd", str(error)) from error


def _broken(digest: str, compression: str, details: str) -> SandboxError:
    return refused("bad_compression", f"layer {digest} is not whole {compression} data", details=details)
