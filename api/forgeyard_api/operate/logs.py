"""`forgeyard logs`: what an attempt's job, or one of its services, wrote and writes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forgeyard_api.main import say
from forgeyard_api.operate.server import Name, Socket, ask

if TYPE_CHECKING:
    from forgeyard_api.client.attempt import RemoteAttempt
    from forgeyard_api.client.calls import Calls
    from forgeyard_runtimes.spool_format import OutputChunk, SpoolMark

RECONNECT: Final = 30.0
"""Seconds for which a server that restarts is waited for while its output is followed."""
_FDS: Final = {"stdout": 1, "stderr": 2}


def logs(
    name: Name,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the attempt ends.")] = False,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="Of a service of its.")] = "",
    tail: Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="Only the last N lines so far.")] = (
        None
    ),
    raw: Annotated[bool, typer.Option("--raw", help="Escapes too, on a terminal.")] = False,
    socket: Socket = None,
) -> int:
    """Show the output of an attempt: stdout on stdout, stderr on stderr, byte for byte where that is no terminal."""

    async def show(calls: Calls) -> None:
        from forgeyard_api.client.attempt import RemoteAttempt
        from forgeyard_api.wire.messages import executor as wire

        # Whether there is such an attempt at all; without following, one that waits has no output and is no error.
        await calls.call("Inspect", wire.InspectRequest(attempt_id=name))
        attempt = RemoteAttempt(calls, name, "", reconnect=RECONNECT if follow else 0.0)
        shown = Shown(raw=raw)
        async with aclosing(read(attempt, service, tail=tail, follow=follow)) as chunks:
            async for chunk in chunks:
                shown.write(chunk)

    try:
        ask(socket, show)
    except BrokenPipeError:
        # Whoever read it has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


async def read(
    attempt: RemoteAttempt, service: str, *, tail: int | None, follow: bool
) -> AsyncGenerator[OutputChunk, None]:
    """What it wrote: all of it, or the last lines of what is there, then with `follow` what comes."""
    from forgeyard_runtimes.spool_format import START

    mark = START
    if tail is not None:
        last = Tail(tail)
        async for chunk in _of(attempt, service, mark, follow=False):
            last.add(chunk)
            mark = _after(mark, chunk)
        for chunk in last.chunks():
            yield chunk
        if not follow:
            return
    async for chunk in _of(attempt, service, mark, follow=follow):
        yield chunk


async def _of(attempt: RemoteAttempt, service: str, after: SpoolMark, *, follow: bool) -> AsyncIterator[OutputChunk]:
    chunks = (
        attempt.service_output(service, after=after, follow=follow)
        if service
        else attempt.output(after=after, follow=follow)
    )
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk


def _after(mark: SpoolMark, chunk: OutputChunk) -> SpoolMark:
    from dataclasses import replace

    passed = len(chunk.data) + chunk.dropped_before
    if chunk.stream == "stdout":
        return replace(mark, stdout=mark.stdout + passed)
    return replace(mark, stderr=mark.stderr + passed)


class Tail:
    """The last lines of what is added, those of both streams counted together, in the order of their ends."""

    def __init__(self, lines: int) -> None:
        self._lines: deque[OutputChunk] = deque(maxlen=lines)
        self._open: dict[str, OutputChunk] = {}

    def add(self, chunk: OutputChunk) -> None:
        """The next piece of output."""
        from dataclasses import replace

        begun = self._open.pop(chunk.stream, None)
        data = chunk.data if begun is None or chunk.dropped_before else begun.data + chunk.data
        *whole, rest = data.split(b"\n")
        self._lines.extend(replace(chunk, data=line + b"\n", dropped_before=0) for line in whole)
        if rest:
            self._open[chunk.stream] = replace(chunk, data=rest, dropped_before=0)

    def chunks(self) -> tuple[OutputChunk, ...]:
        """They, the unfinished ones at the end."""
        self._lines.extend(self._open.values())
        self._open = {}
        return tuple(self._lines)


class Shown:
    """Writes output to our own stdout and stderr; what goes to a terminal without what would steer it."""

    def __init__(self, *, raw: bool) -> None:
        from forgeyard_api.operate.terminal_text import TerminalText

        terminals = () if raw else [fd for fd in _FDS.values() if os.isatty(fd)]
        self._texts = {fd: TerminalText() for fd in terminals}

    def write(self, chunk: OutputChunk) -> None:
        """The next piece.

        :raises BrokenPipeError: nobody reads any more.
        """
        if chunk.dropped_before:
            say(f"{chunk.dropped_before} bytes of {chunk.stream} were not kept")
        fd = _FDS[chunk.stream]
        text = self._texts.get(fd)
        view = memoryview(chunk.data if text is None else text.feed(chunk.data))
        while view:
            view = view[os.write(fd, view) :]
