"""A registry of our own that serves images well, and misbehaves when a test tells it to.

::

    with BadRegistry() as registry:
        digest = registry.add_blob(b"…")
        registry.on("/blobs/", cut_at(100), times=2)        # the next two requests for blobs
        …
        assert [seen.headers.get("Range") for seen in registry.seen("/blobs/")] == [None, "bytes=100-", "bytes=100-"]

A behaviour is a function of the Call; it answers and returns True, or returns False to let the good answer follow. What
it changes of ``call.answer`` before that is changed in the good answer.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def sha256(data: bytes) -> str:
    """The digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Seen:
    """A request as it came in; header names in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Answer:
    """What would be sent. A `length` that is not the body's is a lie; None means chunked."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = 0

    @classmethod
    def of(cls, status: int, body: bytes = b"", **headers: str) -> Answer:
        """An honest answer; `_` in a header's name stands for `-`."""
        return cls(status, {name.replace("_", "-"): value for name, value in headers.items()}, body, len(body))


class Call:
    """One request under way."""

    def __init__(self, handler: Handler, seen: Seen, answer: Answer) -> None:
        self.handler = handler
        self.registry = handler.registry
        self.seen = seen
        self.answer = answer

    def head(self) -> None:
        """Send status and headers of the answer."""
        self.handler.send_response_only(self.answer.status)
        for name, value in self.answer.headers.items():
            self.handler.send_header(name, value)
        if self.answer.length is None:
            self.handler.send_header("Transfer-Encoding", "chunked")
        elif self.answer.status != 204 and "Content-Length" not in self.answer.headers:
            self.handler.send_header("Content-Length", str(self.answer.length))
        self.handler.end_headers()

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if self.answer.length is None:
            data = b"%x\r\n%s\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self.handler.wfile.write(data)

    def hang_up(self) -> None:
        """Close the connection, mid-sentence or not."""
        self.handler.close_connection = True

    def send(self) -> None:
        """Send the answer as it is."""
        self.head()
        if self.seen.method != "HEAD" and self.answer.body:
            self.write(self.answer.body)
        if self.answer.length is None:
            self.write(b"")
        elif self.answer.length != len(self.answer.body) and self.seen.method != "HEAD":
            self.hang_up()


Behaviour = Callable[[Call], bool]


@dataclass
class _Rule:
    part: str
    method: str | None
    behaviour: Behaviour
    times: int | None


