"""What pulls in progress are about to use, so that nobody removes it under them.

A claim is a flock'ed file that lists digests: of blobs, of layers, of layer chains. It is written before a pull looks
whether something is there, under the store's lock; who removes things holds that lock alone. A claim that no lock
protects belongs to a process that died.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from forgeyard_oci.locks import store_lock, try_lock

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Claim:
    """One pull's claim; ends with the block, or with the process."""

    def __init__(self, folder: Path, lock: Path) -> None:
        self._path = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = lock
        self._digests: set[str] = set()
        with store_lock(lock, alone=False):
            self._fd = os.open(self._path, _FLAGS, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def add(self, *digests: str) -> None:
        """Claim more. From its return on none of them is removed."""
        if self._digests.issuperset(digests):
            return
        self._digests.update(digests)
        text = json.dumps(sorted(self._digests)).encode()
        with store_lock(self._lock, alone=False):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def claimed(folder: Path) -> set[str]:
    """All digests that living pulls claim; claims of the dead are removed. Under the store's lock, alone."""
    digests: set[str] = set()
    for path in list(folder.iterdir()):
        fd = try_lock(path)
        if fd is not None:
            path.unlink(missing_ok=True)
            os.close(fd)
            continue
        with suppress(FileNotFoundError):  # its pull has just ended, and what it wrote is in a record
            digests.update(json.loads(path.read_bytes() or b"[]"))
    return digests
