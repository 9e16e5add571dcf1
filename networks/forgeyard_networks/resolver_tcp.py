"""Questions by TCP (RFC 7766): those whose answers UDP can't hold, one after another on a connection."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from typing import Final

from forgeyard_networks.dns_wire import Malformed, parse, render
from forgeyard_networks.resolver_answers import Answers
from forgeyard_networks.resolver_audit import DnsAudit
from forgeyard_networks.resolver_limits import Bucket, ResolverLimits
from forgeyard_networks.resolver_policy import Decision

MOST_QUESTION: Final = 4096
"""Bytes. No question is longer; one that says so would only have us wait for it."""


class Connections:
    """The TCP connections of one resolver."""

    def __init__(self, answers: Answers, audit: DnsAudit, bucket: Bucket, limits: ResolverLimits) -> None:
        self._answers, self._audit, self._bucket, self._limits = answers, audit, bucket, limits
        self._clients: Counter[str] = Counter()

    def admit(self, client: str) -> bool:
        """Whether `client` may have one more; `serve` is to follow."""
        if self._clients[client] >= self._limits.connections:
            self._audit.refused_connections += 1
            return False
        self._clients[client] += 1
        return True

    async def serve(self, client: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the client ends it, is silent for too long or sends what is no question. The caller closes `writer`."""
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for all, and nothing is left at the end
        try:
            while await self._exchange(reader, writer):
                pass
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the client's choice
        finally:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(self._limits.idle):
            (size,) = struct.unpack(">H", await reader.readexactly(2))
            packet = await reader.readexactly(size) if size <= MOST_QUESTION else b""
        if delay := self._bucket.reserve():
            await asyncio.sleep(delay)
        self._audit.questions += 1
        try:
            question = parse(packet)
        except Malformed:
            self._audit.malformed += 1
            return False
        found = self._answers.known(question)
        reply = await self._answers.asked(question, found) if isinstance(found, Decision) else found
        data = render(question, reply)
        writer.write(struct.pack(">H", len(data)) + data)
        async with asyncio.timeout(self._limits.idle):
            await writer.drain()
        return True
