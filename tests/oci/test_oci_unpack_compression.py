"""Field case C40: compressions, their labels, and blobs of several frames or members."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import build
import pytest
import trees
import zstandard
from build import Entry

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.unpack import unpack_layer
from forgeyard_oci.unpack_decode import ZSTD_WINDOW, layer_compression
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import MergedTree
from forgeyard_oci.unpack_stream import LayerStream

pytestmark = pytest.mark.kernel

OCI = "application/vnd.oci.image.layer.v1.tar"
DOCKER = "application/vnd.docker.image.rootfs.diff.tar"
LAYER = build.tar([Entry("f", b"data" * 5000), Entry("random", os.urandom(300_000))])


def zstd(data: bytes, **parameters: int) -> bytes:
    """One frame, with a checksum."""
    options = zstandard.ZstdCompressionParameters.from_level(3, write_checksum=True, **parameters)
    worker = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return worker.compress(data) + worker.flush()


def skippable(data: bytes = b"a table of contents") -> bytes:
    """A frame that readers pass over."""
    return b"\x5a\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


def unpack(blob: bytes, media_type: str, target: Path, limits: UnpackLimits | None = None) -> None:
    """Unpack `blob`, which should come out as LAYER."""
    target.mkdir()
    file = target.parent / f"{target.name}.blob"
    file.write_bytes(blob)
    fd = os.open(file, os.O_RDONLY)
    try:
        stream = LayerStream(
            fd,
            media_type=media_type,
            digest=build.sha256(blob),
            size=len(blob),
            diff_id=build.sha256(LAYER),
            limits=limits or UnpackLimits(),
        )
        unpack_layer(stream, str(target), MergedTree(()), limits or UnpackLimits())
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("media_type", "compress"),
    [
        (OCI, bytes),
        (f"{OCI}+gzip", gzip.compress),
        (f"{OCI}+zstd", zstd),
        (DOCKER, bytes),
        (f"{DOCKER}.gzip", gzip.compress),
        (f"{DOCKER}.zstd", zstd),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", zstd),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", gzip.compress),
    ],
)
def test_each_media_type(tmp_path: Path, media_type: str, compress: Callable[[bytes], bytes]) -> None:
    """OCI's and Docker's names for plain, gzip and zstd layers."""
    unpack(compress(LAYER), media_type, tmp_path / "t")
    assert trees.names(tmp_path / "t") == {"f", "random"}
    assert (tmp_path / "t/f").read_bytes() == b"data" * 5000


@pytest.mark.parametrize(
    "blob",
    [
        zstd(LAYER[:700]) + zstd(LAYER[700:]),
        zstd(LAYER) + zstd(b"") * 3,
        zstd(LAYER) + skippable(),
        skippable() + zstd(LAYER[:50_000]) + skippable(b"") + zstd(LAYER[50_000:]),
        b"".join(zstd(LAYER[at : at + 4096]) for at in range(0, len(LAYER), 4096)),
    ],
    ids=["two frames", "empty frames", "skippable at the end", "skippable between", "many"],
)
def test_zstd_frames(tmp_path: Path, blob: bytes) -> None:
    """Several frames are one stream; frames without data are passed over, as tools that seek in layers add them."""
    unpack(blob, f"{OCI}+zstd", tmp_path / "t")
    assert (tmp_path / "t/random").stat().st_size == 300_000


@pytest.mark.parametrize(
    ("blob", "label", "why"),
    [
        (zstd(LAYER), "+gzip", "labelled gzip but is zstd"),
        (LAYER, "+gzip", "labelled gzip but is a plain tar"),
        (gzip.compress(LAYER, mtime=0), "+zstd", "labelled zstd but is gzip"),
        (LAYER, "+zstd", "labelled zstd but is a plain tar"),
        (gzip.compress(LAYER, mtime=0), "", "labelled a plain tar but is gzip"),
        (zstd(LAYER), "", "labelled a plain tar but is zstd"),
    ],
)
def test_labels_have_to_be_true(tmp_path: Path, blob: bytes, label: str, why: str) -> None:
    """The media type decides, and first bytes that contradict it are an error that names both."""
    with pytest.raises(SandboxError, match=why) as caught:
        unpack(blob, OCI + label, tmp_path / "t")
    assert caught.value.reason == "layer_type"


@pytest.mark.parametrize("media_type", ["", "text/plain", f"{OCI}+xz", f"{OCI}+zstd+encrypted", f"{DOCKER}.bz2"])
def test_unknown_media_types(media_type: str) -> None:
    """What is no tar layer, or is compressed in a way nobody registered, is refused by its name."""
    with pytest.raises(ExecutorError, match="unsupported layer"):
        layer_compression(media_type)


@pytest.mark.parametrize("cut", [1, 4, 5, 12, 2000, 100_000])
def test_zstd_cut_off(tmp_path: Path, cut: int) -> None:
    """A frame without its end, wherever it was cut."""
    whole = zstd(LAYER)
    with pytest.raises(SandboxError) as caught:
        unpack(whole[: len(whole) - cut], f"{OCI}+zstd", tmp_path / "t")
    assert caught.value.reason == "bad_compression"


@pytest.mark.parametrize("tail", [b"garbage and more of it", zstd(LAYER)[:2000], gzip.compress(b"x", mtime=0)])
@pytest.mark.parametrize("label", ["+gzip", "+zstd"])
def test_trailing_garbage(tmp_path: Path, tail: bytes, label: str) -> None:
    """Bytes behind the compressed data that are no further member or frame are refused."""
    blob = (gzip.compress(LAYER) if label == "+gzip" else zstd(LAYER)) + tail
    if label == "+gzip" and tail.startswith(b"\x1f\x8b"):
        tail = tail[:-1]
        blob = blob[:-1]
    with pytest.raises(SandboxError) as caught:
        unpack(blob, OCI + label, tmp_path / "t")
    assert caught.value.reason == "bad_compression"


def test_zstd_damage_is_found(tmp_path: Path) -> None:
    """A changed byte, in a blob whose own digest agrees."""
    blob = bytearray(zstd(LAYER))
    blob[-2000] ^= 1
    with pytest.raises(SandboxError) as caught:
        unpack(bytes(blob), f"{OCI}+zstd", tmp_path / "t")
    assert caught.value.reason in ("bad_compression", "diff_id_mismatch")


def test_zstd_windows_are_bounded(tmp_path: Path) -> None:
    """A frame may ask for 128 MiB of memory, not for more."""
    blob = zstd(LAYER, window_log=28)
    assert ZSTD_WINDOW < 1 << 28
    with pytest.raises(SandboxError, match="memory") as caught:
        unpack(blob, f"{OCI}+zstd", tmp_path / "t")
    assert caught.value.reason == "bad_compression"
    unpack(zstd(LAYER, window_log=27), f"{OCI}+zstd", tmp_path / "u")


def test_zstd_bombs_end_early(tmp_path: Path) -> None:
    """Expansion is bounded for zstd as for gzip, though one frame of it expands 30,000 times."""
    blob = zstd(build.tar([Entry("zeros", bytes(64 << 20))]))
    assert len(blob) < 10_000
    with pytest.raises(SandboxError, match="expands more than 200 times") as caught:
        unpack(blob, f"{OCI}+zstd", tmp_path / "a", UnpackLimits(ratio_from=1 << 20))
    assert caught.value.reason == "layer_bomb"


def test_an_error_leaves_no_thread(tmp_path: Path) -> None:
    """The thread that reads ahead ends with the layer it reads, also when the tar is refused half way."""
    layer = build.tar([Entry("../out"), Entry("random", os.urandom(20 << 20))])
    before = set(os.listdir("/proc/self/task"))
    with pytest.raises(SandboxError) as caught:
        trees.unpack_bytes(layer, tmp_path / "t")
    assert caught.value.reason == "escape"
    assert set(os.listdir("/proc/self/task")) <= before
