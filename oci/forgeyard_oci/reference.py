"""Image references as users write them: an OCI image layout on disk, or a repository of a registry.

::

    oci:PATH@sha256:HEX             pinned: the digest of a manifest or of an index in the layout
    oci:PATH:TAG                    the entry of index.json with that org.opencontainers.image.ref.name
    [HOST[:PORT]/]NAME[:TAG][@sha256:HEX]       docker.io, ``library/`` and ``latest`` where nothing else is said

In a layout reference the end of the text decides. What follows the last ``@sha256:`` is the digest and everything
before it the path, so a path may hold ``:`` and ``@``; without a digest, what follows the last ``:`` is the tag. A tag
and a digest at once is therefore a path that ends in ``:TAG``, and is refused as a missing directory.

A registry reference follows the grammar of the distribution project. With a tag and a digest the digest alone decides
what is pulled; the tag is kept to be shown.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import unsupported

DEFAULT_REGISTRY: Final = "docker.io"
DEFAULT_TAG: Final = "latest"
MAX_REPOSITORY: Final = 255
_MAX_HOST: Final = 255
_MAX_TEXT: Final = 4096
_OFFICIAL: Final = "library/"
_HUB_NAMES: Final = frozenset({DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}"})

REF_NAME: Final = "org.opencontainers.image.ref.name"
"""The annotation of an entry of index.json that holds its tag, or in our own store its whole name."""

_SCHEME: Final = "oci:"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_ANY_DIGEST: Final = re.compile(r"([A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*):[0-9a-fA-F]{32,}\Z")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*\Z")
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[([0-9A-Fa-f:.]+)\])(?::([0-9]{{1,5}}))?\Z")
_IMAGE_ID: Final = re.compile(r"[0-9a-f]{64}\Z")
_USER_INFO: Final = re.compile(r"\A((?:[a-z]+://)?)[^@]*:.*@(?![A-Za-z][A-Za-z0-9+._-]*:[0-9A-Fa-f]{6,}\Z)")
# Words of other tools for places that are no registry.
_TRANSPORT: Final = re.compile(
    r"(docker-archive|oci-archive|dir|docker-daemon|containers-storage|ostree|sif|tarball|docker|https?):/"
)
_PIN: Final = "write oci:PATH@sha256: and the 64 lower-case hex digits of the manifest or index"


def is_digest(text: str) -> bool:
    """Whether `text` is ``sha256:`` and 64 lower-case hex digits, the one form we take."""
    return _DIGEST.match(text) is not None


def sha256(data: bytes) -> str:
    """``sha256:`` and the hash of `data`, as OCI writes digests."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_registry_host(text: str) -> bool:
    """Whether `text` is ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT`` as a reference may name it."""
    found = _HOST.match(text) if len(text) <= _MAX_HOST else None
    if found is None or (found[2] is not None and not 0 < int(found[2]) < 1 << 16):
        return False
    return found[1] is None or _is_ipv6(found[1])


def is_repository(text: str) -> bool:
    """Whether `text` is a repository's name: lower-case components with slashes between, at most 255 characters."""
    return len(text) <= MAX_REPOSITORY and _REPOSITORY.match(text) is not None


def canonical_registry(host: str) -> str:
    """The one name of a registry: lower case, and ``docker.io`` for the names that Docker Hub goes by."""
    lower = host.lower()
    if lower in _HUB_NAMES:
        return DEFAULT_REGISTRY
    # A single word is a registry by its capitals alone; without them it reads as a part of Docker Hub.
    return lower if lower == "localhost" or any(mark in lower for mark in ".:[") else host


