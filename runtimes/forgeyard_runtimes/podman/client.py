"""Podman's service over its socket: podman-py's own session, each call with a deadline, in a bounded pool.

podman-py's containers.create() drops fields and its wait() polls, so the calls here are libpod's own, posted through
the same client. A call that was cancelled is waited for: whoever cleans up next must not race with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forgeyard_runtimes.podman.errors import check, gone, hangs, not_understood, unreachable, unsupported
from forgeyard_runtimes.shielding import shielded

if TYPE_CHECKING:
    from podman.api.client import APIClient
    from requests import Response

API: Final = "4.0.0"
"""The version of libpod's API whose fields we write. Every service from 4.0 on speaks it."""
KEPT: Final = 4096
_WORKERS: Final = 16
_TAR: Final = {"Content-Type": "application/x-tar"}
_JSON: Final = {"Content-Type": "application/json"}
NO_QUERY: Final[Mapping[str, str]] = MappingProxyType({})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for calls that look, and for calls that make or remove something."""

    query: float = 20.0
    change: float = 60.0

    def of(self, method: str) -> float:
        """For an HTTP method."""
        return self.query if method == "GET" else self.change


@dataclass(frozen=True, slots=True)
class Peer:
    """Who serves the socket, by what the kernel says of it (SO_PEERCRED)."""

    pid: int
    uid: int


class PodmanClient:
    """One connection pool to one service. Make it with `connect`, end it with `close`."""

    def __init__(self, path: Path, peer: Peer, api: APIClient, deadlines: Deadlines) -> None:
        self.path = path
        self.peer = peer
        self._deadlines = deadlines
        self._api = api
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="podman")

    @classmethod
    async def connect(cls, path: Path, deadlines: Deadlines) -> PodmanClient:
        """Reach the socket; nothing is asked yet.

        :raises ExecutorError: UNSUPPORTED when it is not there or may not be used, or podman-py is not installed.
        """
        peer = await asyncio.to_thread(_peer, path, deadlines.query)
        return cls(path, peer, await asyncio.to_thread(_session, path), deadlines)

    async def call(
        self,
        method: str,
        what: str,
        *,
        body: object = None,
        query: Mapping[str, str] = NO_QUERY,
    ) -> Any:
        """One call of libpod's API; the decoded answer, None when it is empty.

        :raises NotThere: the object does not exist.
        :raises Refused: the service answered with another error.
        :raises ExecutorError: TIMEOUT when it does not answer, LOST when the connection breaks.
        """
        return await self.run(lambda: self.call_now(method, what, body=body, query=query))

    def call_now(
        self,
        method: str,
        what: str,
        *,
        body: object = None,
        query: Mapping[str, str] = NO_QUERY,
    ) -> Any:
        """`call` for one who may block."""
        response = self._send(method, what, body, self._deadlines.of(method), query, stream=False)
        check(what, response)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise not_understood(what, response.text) from error

    def drain_now(self, what: str, body: object, deadline: float) -> bytes:
        """POST, and read what comes until it ends or `deadline` seconds are over; the last KEPT bytes of it."""
        until, tail = time.monotonic() + deadline, b""
        with self._send("POST", what, body, deadline, NO_QUERY, stream=True) as response:
            check(what, response)
            # As it comes: a silent stream ends by the read's own time-out.
            while data := _read(response, what, deadline):
                tail = (tail + data)[-KEPT:]
                if time.monotonic() > until:
                    raise hangs(what, deadline)
        return tail

    def upload_now(self, what: str, pieces: Iterable[bytes], deadline: float) -> None:
        """POST a stream of bytes as a tar. Raises as `call`.

        :param deadline: seconds, for each piece and for the answer.
        """
        try:
            stream: Any = pieces  # sent in chunks; the type that podman-py declares leaves iterators out
            answer: Any = self._api.post(what, data=stream, headers=_TAR, timeout=(deadline, deadline))
        except OSError as error:
            raise _failure(what, deadline, error) from error
        check(what, answer._response)

    async def run(self, work: Callable[[], T]) -> T:
        """`work` in the pool. It ends before a cancellation goes on."""
        return await shielded(asyncio.get_running_loop().run_in_executor(self._pool, work))

    def close(self) -> None:
        """Close the connections. Calls under way end by their own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._api.close()

    def _send(
        self, method: str, what: str, body: object, deadline: float, query: Mapping[str, str], *, stream: bool
    ) -> Response:
        # requests would look for proxies and .netrc at each call; podman-py's session has that off for sockets.
        data = None if body is None else json.dumps(body).encode()
        send = {"GET": self._api.get, "POST": self._api.post, "DELETE": self._api.delete}[method]
        extra: dict[str, Any] = {"data": data} if method == "POST" else {}
        try:
            answer: Any = send(
                what, params=dict(query), headers=_JSON, timeout=(deadline, deadline), stream=stream, **extra
            )
        except OSError as error:
            raise _failure(what, deadline, error) from error
        response: Response = answer._response
        return response


def _read(response: Response, what: str, deadline: float) -> bytes:
    from urllib3.exceptions import HTTPError

    try:
        data: bytes = response.raw.read1(1 << 16)
    except (OSError, HTTPError) as error:
        raise _failure(what, deadline, error) from error
    return data


def _failure(what: str, deadline: float, error: BaseException) -> Exception:
    """podman-py wraps everything that is an OSError, requests' errors among them; the first cause tells which."""
    shown: BaseException | None = error
    while shown is not None:
        if isinstance(shown, TimeoutError) or "timed out" in str(shown):
            return hangs(what, deadline)
        last, shown = shown, shown.__cause__ or shown.__context__
    return gone(f"{what}: {last or type(last).__name__}")


def _session(path: Path) -> APIClient:
    try:
        from forgeyard_runtimes.podman.transport import session
    except ImportError as error:
        raise unsupported(
            "podman_library",
            "the Python package podman is not installed",
            "install forgeyard-executor[podman]",
            details=str(error),
        ) from error
    return session(path, API, _WORKERS)


def _peer(path: Path, seconds: float) -> Peer:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            raise unreachable(os.fspath(path), error) from error
        pid, uid, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)
