"""Images in registries and stores, for the tests of the image store."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
from bad_registry import BadRegistry
from registry_clients import settings

from forgeyard_oci.image_platform import Platform
from forgeyard_oci.image_store import ImageStore

AMD64 = Platform.parse("linux/amd64")


@dataclass(frozen=True)
class Served:
    """An image in a registry: its repository, its digest, and the layout it was made in."""

    repository: str
    digest: str
    layout: Path

    @property
    def pinned(self) -> str:
        """The reference by digest."""
        return f"{self.repository}@{self.digest}"

    def blob(self, digest: str) -> bytes:
        """One blob's bytes."""
        return (self.layout / "blobs" / digest.replace(":", "/")).read_bytes()

    @property
    def manifest(self) -> Any:
        """The document it names."""
        return json.loads(self.blob(self.digest))


def serve(registry: BadRegistry, writer: Any, image: Any, *tags: str) -> Served:
    """Put everything of a layout into `registry`, `image` under `tags`."""
    for path in sorted((writer.path / "blobs/sha256").iterdir()):
        data = path.read_bytes()
        registry.add_blob(data)
        document = json.loads(data) if data[:1] == b"{" else {}
        if "manifests" in document or "layers" in document:
            registry.add_manifest(data, media_type=document["mediaType"])
    for tag in tags:
        registry.manifests[tag] = registry.manifests[image["digest"]]
    return Served(f"{registry.host}/team/app", image["digest"], writer.path)


def layers(count: int, size: int = 2000) -> list[bytes]:
    """Layers that differ, each of one file of random bytes, so that no compression makes them small."""
    return [build.tar([build.folder("d"), build.Entry(f"d/f{n}", os.urandom(size))]) for n in range(count)]


def open_store(root: Path) -> ImageStore:
    """A store for amd64, whatever runs the test, that knows nothing of this machine's registries."""
    return ImageStore(root, host=AMD64, settings=lambda: settings(root.parent))


def contents(plan: Any) -> dict[str, bytes]:
    """The files that a plan's trees show: the upper ones before the lower, and no whiteouts."""
    found: dict[str, bytes | None] = {}
    for lower in plan.lowers:
        for folder, _, files in os.walk(lower):
            for name in files:
                path = Path(folder, name)
                data = None if path.is_char_device() else path.read_bytes()
                found.setdefault(os.path.relpath(path, lower), data)
    return {name: data for name, data in found.items() if data is not None}


_CHILD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from registry_images import open_store
store = open_store(Path(sys.argv[1]))
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
plan = store.prepare(sys.argv[2], None, Path(sys.argv[3]))
hold = store.hold(plan)
sys.stdout.write("done\\n"); sys.stdout.flush()
sys.stdin.readline()
"""


def preparing(store: ImageStore, reference: str, base: Path) -> subprocess.Popen[str]:
    """A process that prepares and holds an image once a line comes on its stdin, and ends after another."""
    here = Path(__file__).resolve().parent
    command = [
        sys.executable,
        "-c",
        _CHILD,
        str(store.root),
        reference,
        str(base),
        str(here),
        str(here.parent / "images"),
    ]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def go(child: subprocess.Popen[str]) -> None:
    """Send the line that a child waits for."""
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


_CONFIG = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def real_registry(folder: Path) -> Iterator[str]:
    """Run docker-registry with an empty store; its host and port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "registry.yml"
    config.write_text(_CONFIG.format(root=folder / "registry", port=port))
    program = shutil.which("docker-registry") or "docker-registry"
    server = subprocess.Popen([program, "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        yield f"localhost:{port}"
    finally:
        server.kill()
        server.wait()


def _wait_for_port(port: int, within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "docker-registry did not start"
            time.sleep(0.01)  # nothing announces that it listens
        else:
            return


def leftovers(store: ImageStore) -> Sequence[str]:
    """What is in the folders of things in progress."""
    folders = ("ingest", "partial", "claims", "trash")
    return [f"{name}/{entry}" for name in folders for entry in os.listdir(store.root / name)]
