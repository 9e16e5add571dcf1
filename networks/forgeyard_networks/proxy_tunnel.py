"""Bytes both ways between a job and where it was connected to, until both sides are done."""

from __future__ import annotations

from collections.abc import Callable

from forgeyard_networks.proxy_policy import ProxyLimits, failed
from forgeyard_networks.proxy_streams import CHUNK, Idle, Stream, Traffic, together


async def tunnel(job: Stream, far: Stream, limits: ProxyLimits, traffic: Traffic) -> None:
    """Pass bytes. One side that ends is told to the other, which may go on.

    :raises NotServed: nothing moved for too long, or one side was reset; there is nobody to tell but the audit.
    """
    idle = Idle(limits.idle_time)

    def up(size: int) -> None:
        traffic.up += size
        idle.touch()

    def down(size: int) -> None:
        traffic.down += size
        idle.touch()

    try:
        async with idle:
            await together(_pass(job, far, up), _pass(far, job, down))
    except OSError as error:
        if idle.expired:
            raise failed("idle", f"no byte moved for {limits.idle_time:g} s") from None
        raise failed("reset", "one side of the tunnel broke") from error


async def _pass(source: Stream, sink: Stream, moved: Callable[[int], None]) -> None:
    while data := await source.reader.read(CHUNK):
        await sink.send(data)
        moved(len(data))
    sink.end()
