"""Blobs and manifests on their way into a registry: streamed from files, byte for byte.

oras reads blobs into memory and writes manifests anew, which changes their digest; so this is our own, on its session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote, urlsplit, urlunsplit

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import host_failure, refused
from forgeyard_oci.reference import sha256
from forgeyard_oci.registry import faults
from forgeyard_oci.registry.answers import finish
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.exchange import Ask, Wire
from forgeyard_oci.registry.redirects import target
from forgeyard_oci.registry.retry import Transient, attempt
from forgeyard_oci.registry.transfer import repository_url, unexpected

if TYPE_CHECKING:
    from requests import Response

    from forgeyard_oci.registry.settings import Endpoint


def push_scope(endpoint: Endpoint) -> str:
    """The token scope for writing."""
    return f"repository:{endpoint.repository}:pull,push"


class Upload:
    """A blob's file, as the body of one request."""

    def __init__(
        self, source: BinaryIO, digest: str, size: int, *, budget: Budget, sent: Callable[[int], None]
    ) -> None:
        self._source = source
        self._digest = digest
        self._size = size
        self._budget = budget
        self._sent = sent
        self._position = 0
        self.last_read = time.monotonic()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read(64 << 10):
            yield data

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the blob, never more than it is long.

        :raises ForgeyardError: the budget is over, or the file is shorter than the blob.
        """
        self._budget.check()
        left = self._size - self._position
        try:
            data = self._source.read(left if size < 0 else min(size, left))
        except OSError as error:
            raise host_failure(error, "reading a blob", self._digest) from error
        if left and size and not data:
            raise refused("truncated", f"blob {self._digest} is shorter here than {self._size} bytes")
        self._position += len(data)
        self.last_read = time.monotonic()
        self._sent(self._position)
        return data


class Push:
    """What goes into one repository. `last`: no other endpoint is tried after this one."""

    def __init__(self, wire: Wire, endpoint: Endpoint, budget: Budget, *, last: bool) -> None:
        self._wire = wire
        self._endpoint = endpoint
        self._budget = budget
        self._timings = wire.timings if last else wire.brisk

    def blob(self, digest: str, size: int, open_source: Callable[[], BinaryIO], sent: Callable[[int], None]) -> None:
        """Upload a blob: one POST for the place, one PUT for all of it.

        :param open_source: opens the blob's file; once for each time it has to be sent.
        :raises SandboxError: denied or refused.
        :raises ExecutorError: trouble with the registry, or with the file.
        """

        def once() -> None:
            location = self._begin(digest, "")
            self._send(location or "", digest, size, open_source, sent)

        attempt(once, self._timings, self._budget)

    def has_blob(self, digest: str) -> bool:
        """Whether the registry says that it has the blob. Some refuse to say: then uploading will tell."""
        ask = self._ask("HEAD", f"blobs/{digest}", f"blob {digest}")
        try:
            response = self._wire.ask(ask, self._budget)
        except (Transient, SandboxError):
            return False
        finish(response, ask.host, self._budget, self._wire.timings)
        return response.status_code == 200

    def mount_blob(self, digest: str, repository: str) -> bool:
        """Whether the registry could take the blob from another of its repositories (distribution spec, mounting)."""
        query = f"?mount={quote(digest, safe=':')}&from={quote(repository, safe='/')}"
        return attempt(lambda: self._begin(digest, query), self._timings, self._budget) is None

    def manifest(self, image: str, which: str, data: bytes, media_type: str) -> None:
        """Store a manifest or an index under a tag or its digest, exactly these bytes.

        :raises SandboxError: denied, or the registry stored something else.
        :raises ExecutorError: trouble with the registry.
        """
        ask = replace(
            self._ask("PUT", f"manifests/{which}", f"image {image}"),
            headers={"Content-Type": media_type},
            body=lambda: data,
        )
        attempt(lambda: self._store(ask, sha256(data)), self._timings, self._budget)

    def _ask(self, method: str, rest: str, what: str) -> Ask:
        url = repository_url(self._endpoint, rest)
        return Ask(method=method, url=url, endpoint=self._endpoint, scope=push_scope(self._endpoint), what=what)

    def _begin(self, digest: str, query: str) -> str | None:
        """Where to upload to; None when there is no need to, which only a `query` for a mount can bring about."""
        ask = self._ask("POST", "blobs/uploads/", f"blob {digest}")
        ask = replace(ask, url=ask.url + query, headers={"Content-Length": "0"})
        response = self._wire.ask(ask, self._budget)
        if response.status_code != 202 and (response.status_code, bool(query)) != (201, True):
            raise unexpected(response, ask, self._budget, self._wire)
        finish(response, ask.host, self._budget, self._wire.timings)
        return None if response.status_code == 201 else self._place(response, digest)

    def _place(self, response: Response, digest: str) -> str:
        location = response.headers.get("Location")
        if not location:
            brief = f"registry {self._endpoint.host} names no place to upload blob {digest} to"
            raise faults.failure("registry_error", brief)
        parts = urlsplit(target(response.url, location))
        # The rest of the query is the registry's own and may be signed: not a byte of it changes.
        query = "&".join([*([parts.query] if parts.query else []), f"digest={quote(digest, safe=':')}"])
        return urlunsplit(parts._replace(query=query, fragment=""))

    def _send(
        self, location: str, digest: str, size: int, open_source: Callable[[], BinaryIO], sent: Callable[[int], None]
    ) -> None:
        with ExitStack() as files:

            def body() -> Upload:
                return Upload(files.enter_context(open_source()), digest, size, budget=self._budget, sent=sent)

            ask = replace(
                self._ask("PUT", f"blobs/{digest}", f"blob {digest}"),
                url=location,
                headers={"Content-Type": "application/octet-stream"},
                body=body,
                answer_within=self._wire.timings.commit,
            )
            self._store(ask, digest)

    def _store(self, ask: Ask, digest: str) -> None:
        response = self._wire.ask(ask, self._budget)
        if response.status_code not in (200, 201, 202, 204):
            raise unexpected(response, ask, self._budget, self._wire)
        finish(response, ask.host, self._budget, self._wire.timings)
        stored = response.headers.get("Docker-Content-Digest", digest).strip()
        if stored.startswith("sha256:") and stored != digest:
            raise refused(
                "digest_mismatch",
                f"registry {ask.host} stored something else for {ask.what}",
                details=f"digest {stored[:80]!r}, not {digest}",
            )
