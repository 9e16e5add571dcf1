"""One probe of a service, of each kind: by its address, never by a name. That none overlap is the caller's part."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from forgeyard_model.services import HttpProbe
from forgeyard_model.units import format_duration
from forgeyard_services.contract import ProbeOutcome, RunningService
from forgeyard_services.log_lines import last_lines

_SHOWN_LINES: Final = 3
_MOST_STATUS_LINE: Final = 4096
"""Bytes. A server that sends no end of line has not answered."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one probe found. `said`: in words, for people. Ports: where several were tried."""

    ok: bool
    said: str
    ports_open: tuple[int, ...] = ()
    ports_shut: tuple[int, ...] = ()


Prober = Callable[[float], Awaitable[Reading]]
"""Makes one probe, for at most so many seconds. Cancelled, it leaves nothing running."""


def exec_prober(service: RunningService, argv: tuple[str, ...]) -> Prober:
    """A command inside the service that exits 0."""

    async def probe(seconds: float) -> Reading:
        outcome = await service.probe(argv, seconds)
        exited = outcome.exit is not None and outcome.exit.ok
        return Reading(exited and not outcome.timed_out, _words(outcome, seconds))

    return probe


def _words(outcome: ProbeOutcome, seconds: float) -> str:
    if outcome.timed_out:
        how = f"killed after {format_duration(seconds)}"
    else:
        how = str(outcome.exit) if outcome.exit is not None else f"could not be run: {outcome.error}"
    said = " | ".join(line.strip() for line in last_lines(outcome.output, _SHOWN_LINES) if line.strip())
    return f"{how}: {said}" if said else how


def port_prober(service: RunningService, port: int) -> Prober:
    """A connection that the service accepts."""

    async def probe(seconds: float) -> Reading:
        error = await _try_port(service, port, seconds)
        return Reading(not error, f"port {port}: {error or 'accepts connections'}")

    return probe


def ports_prober(service: RunningService, ports: Sequence[int]) -> Prober:
    """A connection to any of `ports`; all are tried at once, so that it is known which are open."""

    async def probe(seconds: float) -> Reading:
        errors = await asyncio.gather(*(_try_port(service, port, seconds) for port in ports))
        found = dict(zip(ports, errors, strict=True))
        opened = tuple(port for port, error in found.items() if not error)
        said = "; ".join(f"port {port}: {error or 'accepts connections'}" for port, error in found.items())
        return Reading(bool(opened), said, opened, tuple(port for port, error in found.items() if error))

    return probe


async def _try_port(service: RunningService, port: int, seconds: float) -> str:
    """Empty when it accepts, else why not."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await service.connect(port, seconds)
            await _close(writer)
    except TimeoutError:
        return f"no answer in {format_duration(seconds)}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):  # it was there, which is all that was asked
        await writer.wait_closed()


def http_prober(service: RunningService, wanted: HttpProbe) -> Prober:
    """A GET request that is answered with a status that is wanted."""

    async def probe(seconds: float) -> Reading:
        asked = f"GET :{wanted.port}{wanted.path}"
        try:
            async with asyncio.timeout(seconds):
                line = await _status_line(service, wanted, seconds)
        except TimeoutError:
            return Reading(False, f"{asked}: no answer in {format_duration(seconds)}")
        except OSError as error:
            return Reading(False, f"{asked}: {error.strerror or error}")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return Reading(False, f"{asked}: closed without an HTTP answer")
        return Reading(_is_wanted(line, wanted.statuses), f"{asked}: {line[:80]}")

    return probe


async def _status_line(service: RunningService, wanted: HttpProbe, seconds: float) -> str:
    reader, writer = await service.connect(wanted.port, seconds)
    try:
        # 1.0: an answer of one piece and then the end, from every server.
        head = f"GET {wanted.path} HTTP/1.0\r\nHost: {service.address}:{wanted.port}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode("ascii"))
        await writer.drain()
        line = await reader.readuntil(b"\n")
    finally:
        await _close(writer)
    return line[:_MOST_STATUS_LINE].decode("latin-1").strip()


def _is_wanted(line: str, statuses: tuple[int, ...]) -> bool:
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/") or not (code.isascii() and code.isdigit()):
        return False
    return int(code) in statuses if statuses else 200 <= int(code) < 400