class BadRegistry:
    """The server. `tls`: a server context, for HTTPS. Good unless told otherwise by `on`."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.requests: list[Seen] = []
        self.closing = threading.Event()
        self.arrived = threading.Condition()
        self.tokens: set[str] | None = None
        """Bearer tokens that open it; None: it is open to all. The realm is its own /token, which gives the newest."""
        self.basic: str | None = None
        """"user:password" that /token or, without tokens, everything asks for."""
        self._rules: list[_Rule] = []
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.registry, self._server.tls = self, tls
        self.scheme = "https" if tls else "http"
        self.host = f"localhost:{self._server.server_port}"
        self.url = f"{self.scheme}://{self.host}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add_blob(self, data: bytes) -> str:
        """Have a blob; its digest."""
        self.blobs[sha256(data)] = data
        return sha256(data)

    def add_manifest(self, data: bytes, *names: str, media_type: str = OCI_MANIFEST) -> str:
        """Have a manifest under its digest and the tags `names`; its digest."""
        for name in (sha256(data), *names):
            self.manifests[name] = (media_type, data)
        return sha256(data)

    def on(self, part: str, behaviour: Behaviour, *, times: int | None = None, method: str | None = None) -> None:
        """Let the next `times` (None: all) requests with `part` in their path, and of `method`, meet `behaviour`.

        The first rule that fits counts.
        """
        self._rules.append(_Rule(part, method, behaviour, times))

    def seen(self, part: str = "", method: str | None = None) -> list[Seen]:
        """The requests so far with `part` in their path."""
        return [seen for seen in list(self.requests) if part in seen.path and method in (None, seen.method)]

    def wait_for(self, count: int, part: str = "", within: float = 10.0) -> None:
        """Until `count` such requests have come in."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.seen(part)) >= count, within)

    def behaviour(self, seen: Seen) -> Behaviour | None:
        """The rule that fits, used up by one."""
        with self.arrived:
            self.requests.append(seen)
            self.arrived.notify_all()
            for rule in self._rules:
                if rule.part in seen.path and rule.method in (None, seen.method) and rule.times != 0:
                    rule.times = None if rule.times is None else rule.times - 1
                    return rule.behaviour
        return None

    def answer(self, seen: Seen) -> Answer:
        """The good answer."""
        if (refusal := self._unauthorized(seen)) is not None:
            return refusal
        head, _, last = seen.path.rpartition("/")
        if seen.path == "/token":
            token = sorted(self.tokens or {""})[-1]
            return Answer.of(200, json.dumps({"token": token}).encode(), Content_Type="application/json")
        if head.endswith("/manifests"):
            return self._manifest(seen, last)
        if head.endswith("/blobs") or "/storage/" in seen.path:
            return self._blob(seen, last)
        if "/blobs/uploads" in seen.path:
            return self._upload(seen)
        return Answer.of(200 if seen.path == "/v2/" else 404, b"{}")

    def _unauthorized(self, seen: Seen) -> Answer | None:
        kind, _, given = seen.headers.get("authorization", "").partition(" ")
        if "/storage/" in seen.path:
            return None
        if seen.path == "/token" or self.tokens is None:
            wanted = base64.b64encode((self.basic or "").encode()).decode()
            if self.basic is None or (kind, given) == ("Basic", wanted):
                return None
            return Answer.of(401, b"{}", WWW_Authenticate='Basic realm="here"')
        if kind == "Bearer" and given in self.tokens:
            return None
        return Answer.of(401, b"{}", WWW_Authenticate=f'Bearer realm="{self.url}/token",service="{self.host}"')

    def _manifest(self, seen: Seen, which: str) -> Answer:
        if seen.method == "PUT":
            self.manifests[which] = self.manifests[sha256(seen.body)] = (seen.headers["content-type"], seen.body)
            return Answer.of(201, Docker_Content_Digest=sha256(seen.body))
        if which not in self.manifests:
            return Answer.of(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
        media_type, data = self.manifests[which]
        return Answer.of(200, data, Content_Type=media_type, Docker_Content_Digest=sha256(data))

    def _blob(self, seen: Seen, digest: str) -> Answer:
        if digest not in self.blobs:
            return Answer.of(404, b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')
        data, etag = self.blobs[digest], f'"{digest}"'
        wanted = seen.headers.get("range", "")
        if not wanted.startswith("bytes=") or seen.headers.get("if-range", etag) != etag:
            return Answer.of(200, data, ETag=etag, Content_Type="application/octet-stream")
        start = int(wanted[6:].rstrip("-"))
        if start >= len(data):
            return Answer.of(416, Content_Range=f"bytes */{len(data)}")
        return Answer.of(206, data[start:], ETag=etag, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")

    def _upload(self, seen: Seen) -> Answer:
        query = parse_qs(seen.query)
        if seen.method == "POST":
            if query.get("mount", [""])[0] in self.blobs:
                return Answer.of(201)
            return Answer.of(202, Location=f"{seen.path.rstrip('/')}/one?state=a%2Fb")
        digest = query["digest"][0]
        if sha256(seen.body) != digest:
            return Answer.of(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
        self.blobs[digest] = seen.body
        return Answer.of(201, Docker_Content_Digest=digest)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    registry: BadRegistry
    tls: ssl.SSLContext | None

    def get_request(self) -> Any:
        """With TLS, the handshake is left to the connection's own thread."""
        connection, address = super().get_request()
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    @property
    def registry(self) -> BadRegistry:
        """Whose connection it is."""
        assert isinstance(self.server, _Server)
        return self.server.registry

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, parts.path, parts.query, headers, body)
        behaviour = self.registry.behaviour(seen)
        call = Call(self, seen, self.registry.answer(seen))
        # A client that cut the connection is no trouble of the server's.
        with contextlib.suppress(OSError):
            if behaviour is None or not behaviour(call):
                call.send()
            self.wfile.flush()

    def __getattr__(self, name: str) -> Any:
        # The base class looks for do_GET, do_PUT and so on.
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)


def reply(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    """Another answer instead; `_` in a header's name stands for `-`."""

    def behave(call: Call) -> bool:
        call.answer = Answer.of(status, body, **headers)
        return False

    return behave


def with_headers(**headers: str) -> Behaviour:
    """The good answer with other headers."""

    def behave(call: Call) -> bool:
        call.answer.headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        return False

    return behave


def with_body(change: Callable[[bytes], bytes]) -> Behaviour:
    """The good answer with another body, of an honest length."""

    def behave(call: Call) -> bool:
        call.answer.body = change(call.answer.body)
        call.answer.length = len(call.answer.body)
        return False

    return behave


def flip(data: bytes) -> bytes:
    """One bit wrong, in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def cut_at(count: int) -> Behaviour:
    """The good answer's headers, `count` bytes of its body, and no more."""

    def behave(call: Call) -> bool:
        call.answer.body = call.answer.body[:count]
        return False

    return behave


def chunked(call: Call) -> bool:
    """The good answer without a length."""
    call.answer.length = None
    return False


def chunked_cut_at(count: int) -> Behaviour:
    """Chunked, and closed after `count` bytes without the last chunk."""

    def behave(call: Call) -> bool:
        call.answer.length = None
        call.head()
        call.write(call.answer.body[:count])
        call.hang_up()
        return True

    return behave


def drop(call: Call) -> bool:
    """Close the connection without an answer."""
    call.hang_up()
    return True


def stall_at(count: int) -> Behaviour:
    """`count` bytes of the body, then silence until the test is over."""

    def behave(call: Call) -> bool:
        call.head()
        call.write(call.answer.body[:count])
        call.registry.closing.wait(30)
        call.hang_up()
        return True

    return behave


def silence(call: Call) -> bool:
    """Not even a status."""
    call.registry.closing.wait(30)
    call.hang_up()
    return True


def dribble(every: float) -> Behaviour:
    """The good answer, a byte each `every` seconds."""

    def behave(call: Call) -> bool:
        call.head()
        for byte in _bytes(call.answer.body):
            call.write(byte)
            if call.registry.closing.wait(every):
                break
        call.hang_up()
        return True

    return behave


def _bytes(data: bytes) -> Iterator[bytes]:
    return (data[index : index + 1] for index in range(len(data)))


def ignore_range(call: Call) -> bool:
    """The whole blob, whatever part was asked for."""
    data = call.registry.blobs[call.seen.path.rpartition("/")[2]]
    call.answer = Answer.of(200, data)
    return False


def redirect(to: str | Callable[[Call], str], status: int = 307) -> Behaviour:
    """A redirect."""

    def behave(call: Call) -> bool:
        location = to if isinstance(to, str) else to(call)
        call.answer = Answer.of(status, Location=location)
        return False

    return behave
