"""Bodies of answers: read as they come, and watched meanwhile."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.image_errors import refused
from forgeyard_oci.registry import faults
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.retry import Timings, Transient

if TYPE_CHECKING:
    from requests import Response

CHUNK: Final = 256 << 10
"""Bytes read at most at once: large enough for hashing to run without the interpreter's lock most of the time."""
_SMALL: Final = 64 << 10


class Stream:
    """The bytes of an answer, as they come."""

    def __init__(self, response: Response, what: str, budget: Budget) -> None:
        self._response = response
        self._what = what
        self._budget = budget
        self.received = 0
        self.stalled = False

    def __iter__(self) -> Iterator[bytes]:
        """Chunks of up to CHUNK bytes.

        :raises Transient: when the connection breaks or stalls.
        """
        while data := self._read():
            self.received += len(data)
            yield data

    def _read(self) -> bytes:
        from urllib3.exceptions import HTTPError

        try:
            # read1 gives what is there; read would wait for the whole chunk, out of our sight.
            data: bytes = self._response.raw.read1(CHUNK, decode_content=False)
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            self._budget.check()
            reason = "the registry stopped sending" if self.stalled else faults.why(error)
            raise Transient(self.broken_off(reason)) from error
        if not data:
            # The watcher ends a stream by closing its reading half, which looks like an end.
            self._budget.check()
            if self.stalled:
                raise Transient(self.broken_off("the registry stopped sending"))
        return data or b""

    def broken_off(self, reason: str) -> ExecutorError:
        """The error for a stream that ended too early, for `reason`."""
        stalled = self.stalled or reason == "timed out"
        brief = f"{self._what} stalled" if stalled else f"{self._what} came truncated"
        details = f"{reason}, after {self.received} bytes of this answer"
        return faults.failure("stalled" if stalled else "truncated", brief, details=details)


@contextmanager
def answered(response: Response, what: str, budget: Budget, timings: Timings) -> Iterator[Stream]:
    """The body of an answer, watched for cancellation, deadline and speed; closed at the end.

    :param what: names it and the registry for messages ("blob sha256:… from registry HOST").

    :raises SandboxError: for a body in an encoding we did not ask for: its bytes are not those the digest is of.
    """
    stream, done = Stream(response, what, budget), Event()
    watcher = Thread(target=_watch, args=(response, stream, budget, timings, done), name="registry-watch", daemon=True)
    try:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            raise refused("content_encoding", f"{what} comes with Content-Encoding {encoding[:40]!r}")
        watcher.start()
        yield stream
    finally:
        done.set()
        if watcher.ident is not None:
            watcher.join()
        response.close()


def _watch(response: Response, stream: Stream, budget: Budget, timings: Timings, done: Event) -> None:
    since, before = time.monotonic(), 0
    while not done.wait(timings.tick):
        now = time.monotonic()
        if now - since >= timings.slow_window:
            stream.stalled = stream.received - before < timings.slow_rate * (now - since)
            since, before = now, stream.received
        if stream.stalled or budget.over():
            # Already given back to the pool: then it is read to its end, and nobody waits for it.
            with suppress(RuntimeError, ValueError, OSError):
                response.raw.shutdown()
            return


def finish(response: Response, host: str, budget: Budget, timings: Timings) -> str:
    """Read the little an error or a redirect says, so that its connection can serve again; give its error code."""
    body = b""
    with (
        suppress(Transient, SandboxError),
        answered(response, f"answer of registry {host}", budget, timings) as stream,
    ):
        for data in stream:
            body += data
            if len(body) > _SMALL:
                break
    return faults.error_code(body) if len(body) <= _SMALL else ""
