"""Writes OCI image layouts for tests, without a registry: deterministic, and cached by the recipe's hash.

Run as a program it builds one of the images that image_catalog names, and prints its reference::

    python tests/images/build.py NAME DIRECTORY      the layout of NAME, in DIRECTORY
    python tests/images/build.py all                 everything, into the cache that the tests use
    python tests/images/build.py list                the names
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
_VERSION = 3  # of this builder; part of every recipe
UNUSED_FOR = 30 * 86400
"""Seconds after which an image that nothing used is dropped from the cache, when another of its name is built."""
BUSYBOX = next((path for path in ("/usr/bin/busybox", "/bin/busybox") if os.path.exists(path)), None)


@dataclass(frozen=True)
class Entry:
    """One tar member. `type` is tarfile's; `pax` goes into a pax header as it is."""

    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    link: str = ""
    mtime: int = 1_700_000_000
    pax: Mapping[str, str] = field(default_factory=dict)
    device: tuple[int, int] = (0, 0)


def folder(name: str, mode: int = 0o755, **rest: Any) -> Entry:
    """A directory."""
    return Entry(name, type=tarfile.DIRTYPE, mode=mode, **rest)


def symlink(name: str, target: str, **rest: Any) -> Entry:
    """A symbolic link."""
    return Entry(name, type=tarfile.SYMTYPE, link=target, mode=0o777, **rest)


def hardlink(name: str, target: str, **rest: Any) -> Entry:
    """A hard link."""
    return Entry(name, type=tarfile.LNKTYPE, link=target, **rest)


def whiteout(name: str) -> Entry:
    """A whiteout of `name` in the layers below."""
    head, _, tail = name.rpartition("/")
    return Entry(f"{head}/.wh.{tail}" if head else f".wh.{tail}")


def opaque(name: str) -> Entry:
    """The mark that hides what lower layers have in directory `name`."""
    return Entry(f"{name}/.wh..wh..opq" if name else ".wh..wh..opq")


def tar(entries: Iterable[Entry]) -> bytes:
    """An uncompressed layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.uid, info.gid = entry.type, entry.mode, entry.uid, entry.gid
            info.linkname, info.mtime, info.size = entry.link, entry.mtime, len(entry.data)
            info.pax_headers = dict(entry.pax)
            info.devmajor, info.devminor = entry.device
            archive.addfile(info, io.BytesIO(entry.data))
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    """The digest of `data` as OCI writes it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Layer:
    """A stored layer: its descriptor, and the digest of its uncompressed tar."""

    blob: Mapping[str, Any]
    diff_id: str


def _zstd(data: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=3).compress(data))


_COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "gzip": lambda data: gzip.compress(data, 6, mtime=0),
    "zstd": _zstd,
}


class LayoutWriter:
    """Writes blobs and documents into a layout directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        (path / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def blob(self, data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        """Store `data`; its descriptor."""
        digest = sha256(data)
        (self.path / "blobs/sha256" / digest.partition(":")[2]).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data), **more}

    def json(self, document: Mapping[str, Any], media_type: str, **more: Any) -> dict[str, Any]:
        """Store a document; its descriptor."""
        return self.blob(json.dumps(document, sort_keys=True).encode(), media_type, **more)

    def layer(self, data: bytes, compression: str = "gzip", *, docker: bool = False) -> Layer:
        """Store an uncompressed layer as "gzip", "zstd", or "" for plain."""
        packed = _COMPRESSORS[compression](data)
        media_type = f"{DOCKER}.image.rootfs.diff.tar" if docker else f"{OCI}.layer.v1.tar"
        suffix = compression and ("." if docker else "+") + compression
        return Layer(self.blob(packed, media_type + suffix), sha256(data))

    def adopt(self, layer: Layer, layout: Path) -> Layer:
        """Share a layer of another layout of the same file system, without a copy."""
        name = f"blobs/sha256/{layer.blob['digest'].partition(':')[2]}"
        if not (self.path / name).exists():
            os.link(layout / name, self.path / name)
        return layer

    def image(
        self,
        layers: Sequence[bytes | Layer],
        config: Mapping[str, Any] | None = None,
        *,
        architecture: str = "amd64",
        compress: bool = True,
        docker: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        """Store an image of layers, lowest first, stored already or uncompressed; its manifest's descriptor."""
        compression = "gzip" if compress else ""
        stored = [item if isinstance(item, Layer) else self.layer(item, compression, docker=docker) for item in layers]
        file = {
            "architecture": architecture,
            "os": "linux",
            "config": dict(config or {}),
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in stored]},
        }
        config_type = f"{DOCKER}.container.image.v1+json" if docker else f"{OCI}.config.v1+json"
        media_type = f"{DOCKER}.distribution.manifest.v2+json" if docker else f"{OCI}.manifest.v1+json"
        manifest = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": self.json(file, config_type),
            "layers": [layer.blob for layer in stored],
        }
        return self.json(manifest, media_type, **more)

    def index(self, entries: Sequence[Mapping[str, Any]], *, docker: bool = False, **more: Any) -> dict[str, Any]:
        """Store an index; its descriptor."""
        media_type = f"{DOCKER}.distribution.manifest.list.v2+json" if docker else f"{OCI}.index.v1+json"
        document = {"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries)}
        return self.json(document, media_type, **more)

    def attestation(self, subject: str) -> dict[str, Any]:
        """Store a build attestation for `subject`, as builders put it beside an image; its descriptor."""
        statement = self.blob(b'{"_type":"https://in-toto.io/Statement/v0.1"}', "application/vnd.in-toto+json")
        config = {
            "architecture": "unknown",
            "os": "unknown",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": []},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": self.json(config, f"{OCI}.config.v1+json"),
            "layers": [statement],
        }
        return self.json(
            manifest,
            f"{OCI}.manifest.v1+json",
            platform={"os": "unknown", "architecture": "unknown"},
            annotations={
                "vnd.docker.reference.type": "attestation-manifest",
                "vnd.docker.reference.digest": subject,
            },
        )

    def finish(self, *roots: Mapping[str, Any]) -> None:
        """Write index.json."""
        index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": list(roots)}
        (self.path / "index.json").write_text(json.dumps(index, sort_keys=True))


def platform(architecture: str, variant: str = "") -> dict[str, str]:
    """The platform words of an index entry."""
    words = {"os": "linux", "architecture": architecture}
    return {**words, "variant": variant} if variant else words


BUSYBOX_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "latest": {
        "Env": ["PATH=/usr/bin:/bin", "IMAGE=busybox"],
        "Cmd": ["sh"],
        "WorkingDir": "/",
    },
    "app": {
        "Env": ["PATH=/usr/bin:/bin", "APP_HOME=/srv/app"],
        "Entrypoint": ["/srv/entrypoint.sh"],
        "Cmd": ["default"],
        "User": "app",
        "WorkingDir": "/srv/app",
    },
    "numeric": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/echo", "hello"], "User": "1000:1000"},
}
_ACCOUNTS = (
    b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:App:/home/app:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
)
_GROUPS = b"root:x:0:\napp:x:1000:\nextra:x:2000:app\nnogroup:x:65534:\n"


