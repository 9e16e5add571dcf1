"""One connection of a job to the fetch proxy: one request, its answer, its record."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from forgeyard_networks.proxy_head import Head, parse_head, read_head
from forgeyard_networks.proxy_policy import NotServed, ProxyLimits, ProxyPolicy
from forgeyard_networks.proxy_records import ProxyRecord, ProxyVerdict, shown_method
from forgeyard_networks.proxy_streams import Stream, Traffic
from forgeyard_networks.proxy_tunnel import tunnel
from forgeyard_networks.proxy_upstream import Outside

_MOST_TEXT: Final = 1000
_CONNECTED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
_EMPTY: Final = ProxyRecord("", "", 0, "", ProxyVerdict.FAILED, "cancelled", 0, 0, 0, 0.0)
_BY_POLICY: Final = "Forbidden by the network policy"


@dataclass(slots=True)
class Session:
    """A connection. `record`: what is known of it so far; `seen`: whether there is anything to tell."""

    policy: ProxyPolicy
    outside: Outside
    limits: ProxyLimits
    tunnels: asyncio.Semaphore
    record: ProxyRecord = _EMPTY
    seen: bool = False
    _traffic: Traffic = field(default_factory=Traffic)

    def result(self) -> ProxyRecord:
        """The record with its bytes."""
        return replace(self.record, bytes_up=self._traffic.up, bytes_down=self._traffic.down)

    async def run(self, connected: socket.socket) -> None:
        """Serve it; the socket is closed after."""
        job = await Stream.of(connected, self.limits.head_bytes)
        try:
            try:
                await self._serve(job)
            except NotServed as error:
                self._end(error.verdict, error.reason, error.status)
                await job.send(answer(error.status, error.text))
            await job.linger(self.limits.linger)
        except ConnectionError:
            self._left()
        finally:
            job.close()

    async def _serve(self, job: Stream) -> None:
        raw = await read_head(job.reader, self.limits)
        if not raw:
            return
        self.seen = True
        self.record = replace(self.record, method=shown_method(raw.split(b" ", 1)[0]))
        head = parse_head(raw, self.limits)
        self._where(head.target.host, head.target.port)
        if head.is_tunnel:
            await self._tunnel(job, head)
        else:
            await self._forward(job, head, len(raw))

    async def _tunnel(self, job: Stream, head: Head) -> None:
        self.policy.check(head.target)
        if self.tunnels.locked():
            raise NotServed(503, "too_many_tunnels", f"{self.limits.tunnels} tunnels are open already; close some")
        async with self.tunnels:
            reached = await self.outside.tunnel(head.target)
            try:
                self.record = replace(self.record, address=reached.address)
                self._end(ProxyVerdict.ALLOWED, "cut", 200)
                await job.send(_CONNECTED)
                await tunnel(job, reached.stream, self.limits, self._traffic)
            except NotServed as error:
                # The answer is long sent. A reset says what happened better than an end that looks like one.
                self._end(error.verdict, error.reason, 200)
                reached.stream.reset()
                job.reset()
            else:
                self._end(ProxyVerdict.ALLOWED, "", 200)
            finally:
                reached.stream.close()

    async def _forward(self, job: Stream, head: Head, size: int) -> None:
        from forgeyard_networks.proxy_forward import Exchange, Order

        credential = self.policy.credential(head.target)
        target = replace(head.target, port=credential.port) if credential else head.target
        self._where(target.host, target.port)
        self.policy.check(target)
        secure = credential is not None and credential.tls
        reached = await (self.outside.secure(target) if secure else self.outside.plain(target))
        self.record = replace(self.record, address=reached.address)
        self._traffic.up += size  # a head carries data as well
        exchange = Exchange(job, Order(head, target, reached, credential), self.limits, self._traffic)
        try:
            await exchange.run()
        except NotServed as error:
            reached.stream.reset()
            if not exchange.started:
                raise
            self._end(error.verdict, error.reason, exchange.status)
            job.reset()
        else:
            self._end(ProxyVerdict.ALLOWED, "", exchange.status)
        finally:
            reached.stream.close()

    def _where(self, host: str, port: int) -> None:
        self.record = replace(self.record, host=host, port=port)

    def _end(self, verdict: ProxyVerdict, reason: str, status: int) -> None:
        self.record = replace(self.record, verdict=verdict, reason=reason, status=status)
        self.seen = True

    def _left(self) -> None:
        """The job went away while something was still to be sent to it."""
        if self.record.verdict is ProxyVerdict.FAILED:
            self.record = replace(self.record, reason="job_left")


def answer(status: int, text: str) -> bytes:
    """An answer of the proxy's own: one line for people."""
    phrase = _BY_POLICY if status == HTTPStatus.FORBIDDEN else HTTPStatus(status).phrase
    body = f"forgeyard: {text[:_MOST_TEXT]}\n".encode()
    head = (
        f"HTTP/1.1 {status} {phrase}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
