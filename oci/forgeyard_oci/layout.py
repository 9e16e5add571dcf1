"""An OCI image layout on disk (image spec, image-layout): reads blobs and believes none before its digest agrees."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import host_failure, refused
from forgeyard_oci.image_manifest import MAX_MANIFEST, Descriptor, Index, parse_json
from forgeyard_oci.reference import REF_NAME, sha256

_SMALL = 64 << 10


class ImageLayout:
    """A layout's directory. Nothing of it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Refuse a directory that is no layout of version 1.

        :raises SandboxError: says what is missing.
        """
        data = self._read_file("oci-layout", _SMALL, "not_a_layout")
        if b"imageLayoutVersion" not in data or b'"1.' not in data:
            raise refused("not_a_layout", f"{self.path} is not an OCI image layout of version 1")

    def index(self) -> Index:
        """The layout's index.json, the one file that no digest covers."""
        return parse_json(Index, self._read_file("index.json", MAX_MANIFEST, "not_a_layout"), f"{self.path}/index.json")

    def tagged(self, tag: str) -> Descriptor:
        """The entry of index.json that carries `tag`.

        :raises SandboxError: when none does, or several do that differ.
        """
        entries = self.index().manifests
        found = {entry.digest: entry for entry in entries if entry.annotation(REF_NAME) == tag}
        if len(found) != 1:
            tags = ", ".join(sorted({name for entry in entries if (name := entry.annotation(REF_NAME))})) or "none"
            problem = "more than one image" if found else "no image"
            raise refused("unknown_tag", f"{self.path} has {problem} tagged {tag!r}", details=f"tags: {tags[:500]}")
        return next(iter(found.values()))

    def read(self, digest: str, *, size: int | None = None) -> bytes:
        """A manifest, index or config, whole and verified. `size`: what the descriptor said, None when nobody did.

        :raises SandboxError: missing, over 4 MiB, of the wrong size, or not of that digest.
        """
        if size is not None and size > MAX_MANIFEST:
            raise refused("manifest_too_large", f"{digest} is said to have {size} bytes", details="the limit is 4 MiB")
        data = self._read_file(_blob_name(digest), MAX_MANIFEST, "missing_blob")
        if size is not None and len(data) != size:
            raise refused("size_mismatch", f"{digest} has {len(data)} bytes, its descriptor says {size}")
        if (actual := sha256(data)) != digest:
            raise refused("digest_mismatch", f"blob {digest} has other contents", details=f"they hash to {actual}")
        return data

    def manifest(self, digest: str, size: int | None) -> bytes:
        """See Documents of image_resolve."""
        return self.read(digest, size=size)

    def config(self, descriptor: Descriptor) -> bytes:
        """See Documents of image_resolve."""
        return self.read(descriptor.digest, size=descriptor.size)

    def open_blob(self, descriptor: Descriptor) -> int:
        """A descriptor of a layer's blob, not yet verified: that happens while it streams. The caller closes it.

        :raises SandboxError: missing, not a regular file, or not of the size the manifest says.
        """
        fd = self._open(_blob_name(descriptor.digest), "missing_blob")
        size = os.fstat(fd).st_size
        if size != descriptor.size:
            os.close(fd)
            word = "truncated" if size < descriptor.size else "size_mismatch"
            raise refused(word, f"layer {descriptor.digest} has {size} of {descriptor.size} bytes")
        return fd

    def _open(self, name: str, reason: str) -> int:
        path = self.path / name
        try:
            # Non-blocking, so that a FIFO in a blob's place can't hang us. Links are followed: build systems make
            # layouts of them, and contents are held to their digest anyway.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._missing(name, reason) from error
        except OSError as error:
            raise host_failure(error, "reading an image", str(path)) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise refused(reason, f"{path} is not a regular file")
        return fd

    def _missing(self, name: str, reason: str) -> SandboxError:
        if reason == "missing_blob":
            return refused(reason, f"{self.path} has no blob {name}", resolution="copy the image again, in full")
        return refused(reason, f"{self.path} is not an OCI image layout", details=f"it has no {name}")

    def _read_file(self, name: str, limit: int, reason: str) -> bytes:
        fd = self._open(name, reason)
        with os.fdopen(fd, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise refused("manifest_too_large", f"{self.path}/{name} is larger than {limit} bytes")
        return data


def _blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/', 1)}"
