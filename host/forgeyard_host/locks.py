"""Locks between processes: flock'ed files, which the kernel lets go when their holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_alone(path: str | Path) -> int | None:
    """The file at `path`, made if missing, opened and locked; None when another has it. Closing it lets go."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_locked(path: str | Path) -> bool:
    """Whether somebody holds `path` alone; nobody holds a file that is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return is_held(fd)
    finally:
        os.close(fd)


def is_held(fd: int) -> bool:
    """Whether another open file of the one behind `fd` is locked alone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
