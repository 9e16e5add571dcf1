"""The command line in processes of its own, without its imports each time: they are forked from one that has them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

_PRELOADED: Final = ("commands", "forgeyard_api.cli", "forgeyard_api.operate.attempts", "forgeyard_api.client.attempt")
_NUMBERS: Final = count()
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(_PRELOADED))


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: bytes
    err: bytes


class Command:
    """One that runs.

    :param files: where its stdout and stderr go.
    """

    def __init__(self, process: BaseProcess, files: tuple[Path, Path]) -> None:
        self._process = process
        self._files = files

    @property
    def out(self) -> bytes:
        """What it has written up to now."""
        return self._files[0].read_bytes() if self._files[0].is_file() else b""

    async def lines(self, number: int) -> list[bytes]:
        """The first lines of its stdout, once they are there."""
        while self.out.count(b"\n") < number:
            if not self._process.is_alive():
                raise AssertionError(f"it has ended: {self._files[1].read_text()}")
            await asyncio.sleep(0.01)
        return self.out.splitlines()[:number]

    def terminate(self) -> None:
        """End it, as Ctrl-C would not."""
        self._process.terminate()

    async def ended(self) -> Ran:
        """What it did, once it has ended."""
        while self._process.is_alive():
            await asyncio.sleep(0.01)
        self._process.join()
        code, (out, err) = self._process.exitcode, self._files
        self._process.close()
        return Ran(0 if code is None else code, out.read_bytes() if out.is_file() else b"", err.read_bytes())


async def begin(directory: Path, *arguments: str, terminal: str = "") -> Command:
    """Start `forgeyard ARGUMENTS`, with its output to files in `directory`, or its stdout to `terminal`."""
    number = next(_NUMBERS)
    files = (Path(terminal) if terminal else directory / f"{number}.out", directory / f"{number}.err")
    process: Any = _CONTEXT.Process(target=_run, args=(arguments, *map(str, files)))
    await asyncio.to_thread(process.start)
    return Command(process, files)


def _run(arguments: tuple[str, ...], out: str, err: str) -> None:
    for fd, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    from forgeyard_api.main import run

    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
