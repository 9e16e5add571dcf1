"""Image references as users write them.

Today one kind is understood, an OCI image layout on disk::

    oci:PATH@sha256:HEX     pinned: the digest of a manifest or of an index in the layout
    oci:PATH:TAG            the entry of index.json with that org.opencontainers.image.ref.name

The end of the text decides. What follows the last ``@sha256:`` is the digest and everything before it the path, so a
path may hold ``:`` and ``@``; without a digest, what follows the last ``:`` is the tag. A tag and a digest at once is
therefore a path that ends in ``:TAG``, and is refused as a missing directory, never read as something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import unsupported

_SCHEME: Final = "oci:"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_PIN: Final = "write oci:PATH@sha256: and the 64 lower-case hex digits of the manifest or index"


def is_digest(text: str) -> bool:
    """Whether `text` is ``sha256:`` and 64 lower-case hex digits, the one form we take."""
    return _DIGEST.match(text) is not None


@dataclass(frozen=True, slots=True)
class ImageReference:
    """One image: a layout's path, and a digest or a tag in it (exactly one of the two)."""

    path: str
    digest: str | None = None
    tag: str | None = None

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        """Read a reference.

        :raises InvalidRequest: for an ``oci:`` reference that is not well formed.
        :raises ExecutorError: UNSUPPORTED, for registries and every other source.
        """
        if not text or _CONTROL.search(text):
            raise InvalidRequest("image", text, _PIN)
        if not text.startswith(_SCHEME):
            raise unsupported(
                "image_source",
                f"image {text[:200]!r} is not an OCI layout on disk",
                details="registries and archives can't be read by this version",
                resolution=f"copy the image into an OCI layout, then {_PIN}",
            )
        return cls._from_layout(text, text.removeprefix(_SCHEME))

    @classmethod
    def _from_layout(cls, text: str, rest: str) -> ImageReference:
        if "@sha256:" in rest:
            path, _, digest = rest.rpartition("@")
            if not path or not is_digest(digest):
                raise InvalidRequest("image", text, _PIN)
            return cls(path, digest=digest)
        path, colon, tag = rest.rpartition(":")
        if not colon or not path or not _TAG.match(tag):
            raise InvalidRequest("image", text, f"{_PIN}, or oci:PATH:TAG where the profile allows tags")
        return cls(path, tag=tag)

    def layout_path(self, base_dir: Path) -> Path:
        """The layout's directory; a relative path is taken from `base_dir` (the job file's, or the caller's)."""
        return base_dir / self.path

    def pinned(self, digest: str) -> str:
        """The same image by digest, as it would be written in a job file."""
        return f"{_SCHEME}{self.path}@{digest}"

    def __str__(self) -> str:
        return self.pinned(self.digest) if self.digest else f"{_SCHEME}{self.path}:{self.tag}"
