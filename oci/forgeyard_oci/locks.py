"""Locks between threads and processes: flock'ed files, which the kernel lets go when their holder dies.

A lock's file may be removed by whoever holds it alone; everybody else notices that their file has no name any more
and opens it again. So no lock file outlives its use, and none is ever held by one and remade by another.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from forgeyard_oci.registry.budget import Budget

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_WAIT: Final = 0.002
_LONGEST_WAIT: Final = 0.1


def lock_shared(path: Path, *, make: bool = True) -> int:
    """Take a lock with others, waiting for whoever has it alone; a descriptor whose closing lets it go.

    :param make: create the lock's file.
    :raises FileNotFoundError: without `make`, when there is none.
    """
    while True:
        fd = os.open(path, _FLAGS if make else _FLAGS & ~os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def try_lock(path: Path) -> int | None:
    """Take a lock alone if nobody has it; a descriptor, or None."""
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


@contextmanager
def locked(path: Path, budget: Budget) -> Iterator[None]:
    """Hold a lock alone for the block, waiting as long as `budget` allows. Its file is gone afterwards.

    :raises ExecutorError: TIMEOUT or cancelled, as Budget.check() has it.
    """
    wait = _FIRST_WAIT
    while (fd := try_lock(path)) is None:
        budget.wait(wait)
        wait = min(wait * 2, _LONGEST_WAIT)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


@contextmanager
def store_lock(path: Path, *, alone: bool) -> Iterator[None]:
    """The store's own lock, held for moments: together by those who claim things, alone by those who remove some."""
    fd = os.open(path, _FLAGS, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def lock_owners(path: Path) -> tuple[int, ...]:
    """The processes that have locked a file, as far as this one may see them (proc(5), locks)."""
    owners: set[int] = set()
    with suppress(OSError):
        status = path.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and wanted in words and "->" not in words:
                owners.add(int(words[words.index(wanted) - 1]))
    return tuple(sorted(owners - {0, -1}))
