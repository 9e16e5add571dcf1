"""Does a line of a service's output show that it is ready?

Pattern and lines both come from people we don't trust, and a regular expression can take longer than the universe has
left. So a search runs in a process of its own, which the kernel ends when it has used its seconds of processor time.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from typing import Final, Protocol

from forgeyard_model.services import LogProbe

MOST_CPU: Final = 5
"""Seconds of processor time, for all lines of one service together."""
_SEARCH: Final = """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
search = re.compile(sys.argv[1]).search
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(b"y" if search(line[:-1].decode("utf-8", "replace")) else b"n")
    sys.stdout.buffer.flush()
"""


class SearchError(Exception):
    """The search could not be done; the message says why."""


class LineMatcher(Protocol):
    """Looks at lines, one after the other."""

    async def matches(self, line: str) -> bool:
        """Whether this is the line.

        :raises SearchError: it can't be told.
        """
        ...

    async def close(self) -> None:
        """Let go of what it holds. Idempotent."""
        ...


def line_matcher(probe: LogProbe, *, most_cpu: int = MOST_CPU) -> LineMatcher:
    """What looks for the line of `probe`. `most_cpu`: whole seconds, for a regular expression."""
    return _Search(probe.text, most_cpu) if probe.regex else _Text(probe.text)


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    async def matches(self, line: str) -> bool:
        return self._text in line

    async def close(self) -> None:
        pass


class _Search:
    def __init__(self, pattern: str, most_cpu: int) -> None:
        self._pattern = pattern
        self._most_cpu = most_cpu
        self._process: asyncio.subprocess.Process | None = None

    async def matches(self, line: str) -> bool:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _SEARCH, self._pattern, str(self._most_cpu)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={},
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise SearchError("no process to search in")
        try:
            stdin.write(line.encode("utf-8", "replace") + b"\n")
            await stdin.drain()
            return await stdout.readexactly(1) == b"y"
        except (OSError, asyncio.IncompleteReadError) as error:
            ended = await self._process.wait()
            why = f"took more than {self._most_cpu}s of processor time" if ended == -signal.SIGKILL else "broke off"
            raise SearchError(f"the search for {self._pattern!r} in its lines {why}") from error

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