def _is_ipv6(text: str) -> bool:
    import ipaddress  # lazy: few references need it, every job reads one

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LayoutReference:
    """An image in a layout on disk: its path, and a digest or a tag in it (exactly one of the two)."""

    path: str
    digest: str | None = None
    tag: str | None = None

    @classmethod
    def parse(cls, text: str) -> LayoutReference:
        """Read an ``oci:`` reference.

        :raises InvalidRequest: for text that is not one, or not well formed.
        """
        if not text.startswith(_SCHEME) or _CONTROL.search(text):
            raise InvalidRequest("image", text, _PIN)
        rest = text.removeprefix(_SCHEME)
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


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """An image in a registry, in full.

    :param registry: ``HOST[:PORT]``, lower case; ``docker.io`` for Docker Hub.
    :param repository: the name without the registry, such as ``library/busybox``.
    :param tag: None only beside a digest.
    :param digest: decides, where there is one.
    :param short: written without a registry. It says nothing about which image this is.
    """

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None
    short: bool = field(default=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    def pinned(self, digest: str) -> str:
        """The same repository's image by digest, as it would be written in a job file."""
        return f"{self.name}@{digest}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"


Reference = LayoutReference | RegistryReference


def parse_reference(text: str) -> Reference:
    """Read a reference of either kind. Pure.

    :raises InvalidRequest: for one that is not well formed, with the cure.
    :raises ExecutorError: UNSUPPORTED, for archives and other places that are no registry.
    """
    if text.startswith(_SCHEME):
        return LayoutReference.parse(text)
    if not text or len(text) > _MAX_TEXT or _CONTROL.search(text):
        raise _invalid(text, "write [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST], or oci:PATH@sha256:DIGEST")
    if transport := _TRANSPORT.match(text):
        raise _other_place(text, transport[1])
    rest, digest = _split_digest(text)
    rest, tag = _split_tag(text, rest)
    registry, repository, short = _split_name(text, rest)
    if tag is None and digest is None:
        tag = DEFAULT_TAG
    return RegistryReference(registry, repository, tag, digest, short)


def _invalid(text: str, cure: str) -> InvalidRequest:
    # A name and password put in front of the host are no part of a reference, nor of any message.
    return InvalidRequest("image", _USER_INFO.sub(r"\1***@", text, count=1), cure)


def _other_place(text: str, word: str) -> Exception:
    if word in ("docker", "http", "https"):
        return _invalid(text, f"leave {word}:// out: write [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST]")
    return unsupported(
        "image_source",
        f"image {text[:200]!r} is neither in a registry nor an OCI layout on disk",
        details=f"{word}: can't be read",
        resolution=f"copy the image into a registry or an OCI layout, then {_PIN}",
    )


def _split_digest(text: str) -> tuple[str, str | None]:
    rest, at, digest = text.rpartition("@")
    if not at:
        return text, None
    if is_digest(digest):
        return rest, digest
    known = _ANY_DIGEST.match(digest)
    if known and known[1] != "sha256":
        raise _invalid(text, f"digest algorithm {known[1]} is not taken: give the image's sha256 digest")
    raise _invalid(text, "what follows @ has to be sha256: and 64 lower-case hex digits")


def _split_tag(text: str, rest: str) -> tuple[str, str | None]:
    slash = rest.rfind("/")
    colon = rest.rfind(":")
    if colon <= slash:
        return rest, None
    tag = rest[colon + 1 :]
    if not _TAG.match(tag):
        raise _invalid(text, "a tag has 1 to 128 of A-Z a-z 0-9 _ . - and starts with none of . -")
    return rest[:colon], tag


def _split_name(text: str, name: str) -> tuple[str, str, bool]:
    first, slash, rest = name.partition("/")
    named = slash and (first == "localhost" or first != first.lower() or any(mark in first for mark in ".:["))
    if named and not is_registry_host(first):
        raise _invalid(text, "before the first / stands HOST, HOST:PORT or [IPv6]:PORT with a port from 1 to 65535")
    registry = canonical_registry(first) if named else DEFAULT_REGISTRY
    repository = rest if named else name
    if registry == DEFAULT_REGISTRY:
        repository = official(repository)
    _check_repository(text, repository, rest if named else name)
    return registry, repository, not named


def official(repository: str) -> str:
    """The name of a repository on Docker Hub in full: ``busybox`` is ``library/busybox`` there."""
    return repository if "/" in repository else _OFFICIAL + repository


def _check_repository(text: str, repository: str, written: str) -> None:
    if len(repository) > MAX_REPOSITORY:
        raise _invalid(text, f"a repository's name has at most {MAX_REPOSITORY} characters, without the registry")
    if _IMAGE_ID.match(written):
        raise _invalid(text, "64 hex digits are an image's id, not a name: write NAME@sha256:DIGEST")
    if _REPOSITORY.match(repository):
        return
    if _REPOSITORY.match(repository.lower()):
        raise _invalid(text, f"repository names are lower case: write {written.lower()[:80]}")
    raise _invalid(
        text, "a repository's name has parts of a-z 0-9 with . _ __ or dashes between, and one / between parts"
    )
