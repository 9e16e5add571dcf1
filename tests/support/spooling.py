"""What the tests of the spool share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from forgeyard_runtimes.spool import OutputChunk, OutputPump, Spool

MIB = 1 << 20
Body = Callable[[OutputPump], Coroutine[Any, Any, None]]


def with_pump(body: Body) -> None:
    """Run `body` on an event loop of its own with a pump that is closed after it."""
    pump = OutputPump()
    try:
        asyncio.run(asyncio.wait_for(body(pump), 50))
    finally:
        pump.close()


async def collect(spool: Spool, **options: bool) -> list[OutputChunk]:
    return [chunk async for chunk in spool.reader(**options)]


def joined(chunks: list[OutputChunk], stream: str = "stdout") -> bytes:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream)
