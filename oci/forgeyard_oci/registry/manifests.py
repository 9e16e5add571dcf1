"""Manifests and indexes as they arrive: bounded, and held to the digest that was asked for or promised."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forgeyard_oci.image_errors import refused
from forgeyard_oci.image_manifest import DOCKER_LIST, DOCKER_MANIFEST, MAX_MANIFEST, OCI_INDEX, OCI_MANIFEST
from forgeyard_oci.reference import is_digest, sha256
from forgeyard_oci.registry.answers import Stream, answered
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.exchange import Ask, Wire
from forgeyard_oci.registry.retry import attempt
from forgeyard_oci.registry.transfer import declared_length, mismatch, pull_scope, repository_url, unexpected

if TYPE_CHECKING:
    from requests import Response

    from forgeyard_oci.registry.settings import Endpoint

ACCEPT: Final = ", ".join((OCI_INDEX, DOCKER_LIST, OCI_MANIFEST, DOCKER_MANIFEST))
# What servers say that do not know what they serve.
_SLOPPY: Final = frozenset({"application/octet-stream", "binary/octet-stream", "text/plain", "application/json"})


@dataclass(frozen=True, slots=True)
class Fetched:
    """A manifest as it was received.

    :param media_type: as the registry declared it, without parameters; "" when it declared nothing of use.
    :param digest: sha256 of `data`.
    """

    data: bytes
    media_type: str
    digest: str


def declared_type(header: str | None) -> str:
    """A Content-Type without its parameters; "" for the ones that say nothing."""
    plain = (header or "").partition(";")[0].strip().lower()
    return "" if plain in _SLOPPY or not plain.isprintable() else plain[:200]


def fetch_manifest(wire: Wire, endpoint: Endpoint, image: str, which: str, *, last: bool, budget: Budget) -> Fetched:
    """One manifest or index, by tag or digest. `last`: no other endpoint is asked after this one.

    :raises SandboxError: not there, denied, too large, or not of the digest that was asked for or promised.
    :raises ExecutorError: the registry can't be reached, limits requests, or fails.
    """
    url = repository_url(endpoint, f"manifests/{which}")
    ask = Ask(
        method="GET",
        url=url,
        endpoint=endpoint,
        scope=pull_scope(endpoint),
        what=f"image {image}",
        headers={"Accept": ACCEPT},
    )

    def once() -> Fetched:
        response = wire.ask(ask, budget)
        if response.status_code != 200:
            raise unexpected(response, ask, budget, wire)
        with answered(response, ask.where, budget, wire.timings) as stream:
            data = _bounded(response, stream, ask)
        fetched = Fetched(data, declared_type(response.headers.get("Content-Type")), sha256(data))
        _check_digest(fetched, which, response.headers.get("Docker-Content-Digest", "").strip(), ask)
        return fetched

    return attempt(once, wire.timings if last else wire.brisk, budget)


def _bounded(response: Response, stream: Stream, ask: Ask) -> bytes:
    data = bytearray()
    if (declared_length(response) or 0) <= MAX_MANIFEST:
        for chunk in stream:
            data += chunk
            if len(data) > MAX_MANIFEST:
                break
        else:
            return bytes(data)
    raise refused(
        "manifest_too_large", f"{ask.what} has a manifest of more than {MAX_MANIFEST >> 20} MiB", details=ask.host
    )


def _check_digest(fetched: Fetched, which: str, promised: str, ask: Ask) -> None:
    algorithm, _, _ = promised.partition(":")
    received = fetched.digest
    if algorithm == "sha512":
        received = f"sha512:{hashlib.sha512(fetched.data).hexdigest()}"
    if is_digest(which) and which != fetched.digest:
        raise mismatch(ask, which, fetched.digest)
    if promised and promised != received:
        raise mismatch(ask, promised, received)
