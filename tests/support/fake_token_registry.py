"""A registry and a token service that a test scripts: every request is recorded, every answer is the test's."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    form: dict[str, list[str]]

    @property
    def authorization(self) -> str | None:
        """The Authorization header."""
        return self.headers.get("Authorization")


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered. A list of headers, since one may come twice."""

    status: int = 200
    body: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)


def as_json(document: Any, status: int = 200) -> Reply:
    """A reply with a JSON body."""
    return Reply(status, json.dumps(document).encode(), [("Content-Type", "application/json")])


def challenged(*values: str) -> Reply:
    """A 401 with one WWW-Authenticate header for each value."""
    return Reply(401, b"{}", [("WWW-Authenticate", value) for value in values])


class FakeRegistry:
    """A server on a loopback port of its own. `answer` makes the reply to each request, in any thread."""

    def __init__(self, answer: Callable[[Seen], Reply], *, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.seen: list[Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.port = int(self._server.server_address[1])
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"

    def asked(self, path: str) -> list[Seen]:
        """The requests for `path` so far."""
        return [seen for seen in self.seen if seen.path == path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                query, form = parse_qs(parts.query, keep_blank_values=True), parse_qs(body, keep_blank_values=True)
                seen = Seen(self.command, parts.path, query, dict(self.headers.items()), form)
                outer.seen.append(seen)
                reply = outer.answer(seen)
                self.send_response(reply.status)
                for name, value in reply.headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                try:
                    self.wfile.write(reply.body)
                except OSError:
                    self.close_connection = True  # a client that stops reading is one of the cases

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name for it
                """Nothing on stderr."""

        return Handler
