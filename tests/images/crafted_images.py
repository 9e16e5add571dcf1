"""Test images written entry by entry: every rule of layers in an image that is legal, and images that are not.

They need no tool, no root and no network to be made.
"""

from __future__ import annotations

import hashlib
import random
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from build import (
    BUSYBOX,
    Entry,
    LayoutWriter,
    busybox_layers,
    folder,
    hardlink,
    machine,
    opaque,
    platform,
    symlink,
    tar,
    whiteout,
)

LARGE_FILES = 10_000
LARGE_BYTES = 200_000_000
CONFIG: Mapping[str, Any] = {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sh"]}

Writer = Callable[[LayoutWriter], Mapping[str, Any]]


def busybox_tree() -> list[bytes]:
    """The two layers of the busybox image."""
    if BUSYBOX is None:
        raise FileNotFoundError("busybox is not installed: apt-get install busybox-static")
    return busybox_layers(BUSYBOX)


def zstd(writer: LayoutWriter) -> Mapping[str, Any]:
    """Busybox with layers that are compressed with zstd."""
    layers = [writer.layer(data, "zstd") for data in busybox_tree()]
    return writer.image(layers, CONFIG, architecture=machine())


def multiarch(writer: LayoutWriter) -> Mapping[str, Any]:
    """An index: an attestation, two foreign architectures that are but stubs, and this machine's busybox last."""
    layers = busybox_tree()
    ours = writer.image(layers, CONFIG, architecture=machine())
    stub = [tar([folder("etc/"), Entry("etc/stub", b"of another architecture\n")])]
    others = [(name, variant) for name, variant in (("arm64", "v8"), ("arm", "v7"), ("amd64", "")) if name != machine()]
    foreign = [
        writer.image(stub, CONFIG, architecture=name, platform=platform(name, variant)) for name, variant in others
    ]
    return writer.index(
        [writer.attestation(ours["digest"]), *foreign, {**ours, "platform": platform(machine())}],
    )


def schema2(writer: LayoutWriter) -> Mapping[str, Any]:
    """Busybox in Docker's media types: a manifest list of one image."""
    image = writer.image(busybox_tree(), CONFIG, architecture=machine(), docker=True)
    return writer.index([{**image, "platform": platform(machine())}], docker=True)


def opaque_layers(writer: LayoutWriter) -> Mapping[str, Any]:
    """Three layers with opaque marks before and after what they hide, whiteouts, and paths that change their type."""
    lowest = [
        *(folder(name) for name in ("first/", "first/deep/", "last/", "gone/", "kept/", "becomes-file/")),
        *(Entry(f"{name}/old", b"old\n") for name in ("first", "first/deep", "last", "gone", "kept", "becomes-file")),
        Entry("becomes-folder", b"a file\n"),
        Entry("becomes-link", b"a file\n"),
        symlink("was-link", "kept/old"),
    ]
    middle = [
        folder("first/", mode=0o700, uid=7),
        opaque("first"),
        Entry("first/new", b"new\n"),
        folder("last/"),
        Entry("last/new", b"new\n"),
        opaque("last"),
        whiteout("gone"),
        whiteout("kept/old"),
        Entry("kept/new", b"new\n"),
        Entry("becomes-file", b"now a file\n"),
        folder("becomes-folder/"),
        Entry("becomes-folder/in", b"in\n"),
        symlink("becomes-link", "/kept/new"),
        Entry("was-link", b"a file of its own\n"),
    ]
    top = [
        folder("gone/", mode=0o711),
        Entry("gone/again", b"again\n"),
        folder("first/"),
        Entry("first/newer", b"newer\n"),
        Entry("twice", b"first\n"),
        Entry("twice", b"last\n", mode=0o600),
    ]
    return writer.image([tar(lowest), tar(middle), tar(top)], CONFIG, architecture=machine())


def hardlinks(writer: LayoutWriter) -> Mapping[str, Any]:
    """Files of up to 1,000 names, with set-user-id, set-group-id and sticky bits among them."""
    entries = [folder("many/"), Entry("many/0", b"one inode\n", mode=0o4755, uid=3, gid=4)]
    entries += [hardlink(f"many/{number}", "many/0", mode=0o4755, uid=3, gid=4) for number in range(1, 1000)]
    entries += [folder("pairs/", mode=0o3775, gid=50)]
    for number in range(100):
        entries.append(Entry(f"pairs/a{number}", b"%d\n" % number, mode=0o2644 + 0o100 * (number % 2), uid=number))
        entries.append(hardlink(f"pairs/b{number}", f"pairs/a{number}", mode=0o2644 + 0o100 * (number % 2), uid=number))
    return writer.image([tar(entries)], CONFIG, architecture=machine())


# Linux, linux/capability.h: revision 2 of the attribute; the effective bit, CAP_NET_RAW permitted.
_NET_RAW = b"\x01\x00\x00\x02" + (1 << 13).to_bytes(4, "little") + bytes(12)


def xattrs(writer: LayoutWriter) -> Mapping[str, Any]:
    """Attributes that users and programs set: text, bytes, a file capability, and the same on a directory."""
    text = {"SCHILY.xattr.user.note": "plain text", "SCHILY.xattr.user.empty-ish": " "}
    capability = {"SCHILY.xattr.security.capability": _NET_RAW.decode("utf-8", "surrogateescape")}
    entries = [
        folder("folder/", pax={"SCHILY.xattr.user.on": "a directory"}),
        Entry("folder/text", b"text\n", pax=text),
        Entry("folder/bytes", b"bytes\n", pax={"SCHILY.xattr.user.bytes": "\u00e9\u4e16 = \n"}),
        Entry("folder/ping", b"#!/bin/sh\n", mode=0o755, pax=capability),
        Entry("folder/owned", b"owned\n", mode=0o755, uid=1000, gid=1000, pax=capability),
        hardlink("folder/text-too", "folder/text"),
    ]
    return writer.image([tar(entries)], CONFIG, architecture=machine())


def sparse_entry(name: str, pieces: Sequence[tuple[int, bytes]], size: int) -> Entry:
    """A file with holes, in GNU's format 1.0: the map first, in a block of its own, then the pieces."""
    numbers = [len(pieces), *(number for offset, data in pieces for number in (offset, len(data)))]
    table = "".join(f"{number}\n" for number in numbers).encode()
    table += bytes(-len(table) % tarfile.BLOCKSIZE)
    words = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
    return Entry(f"GNUSparseFile.0/{name}", table + b"".join(data for _, data in pieces), pax=words)


def sparse(writer: LayoutWriter) -> Mapping[str, Any]:
    """Files with holes at their start, in the middle, at the end, and nothing else."""
    block = bytes(range(1, 256)) * 17
    entries = [
        sparse_entry("start", [(1 << 20, block)], (1 << 20) + len(block)),
        sparse_entry("middle", [(0, block), (4 << 20, block)], (4 << 20) + len(block)),
        sparse_entry("end", [(0, block)], 2 << 20),
        sparse_entry("nothing", [], 1 << 20),
    ]
    return writer.image([tar(entries)], CONFIG, architecture=machine())


def odd_names(writer: LayoutWriter) -> Mapping[str, Any]:
    """Long, deep and strange names, times with fractions and before 1970, large ids, and symlinks to anywhere."""
    deep = "/".join(f"level-{number:02}-{'x' * 40}" for number in range(40))
    entries = [
        Entry("n" * 255, b"the longest name\n"),
        *(folder("/".join(deep.split("/")[: depth + 1]) + "/") for depth in range(40)),
        Entry(f"{deep}/file", b"deep\n"),
        *(Entry(name, name.encode("utf-8", "surrogateescape")) for name in _STRANGE),
        Entry("fraction", b"", pax={"mtime": "1600000000.123456789"}),
        Entry("before", b"", mtime=-86400),
        Entry("ids", b"", uid=65535, gid=65534, mode=0o000),
        symlink("absolute", "/etc/../../outside"),
        symlink("dangling", "../../../../nowhere"),
        symlink("long", "t" * 1000),
        symlink("owned", "ids", uid=12, gid=13),
        folder("closed/", mode=0o000),
        Entry("closed/inside", b"inside\n"),
        Entry("empty"),
    ]
    return writer.image([tar(entries)], CONFIG, architecture=machine())


_STRANGE = (
    " ",
    "a b",
    "new\nline",
    "tab\t",
    "back\\slash",
    "c:o,l=o'n\"",
    "-rf",
    "*",
    "\u00e9\u4e16\u754c",
    ".wh",
    "..x",
)


def large(writer: LayoutWriter) -> Mapping[str, Any]:
    """200 MB in 10,000 files, in four layers that compress to about 60%: what the benchmark pulls."""
    return writer.image([tar(_large_layer(number)) for number in range(4)], CONFIG, architecture=machine())


def _large_layer(number: int) -> Iterator[Entry]:
    source = random.Random(number)
    # Alternating noise and words: programs and texts compress about as well.
    pool = b"".join(source.randbytes(560) + b"the words of a text %d " % source.randrange(9) * 20 for _ in range(8000))
    weights = [source.lognormvariate(0, 1.6) for _ in range(LARGE_FILES // 4)]
    unit = LARGE_BYTES / 4 / sum(weights)
    yield folder(f"layer-{number}/")
    for index, weight in enumerate(weights):
        if index % 50 == 0:
            yield folder(f"layer-{number}/{index // 50:02}/")
        size, start = int(weight * unit), source.randrange(len(pool) // 2)
        data = pool[start : start + size]
        while len(data) < size:
            data += pool[: size - len(data)]
        yield Entry(f"layer-{number}/{index // 50:02}/file-{index}", data, mode=0o755 if index % 9 == 0 else 0o644)


def _refused(*entries: Entry) -> Writer:
    return lambda writer: writer.image([tar(entries)], CONFIG, architecture=machine())


def _wrong_diff_id(writer: LayoutWriter) -> Mapping[str, Any]:
    layer = writer.layer(tar([Entry("file", b"another than the config says\n")]))
    wrong = type(layer)(layer.blob, f"sha256:{hashlib.sha256(b'something else').hexdigest()}")
    return writer.image([wrong], CONFIG, architecture=machine())


CRAFTED: Mapping[str, Writer] = {
    "zstd": zstd,
    "multiarch": multiarch,
    "schema2": schema2,
    "opaque": opaque_layers,
    "hardlinks": hardlinks,
    "xattrs": xattrs,
    "sparse": sparse,
    "names": odd_names,
    "large": large,
}
"""Images that are legal."""

HOSTILE: Mapping[str, Writer] = {
    "hostile-parent": _refused(Entry("../../escaped", b"out\n")),
    "hostile-symlink": _refused(symlink("way", "/tmp"), Entry("way/../../escaped", b"out\n")),
    "hostile-hardlink": _refused(hardlink("shadow", "../../../etc/shadow")),
    "hostile-diff-id": _wrong_diff_id,
}
"""Images that a registry keeps and no store may unpack."""


def crafted(name: str, path: Path) -> str:
    """Write the layout of an image of this module; the digest of what it names."""
    writer = LayoutWriter(path)
    root = {**CRAFTED, **HOSTILE}[name](writer)
    writer.finish(root)
    return str(root["digest"])
