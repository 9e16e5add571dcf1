"""Targets of the coverage-guided fuzzer: what reads bytes from outside, and must answer with errors of ours alone.

``python tests/fuzz/fuzz_targets.py TARGET [DIRECTORY...] [-max_total_time=SECONDS]`` is libFuzzer's own command line;
the first directory collects inputs that reach something new.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["forgeyard_oci"]):
    from forgeyard_oci.image_config import ImageConfig
    from forgeyard_oci.image_manifest import ConfigFile, parse_json, parse_manifest
    from forgeyard_oci.reader_channel import Channel, ChannelError
    from forgeyard_oci.reader_worker import plain_document
    from forgeyard_oci.reference import parse_reference
    from forgeyard_oci.registry.challenge import parse_challenges
    from forgeyard_oci.tree_records import check_tree
    from forgeyard_oci.unpack import unpack_layer
    from forgeyard_oci.unpack_decode import gunzip, unzstd
    from forgeyard_oci.unpack_limits import UnpackLimits
    from forgeyard_oci.unpack_merged import MergedTree
    from forgeyard_oci.unpack_stream import LayerStream

import hashlib
import socket

from forgeyard_model.errors import ForgeyardError

DIGEST = "sha256:" + "0" * 64
LIMITS = UnpackLimits(entries=200, expanded=8 << 20, ratio_from=1 << 20, header=64 << 10)
WORK = Path(tempfile.mkdtemp(prefix="fuzz-"))


def reference(data: bytes) -> None:
    """An image reference, as a user writes it."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        parsed = parse_reference(text)
    except ForgeyardError as error:
        _check(str(error).isprintable(), "a message that a terminal would obey")
        return
    _check(str(parse_reference(str(parsed))) == str(parsed), "another meaning once written out")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def challenges(data: bytes) -> None:
    """WWW-Authenticate headers, as a registry sends them."""
    parse_challenges(data.decode("latin-1").split("\n"))


def manifest(data: bytes) -> None:
    """A manifest or an index, by way of the confined process and not."""
    for read in (lambda: data, lambda: plain_document(data, "manifest")):
        try:
            parse_manifest(read(), "", DIGEST)
        except ForgeyardError:
            continue


def config(data: bytes) -> None:
    """An image's config."""
    try:
        ImageConfig.read(parse_json(ConfigFile, plain_document(data, "config"), "config"))
    except ForgeyardError:
        return


def gzip(data: bytes) -> None:
    """A blob that says it is gzip."""
    _decode(gunzip, data)


def zstd(data: bytes) -> None:
    """A blob that says it is zstd."""
    _decode(unzstd, data)


def _decode(decoder: Callable[..., object], data: bytes) -> None:
    total = 0
    try:
        for piece in decoder(iter([data[:100], data[100:]]) if len(data) > 100 else iter([data]), DIGEST):  # type: ignore[attr-defined]  # an iterator
            total += len(piece)
            if total > LIMITS.expanded:
                break
    except ForgeyardError:
        return


def messages(data: bytes) -> None:
    """What a process that was taken over sends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        try:
            while True:
                Channel(ours).receive(idle=1)
        except ChannelError:
            return


def layer(data: bytes) -> None:
    """Two layers, the second over the first, unpacked whole; nothing beside their trees may change."""
    outside = WORK / "outside"
    if not outside.exists():
        outside.mkdir()
        (outside / "secret").write_text("secret")
        os.utime(outside, (1, 1))
    half = len(data) // 1024 * 512
    trees: list[str] = []
    try:
        for number, part in enumerate((data[:half], data[half:])):
            tree = WORK / f"t{number}"
            tree.mkdir()
            _unpack(with_checksums(part), tree, trees)
            trees.insert(0, str(tree))
    except ForgeyardError:
        pass
    finally:
        for number in range(2):
            shutil.rmtree(WORK / f"t{number}", ignore_errors=True)
    status = os.stat(outside / "secret")
    assert os.listdir(outside) == ["secret"]
    assert (status.st_nlink, status.st_uid, status.st_size, os.stat(outside).st_mtime) == (1, 0, 6, 1)
    assert set(os.listdir(WORK)) <= {"outside", "blob", "records"}


def _unpack(data: bytes, tree: Path, lowers: list[str]) -> None:
    (WORK / "blob").write_bytes(data)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    fd = os.open(WORK / "blob", os.O_RDONLY)
    try:
        with (WORK / "records").open("wb") as records:
            media_type = "application/vnd.oci.image.layer.v1.tar"
            stream = LayerStream(
                fd, media_type=media_type, digest=digest, size=len(data), diff_id=digest, limits=LIMITS
            )
            unpack_layer(stream, str(tree), MergedTree(lowers), LIMITS, records.fileno())
    finally:
        os.close(fd)
    assert check_tree(tree, WORK / "records") == []


def with_checksums(data: bytes) -> bytes:
    """The tar with every block's checksum made right where it may be a header: no mutation would get past it."""
    blocks = bytearray(data)
    for at in range(0, len(blocks) - 511, 512):
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = f"{sum(blocks[at : at + 512]):06o}\0 ".encode()
    return bytes(blocks)


TARGETS = (reference, challenges, manifest, config, gzip, zstd, messages, layer)


def main() -> None:
    """Run one target until libFuzzer's time is over, or an input breaks it."""
    names = {target.__name__: target for target in TARGETS}
    target = names[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
