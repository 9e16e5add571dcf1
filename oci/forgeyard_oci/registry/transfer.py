"""Blobs as they arrive: hashed and measured while they stream, resumed where they broke off."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import host_failure, refused
from forgeyard_oci.registry import faults
from forgeyard_oci.registry.answers import answered, finish
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.exchange import Ask, Wire
from forgeyard_oci.registry.retry import Timings, Transient, Tries

if TYPE_CHECKING:
    from requests import Response

    from forgeyard_oci.registry.settings import Endpoint

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\Z")
_REHASH: Final = 1 << 20
_WORTH_KEEPING: Final = 1 << 20
"""Bytes one try must bring to count as progress, so that retries stay bounded by the blob's size."""


def pull_scope(endpoint: Endpoint) -> str:
    """The token scope for reading."""
    return f"repository:{endpoint.repository}:pull"


def repository_url(endpoint: Endpoint, rest: str) -> str:
    """The URL of something in the endpoint's repository; `rest` as in "blobs/sha256:…"."""
    return f"{endpoint.base_url}/v2/{quote(endpoint.repository)}/{quote(rest, safe='/:')}"


def unexpected(response: Response, ask: Ask, budget: Budget, wire: Wire) -> Exception:
    """The error for a status that is no answer to `ask`."""
    code = finish(response, ask.host, budget, wire.timings)
    if response.status_code == 404:
        return faults.not_found(ask.host, ask.what, code)
    return faults.broken(ask.host, ask.what, response.status_code, code)


def declared_length(response: Response) -> int | None:
    """The Content-Length, None without a plain one."""
    text = response.headers.get("Content-Length", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def mismatch(ask: Ask, wanted: str, received: str) -> SandboxError:
    """The refusal of what has the digest `received` and not the one that was asked for or promised."""
    return refused(
        "digest_mismatch",
        f"registry {ask.host} sent something else for {ask.what}",
        details=f"digest {received}, not {wanted[:150]!r}",
        resolution="the registry or something on the way to it changes data; nothing of it was kept",
    )


class BlobTransfer:
    """One blob on its way into a file, over as many connections and endpoints as it takes."""

    def __init__(
        self, wire: Wire, digest: str, size: int, *, target: int, budget: Budget, received: Callable[[int], None]
    ) -> None:
        self._wire = wire
        self._digest = digest
        self._size = size
        self._target = target
        self._budget = budget
        self._received = received
        self._hash = hashlib.sha256()
        self._offset = 0
        self._etag: tuple[str, str] = ("", "")  # of which endpoint, and what
        self._mismatches = 0
        self._take_over()

    def complete(self) -> bool:
        """Whether the file holds the whole blob already."""
        return self._offset == self._size and self._hash_agrees()

    def fetch_from(self, endpoint: Endpoint, *, last: bool) -> None:
        """Get what is missing.

        A wrong digest is met with one more try from scratch: elsewhere, or here when this is the `last` endpoint.

        :raises SandboxError: not there, denied, or not what its descriptor says.
        :raises ExecutorError: trouble with the registry, or with the disk.
        """
        ask = self._ask(endpoint)
        while True:
            self._stream_all(ask, self._wire.timings if last else self._wire.brisk)
            if self._hash_agrees():
                return
            got = f"sha256:{self._hash.hexdigest()}"
            self._restart()
            self._mismatches += 1
            if not last or self._mismatches > 1:
                raise mismatch(ask, self._digest, got)

    def _ask(self, endpoint: Endpoint, headers: dict[str, str] | None = None) -> Ask:
        return Ask(
            method="GET",
            url=repository_url(endpoint, f"blobs/{self._digest}"),
            endpoint=endpoint,
            scope=pull_scope(endpoint),
            what=f"blob {self._digest}",
            headers=headers or {},
        )

    def _hash_agrees(self) -> bool:
        return self._digest == f"sha256:{self._hash.hexdigest()}"

    def _take_over(self) -> None:
        """Hash what an earlier transfer left in the file; more than there should be, or all of it wrong, is dropped."""
        try:
            there = os.fstat(self._target).st_size
            while self._offset < there <= self._size:
                data = os.pread(self._target, _REHASH, self._offset)
                if not data:
                    break
                self._hash.update(data)
                self._offset += len(data)
                self._budget.check()
        except OSError as error:
            raise host_failure(error, "reading a partial blob", self._digest) from error
        if there > self._size or (there and self._offset == self._size and not self._hash_agrees()):
            self._restart()

    def _restart(self) -> None:
        try:
            os.ftruncate(self._target, 0)
        except OSError as error:
            raise host_failure(error, "emptying a partial blob", self._digest) from error
        self._hash, self._offset = hashlib.sha256(), 0
        self._received(0)

    def _stream_all(self, ask: Ask, timings: Timings) -> None:
        tries = Tries(timings, self._budget)
        while self._offset < self._size or self._size == 0:
            before = self._offset
            try:
                self._stream(ask)
            except Transient as trouble:
                if self._offset - before >= _WORTH_KEEPING:
                    tries.progressed()
                tries.again(trouble)
            else:
                return

    def _stream(self, ask: Ask) -> None:
        response = self._answer(ask)
        with answered(response, ask.where, self._budget, self._wire.timings) as stream:
            length = declared_length(response)
            if response.status_code == 200 and length not in (None, self._size):
                raise self._wrong_size(ask, f"{length} bytes")
            for data in stream:
                if self._offset + len(data) > self._size:
                    raise self._wrong_size(ask, "more")
                self._keep(data)
            if self._offset < self._size:
                raise Transient(stream.broken_off(f"it ended with {self._size - self._offset} bytes missing"))

    def _answer(self, ask: Ask) -> Response:
        """An answer whose body goes on where the file ends; a registry that can't resume starts again."""
        if self._offset:
            response = self._wire.ask(self._ask(ask.endpoint, self._range(ask)), self._budget)
            if response.status_code == 206 and self._goes_on(response.headers.get("Content-Range", "")):
                return response
            self._restart()
            if response.status_code == 200:
                return response
            if response.status_code not in (206, 416):
                raise unexpected(response, ask, self._budget, self._wire)
            # A range nobody asked for, or none at all. Its body may be anything: don't read it.
            response.close()
        response = self._wire.ask(ask, self._budget)
        if response.status_code != 200:
            raise unexpected(response, ask, self._budget, self._wire)
        etag = response.headers.get("ETag", "")
        # Weak ones may name other bytes (RFC 9110, 13.1.5).
        self._etag = (ask.host, etag if etag.startswith('"') else "")
        return response

    def _range(self, ask: Ask) -> dict[str, str]:
        headers = {"Range": f"bytes={self._offset}-"}
        host, etag = self._etag
        return {**headers, "If-Range": etag} if etag and host == ask.host else headers

    def _goes_on(self, content_range: str) -> bool:
        match = _CONTENT_RANGE.match(content_range.strip())
        if match is None:
            return False
        first, last, total = match.groups()
        return int(first) == self._offset and int(last) < self._size and total in ("*", str(self._size))

    def _keep(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._target, view, self._offset)
                self._hash.update(view[:written])
                self._offset += written
                view = view[written:]
        except OSError as error:
            raise host_failure(error, "writing a blob", self._digest) from error
        self._received(self._offset)

    def _wrong_size(self, ask: Ask, got: str) -> SandboxError:
        self._restart()
        return refused(
            "size_mismatch", f"registry {ask.host} sends {got} for {ask.what}, which is {self._size} bytes long"
        )
