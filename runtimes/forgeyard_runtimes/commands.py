"""Run one runtime command: posix_spawn, a pidfd in the event loop, output in a memfd that is read to a bound.

Pipes would wait for an end-of-file that a detached container, which inherits them, never gives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_host.children import RESET_SIGNALS, wait_child

OUTPUT_LIMIT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished command. `code` is negative for a death by signal; output is cut at OUTPUT_LIMIT bytes."""

    argv: tuple[str, ...]
    code: int
    stdout: bytes
    stderr: bytes

    def shown(self) -> str:
        """Argv, exit and the end of stderr, for the details of an error."""
        tail = self.stderr.decode("utf-8", "replace").strip()[-2000:]
        return f"{' '.join(self.argv)} ended with {self.code}" + (f": {tail}" if tail else "")


class CommandTimeout(Exception):  # noqa: N818  names what happened; its catchers translate it
    """The command outlived its deadline and was killed."""


async def run_command(
    argv: Sequence[str], *, env: Mapping[str, str], deadline: float, netns: str | None = None
) -> Completed:
    """Run `argv` in a process group of its own, so that a terminal's Ctrl-C reaches us and not it.

    :param deadline: seconds; then the group is killed.
    :param netns: path of the network namespace that it is started in; None: our own.
    :raises CommandTimeout: when it was.
    :raises FileNotFoundError, PermissionError: when it can't be executed.
    """
    out = os.memfd_create("forgeyard-stdout", os.MFD_CLOEXEC)
    err = os.memfd_create("forgeyard-stderr", os.MFD_CLOEXEC)
    try:
        code = await wait_child(_spawn(argv, env, (out, err), netns), deadline)
        return Completed(tuple(argv), code, os.pread(out, OUTPUT_LIMIT, 0), os.pread(err, OUTPUT_LIMIT, 0))
    except TimeoutError as error:
        raise CommandTimeout(f"{' '.join(argv)} was killed after {deadline:g}s") from error
    finally:
        os.close(out)
        os.close(err)


def _spawn(argv: Sequence[str], env: Mapping[str, str], output: tuple[int, int], netns: str | None) -> int:
    """The pid. Quick: vfork takes under a millisecond, also from the thread that a namespace needs."""
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output[0], 1),
        (os.POSIX_SPAWN_DUP2, output[1], 2),
    ]

    def spawn() -> int:
        return os.posix_spawn(argv[0], list(argv), env, file_actions=actions, setpgroup=0, setsigdef=RESET_SIGNALS)

    if netns is None:
        return spawn()
    from forgeyard_host.netns import in_namespace

    fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return in_namespace(fd, spawn)
    finally:
        os.close(fd)
