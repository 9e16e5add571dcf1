"""Who uses the host's rules: a locked file for each executor, in a directory for each network namespace.

Apart from the rules themselves, so that a look at what a dead executor left costs no more than that.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

from forgeyard_host.locks import is_held

HOST_RULES: Final = Path("/run/forgeyard/net")
_SO_NETNS_COOKIE: Final = 71


def namespace_key() -> str:
    """Names the caller's network namespace like no other since the host's start."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
        try:
            cookie = asked.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:  # before Linux 5.14: a number that another namespace may get after this one's end
            return f"inode-{Path('/proc/thread-self/ns/net').stat().st_ino}"
    return f"netns-{int.from_bytes(cookie, sys.byteorder)}"


def live(path: Path) -> str | None:
    """What an executor that lives wrote into its file; None for a dead one's, which is removed."""
    text = _text(path)
    if text is None:
        path.unlink(missing_ok=True)
    return text


def abandoned(lock_dir: Path, key: str | None = None) -> bool:
    """Whether there are executors that were killed, and none that lives. `key`: of a namespace, None for the caller's.

    Nothing is changed.
    """
    files = tuple((lock_dir / (key or namespace_key())).glob("user.*"))
    return bool(files) and all(_text(path) is None for path in files)


def _text(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, 64).decode() if is_held(fd) else None
    finally:
        os.close(fd)
