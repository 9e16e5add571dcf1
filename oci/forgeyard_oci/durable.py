"""Small files that are whole or not there, and which file system a path is on."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file under another name and rename it; on failure nothing of it is left.

    :param sync: wait until the data is on the disk before it gets its name.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def filesystem_of(path: Path) -> str:
    """Where the file system that holds `path` is mounted, for messages."""
    place = path.absolute()
    while place != place.parent and not os.path.ismount(place):
        place = place.parent
    return str(place)
