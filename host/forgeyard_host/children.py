"""Waiting for a child process in the event loop, by its pidfd.

asyncio's own subprocess support is not used: its watcher on 3.11 starts a thread per process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Final

RESET_SIGNALS: Final = (
    signal.SIGPIPE,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGXFSZ,
)
"""What a child gets back: a program that ignores one of them would hand that on."""


async def wait_child(pid: int, seconds: float) -> int:
    """The exit code of our child `pid`, negative for a death by signal. It leads a process group of its own.

    Its group is killed when it takes longer, and also on cancellation: it must not go on for a caller who has left.

    :raises TimeoutError: it took longer than `seconds`.
    """
    pidfd = os.pidfd_open(pid)
    try:
        async with asyncio.timeout(seconds):
            await wait_readable(pidfd)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222  it was just killed
        raise
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # noqa: ASYNC222  its pidfd says it is dead


async def wait_readable(fd: int) -> None:
    """Until `fd` is readable; for a pidfd, until its process is dead."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _finish, done)
    try:
        await done
    finally:
        loop.remove_reader(fd)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
