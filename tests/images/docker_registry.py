"""The real registry of a test run: one docker-registry process, started once, whose storage goes with it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from build import locked

PROGRAM = "docker-registry"
START = 20.0
"""Seconds that the registry may take to listen, on a machine that is busy with tests."""
_REF_NAME = "org.opencontainers.image.ref.name"
_CONFIG = """\
version: 0.1
log: {{level: info, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}/storage}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:0", secret: none}}
"""


class RegistryProcess:
    """Starts docker-registry, and leaves the waiting to whoever needs it. Gone with its starter, however that ends."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fy-registry-", dir="/var/tmp"))
        config = self.directory / "config.yml"
        config.write_text(_CONFIG.format(root=self.directory))
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", PROGRAM, "serve", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Not of a terminal's group: an interrupt ends the tests first, and they end the registry.
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it, and remove what it kept."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory)


class Registry:
    """The registry as tests see it. Plain HTTP, no authentication, on the loopback.

    :param directory: of RegistryProcess, which may have been started by another process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = _port(directory / "log")
        self.host = f"localhost:{self.port}"
        self.address = f"127.0.0.1:{self.port}"

    def push(self, layout: Path, tag: str, name: str) -> str:
        """Store what `tag` names in a layout, or the only thing in it, as NAME:TAG; its pinned reference.

        Blobs are laid where the registry keeps them, for sending 100 MB in every test run costs seconds. Manifests
        are sent: the registry itself checks that it has all they name. Digests stay what they are.
        """
        root = _root(layout, tag)
        self._push(layout, name, root, tag)
        return f"{self.host}/{name}@{root['digest']}"

    def push_once(self, layout: Path, tag: str, name: str) -> str:
        """As `push`, but once in a test run, whichever worker comes first."""
        mark = self.directory / f"pushed-{name.replace('/', '+')}:{tag}"
        with locked(self.directory / "lock"):
            if not mark.exists():
                mark.write_text(self.push(layout, tag, name))
        return mark.read_text()

    def blob_path(self, digest: str) -> Path:
        """Where the registry keeps a blob."""
        hexadecimal = digest.partition(":")[2]
        return self.directory / "storage/docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"

    def _push(self, layout: Path, name: str, descriptor: dict[str, Any], which: str) -> None:
        data = _blob(layout, descriptor["digest"]).read_bytes()
        document = json.loads(data)
        for child in document.get("manifests", ()):
            self._push(layout, name, child, child["digest"])
        if "config" in document:
            for blob in (document["config"], *document["layers"]):
                self._lay(layout, name, blob["digest"])
        self._put(f"/v2/{name}/manifests/{which}", data, descriptor["mediaType"])

    def _lay(self, layout: Path, name: str, digest: str) -> None:
        target = self.blob_path(digest)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            work = target.with_name(f"data-{os.getpid()}")
            # A copy: a test that damages a registry's blob must not damage the cache of images.
            shutil.copyfile(_blob(layout, digest), work)
            work.rename(target)
        repositories = self.directory / "storage/docker/registry/v2/repositories"
        link = repositories / name / "_layers/sha256" / digest.partition(":")[2] / "link"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.write_text(digest)

    def _put(self, path: str, data: bytes, media_type: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("PUT", path, data, {"Content-Type": media_type})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 201:
            raise RuntimeError(f"the registry refused {path}: {response.status} {body.decode(errors='replace')[:500]}")


def _port(log: Path) -> int:
    """The port of a registry that was started, once it listens."""
    deadline = time.monotonic() + START
    while not (found := re.search(r"listening on 127\.0\.0\.1:(\d+)", text := log.read_text())):
        if time.monotonic() > deadline or "fatal" in text:
            raise RuntimeError(f"docker-registry did not start:\n{text[-1000:]}")
        # The port is the kernel's choice, and known from this file alone.
        time.sleep(0.01)
    return int(found[1])


def _root(layout: Path, tag: str) -> dict[str, Any]:
    entries = json.loads((layout / "index.json").read_text())["manifests"]
    named = [entry for entry in entries if entry.get("annotations", {}).get(_REF_NAME) == tag]
    if len(named or entries) != 1:
        raise ValueError(f"{layout}: {len(entries)} entries, and not one of them is {tag}")
    return dict((named or entries)[0])


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs/sha256" / digest.partition(":")[2]
