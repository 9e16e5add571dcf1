"""Run one plugin: no shell, a small environment, a bound on its time and on what it prints."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forgeyard_host.children import RESET_SIGNALS, wait_child

OUTPUT_LIMIT: Final = 256 << 10
"""Bytes that a plugin may print, to stdout and to stderr each."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a plugin ended: `code` is negative for a death by signal. `overflowed`: it wanted to print more."""

    code: int
    stdout: bytes
    stderr: bytes
    overflowed: bool


async def execute(path: str, env: Mapping[str, str], stdin: bytes, seconds: float) -> Finished:
    """Run the program at `path` in a process group of its own, in the network namespace of the calling thread.

    :param seconds: then the group is killed, and what the plugin started with it.
    :raises TimeoutError: when it was.
    :raises OSError: when it can't be executed.
    """
    with contextlib.ExitStack() as stack:
        given, out, err = (_memory(stack, name) for name in ("stdin", "stdout", "stderr"))
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        for fd in (out, err):
            # Full from the start and never larger: a plugin that prints without end gets an error, and we no memory.
            os.ftruncate(fd, OUTPUT_LIMIT)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        code = await wait_child(_spawn(path, env, (given, out, err)), seconds)
        overflowed = os.lseek(out, 0, os.SEEK_CUR) >= OUTPUT_LIMIT
        return Finished(code, _written(out), _written(err), overflowed)


def _memory(stack: contextlib.ExitStack, name: str) -> int:
    fd = os.memfd_create(f"forgeyard-cni-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    return fd


def _written(fd: int) -> bytes:
    """What lies before the zeros that nobody wrote over."""
    return os.pread(fd, OUTPUT_LIMIT, 0).rstrip(b"\0")


def _spawn(path: str, env: Mapping[str, str], fds: tuple[int, int, int]) -> int:
    """The pid. Quick: vfork takes under a millisecond."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    return os.posix_spawn(path, [path], env, file_actions=actions, setpgroup=0, setsigdef=RESET_SIGNALS)
