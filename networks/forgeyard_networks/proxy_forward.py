"""One request of plain HTTP and its answer, each read and written anew: what goes out is framed by us, never copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import h11

from forgeyard_networks.proxy_head import Head, bad
from forgeyard_networks.proxy_policy import HTTP, HTTPS, NotServed, ProxyLimits, Target, UpstreamCredential, failed
from forgeyard_networks.proxy_records import ProxyVerdict
from forgeyard_networks.proxy_streams import CHUNK, Idle, Stream, Traffic, together
from forgeyard_networks.proxy_upstream import Reached

_MOST_ANSWER_HEAD: Final = 64 << 10
_CLOSE: Final = (b"Connection", b"close")
_PROXY_REFUSED: Final = 407
# RFC 9110, section 7.6.1, with what older clients send.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS: Final = frozenset({b"host", b"content-length"})

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Order:
    """What to send and where. `target`: with the port that is really connected to."""

    head: Head
    target: Target
    reached: Reached
    credential: UpstreamCredential | None


class Exchange:
    """A request on its way. `started`: whether the job has a part of the answer; `status`: of it."""

    def __init__(self, job: Stream, order: Order, limits: ProxyLimits, traffic: Traffic) -> None:
        self.started = False
        self.status = 0
        self._job, self._order, self._limits, self._traffic = job, order, limits, traffic
        self._far = order.reached.stream
        self._near_state = order.head.connection
        self._far_state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_ANSWER_HEAD)
        self._idle = Idle(limits.idle_time)

    async def run(self) -> None:
        """Until the answer is whole.

        :raises NotServed: when it can't be; `started` says whether the job can still be told.
        """
        try:
            async with self._idle:
                await self._far.send(self._sent(outgoing(self._order)))
                # An answer may come before the body ends, and ends the exchange then.
                await together(self._pass_answer(), beside=self._pass_body())
        except OSError as error:
            if self._idle.expired:
                text = f"{self._order.target}: no byte moved for {self._limits.idle_time:g} s"
                raise NotServed(504, "idle", text, ProxyVerdict.FAILED) from None
            raise failed("reset", f"{self._order.target}: the connection broke") from error

    async def _pass_body(self) -> None:
        while True:
            try:
                event = await self._next(self._near_state, self._job, self._from_job)
            except h11.RemoteProtocolError as error:
                raise bad("bad_body", f"bad request body: {error}") from None
            # Trailers end here: what they would add to the head comes too late to be checked.
            event = event if isinstance(event, h11.Data) else h11.EndOfMessage()
            try:
                await self._far.send(self._sent(event))
            except ConnectionError:
                return  # it has what it wants and answers, or the answer's reader finds the connection broken
            if isinstance(event, h11.EndOfMessage):
                return

    async def _pass_answer(self) -> None:
        while True:
            try:
                event = await self._next(self._far_state, self._far, self._from_far)
            except h11.RemoteProtocolError as error:
                raise failed("bad_answer", f"{self._order.target}: bad answer: {error}") from None
            if isinstance(event, h11.Response):
                event = self._answer(event)
            elif isinstance(event, h11.InformationalResponse):
                if self._near_state.their_http_version != b"1.1":
                    continue
            elif not isinstance(event, h11.Data | h11.EndOfMessage):
                raise failed("no_answer", f"{self._order.target}: the connection closed without an answer")
            await self._to_job(event)
            if isinstance(event, h11.EndOfMessage):
                return

    def _answer(self, event: h11.Response) -> h11.Response:
        if event.status_code == _PROXY_REFUSED:
            raise failed("upstream_proxy", f"{self._order.target}: a proxy on the way wants credentials")
        self.status, self.started = event.status_code, True
        kept = _end_to_end(tuple(event.headers.raw_items()))
        chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        lengths = () if chunked else _named(tuple(event.headers.raw_items()), b"content-length")
        return h11.Response(status_code=event.status_code, reason=event.reason, headers=[*kept, *lengths, _CLOSE])

    async def _to_job(self, event: h11.Event) -> None:
        if data := self._near_state.send(event):
            await self._job.send(data)

    def _sent(self, event: h11.Event) -> bytes:
        return self._far_state.send(event) or b""

    async def _next(self, state: h11.Connection, stream: Stream, moved: Callable[[int], None]) -> h11.Event:
        while not isinstance(event := state.next_event(), h11.Event):
            data = await stream.reader.read(CHUNK)
            moved(len(data))
            state.receive_data(data)
        return event

    def _from_job(self, size: int) -> None:
        self._traffic.up += size
        self._idle.touch()

    def _from_far(self, size: int) -> None:
        self._traffic.down += size
        self._idle.touch()


def outgoing(order: Order) -> h11.Request:
    """The request as the target gets it."""
    head, target, credential = order.head, order.target, order.credential
    tls = credential is not None and credential.tls
    authority = target.host if target.port == (HTTPS if tls else HTTP) else str(target)
    path = f"http://{authority}{head.path}" if order.reached.absolute else head.path
    return h11.Request(method=head.method, target=path, headers=list(_sent_headers(order, authority)))


def _sent_headers(order: Order, authority: str) -> Iterator[tuple[bytes, bytes]]:
    head, credential = order.head, order.credential
    replaced = {b"authorization", credential.header.lower().encode()} if credential else set()
    yield b"Host", authority.encode()
    for name, value in _end_to_end(head.headers):
        if name.lower() not in replaced:
            yield name, value
    yield from _named(head.headers, b"content-length")
    yield from _named(head.headers, b"transfer-encoding")
    if credential:
        yield credential.header.encode(), credential.value.encode()
    if order.reached.authorization:
        yield b"Proxy-Authorization", order.reached.authorization.encode()
    yield _CLOSE


def _end_to_end(headers: Headers) -> Headers:
    """Without those of one connection, those that Connection names, and those that we write ourselves."""
    named = {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }
    gone = _HOP_BY_HOP | _OURS | named
    return tuple((name, value) for name, value in headers if name.lower() not in gone)


def _named(headers: Headers, wanted: bytes) -> Headers:
    return tuple((name, value) for name, value in headers if name.lower() == wanted)