def busybox_layers(program: str) -> list[bytes]:
    """Two layers: a working busybox tree, then one that deletes, hides and replaces parts of it."""
    applets = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    lowest = [
        folder("./"),
        *(folder(name) for name in ("bin/", "etc/", "home/", "root/", "srv/", "srv/data/", "usr/", "usr/bin/", "var/")),
        folder("home/app/", uid=1000, gid=1000),
        folder("tmp/", mode=0o1777),
        *(folder(name) for name in ("proc/", "sys/", "dev/", "work/")),
        Entry("bin/busybox", Path(program).read_bytes(), mode=0o755),
        *(hardlink(f"bin/{name}", "bin/busybox", mode=0o755) for name in sorted(set(applets) - {"busybox"})),
        symlink("usr/bin/env", "/bin/env"),
        Entry("etc/passwd", _ACCOUNTS),
        Entry("etc/group", _GROUPS),
        Entry("etc/removed", b"the second layer deletes this\n"),
        Entry("srv/data/old", b"the second layer hides this\n"),
    ]
    upper = [
        folder("etc/"),
        whiteout("etc/removed"),
        folder("srv/"),
        folder("srv/app/", uid=1000, gid=1000),
        Entry("srv/app/hello.txt", b"hello from the image\n", uid=1000, gid=1000),
        Entry("srv/entrypoint.sh", b'#!/bin/sh\necho "entry: $*"\nexec "$@"\n', mode=0o755),
        folder("srv/data/"),
        Entry("srv/data/new", b"kept\n"),
        opaque("srv/data"),
    ]
    return [tar(lowest), tar(upper)]


def busybox_layout(cache: Path) -> tuple[Path, str]:
    """A layout of busybox images: its path, and the digest of the index that ``latest`` names.

    Tags: latest (an index: an attestation, arm64, amd64), app and numeric (manifests). Needs busybox-static.
    """
    if BUSYBOX is None:
        raise FileNotFoundError("busybox is not installed: apt-get install busybox-static")
    recipe = sha256(Path(__file__).read_bytes() + Path(BUSYBOX).read_bytes() + bytes([_VERSION]))

    def build(path: Path) -> str:
        writer = LayoutWriter(path)
        layers = busybox_layers(BUSYBOX)
        images = {tag: writer.image(layers, config, architecture=machine()) for tag, config in BUSYBOX_CONFIGS.items()}
        other = "arm64" if machine() != "arm64" else "amd64"
        foreign = writer.image(layers[1:], architecture=other, platform=platform(other))
        index = writer.index(
            [
                writer.attestation(images["latest"]["digest"]),
                foreign,
                {**images["latest"], "platform": platform(machine())},
            ]
        )
        names = {**images, "latest": index}
        writer.finish(
            *({**entry, "annotations": {"org.opencontainers.image.ref.name": tag}} for tag, entry in names.items())
        )
        return str(index["digest"])

    return cached(cache, "busybox", recipe, build)


def cached(cache: Path, name: str, recipe: str, build: Callable[[Path], str]) -> tuple[Path, str]:
    """Run `build` once for a recipe; it writes into a directory and returns the image's digest.

    Several processes may ask at once: one builds, the others wait for it. Only a finished image gets its name.
    """
    path = cache / f"{name}-{recipe.partition(':')[2][:16]}"
    mark = path / "built-digest"
    if not mark.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{path.name}.lock"):
            if not mark.exists():
                _build(path, build)
                _drop_unused(cache, name, path)
    os.utime(mark)
    return path, mark.read_text()


def _build(path: Path, build: Callable[[Path], str]) -> None:
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        (work / "built-digest").write_text(build(work))
        work.rename(path)
    except BaseException:
        shutil.rmtree(work)
        raise


def _drop_unused(cache: Path, name: str, current: Path) -> None:
    for mark in cache.glob(f"{name}-{'?' * 16}/built-digest"):
        if mark.parent != current and time.time() - mark.stat().st_mtime > UNUSED_FOR:
            shutil.rmtree(mark.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, across processes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def machine() -> str:
    """This machine's architecture, in the words of image configs."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


if __name__ == "__main__":
    from image_catalog import main

    main(sys.argv[1:])
