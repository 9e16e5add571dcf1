"""Who uses which image: a shared lock per image, which dies with its process.

Between `prepare` and `hold` an image must not go. So prepare leaves a hold of its own behind, which the next `hold`
of that image in this process takes over; one that nobody takes over ends after a minute, when the store is next used.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from forgeyard_oci.locks import lock_owners, lock_shared, try_lock
from forgeyard_oci.store_paths import hex_of

_UNCLAIMED: Final = 60.0
"""Seconds that prepare's own hold lasts."""


class ImageHold:
    """Keeps an image from being removed until closed, or until the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Let the image go. More than once does no harm."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Pending:
    """One lock for all prepares of an image that no hold followed yet; when each of them ends."""

    fd: int
    ends: list[float] = field(default_factory=list)


class Holds:
    """The locks of a store's images, by the manifest's digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard = threading.Lock()
        self._pending: dict[str, _Pending] = {}

    def path(self, digest: str) -> Path:
        """The lock's file."""
        return self._folder / hex_of(digest)

    def keep(self, digest: str) -> None:
        """Hold an image for the `hold` that follows."""
        with self._guard:
            self._expire()
            pending = self._pending.get(digest)
            if pending is None:
                pending = self._pending[digest] = _Pending(lock_shared(self.path(digest)))
            pending.ends.append(time.monotonic() + _UNCLAIMED)

    def hold(self, digest: str) -> ImageHold:
        """Hold an image, in place of one earlier `keep`.

        :raises FileNotFoundError: the image was removed since.
        """
        fd = lock_shared(self.path(digest), make=False)
        self.drop(digest)
        return ImageHold(fd)

    def drop(self, digest: str) -> None:
        """End one `keep`."""
        with self._guard:
            self._expire()
            pending = self._pending.get(digest)
            if pending is None:
                return
            pending.ends.pop(0)
            if not pending.ends:
                self._close(digest)

    def seize(self, digest: str) -> int | None:
        """Lock an image that nobody holds against new holds; a descriptor, None when it is held."""
        with self._guard:
            self._expire()
        return try_lock(self.path(digest))

    def free(self, digest: str, fd: int, *, gone: bool) -> None:
        """End a seizure. gone: the image is no more, and the lock's file goes with it.

        Otherwise the file stays: on a full disk there is no room to make it again, and room is what pruning is for.
        """
        if gone:
            self.path(digest).unlink(missing_ok=True)
        os.close(fd)

    def is_held(self, digest: str) -> bool:
        """Whether anybody, here or in another process, holds an image now."""
        if not self.path(digest).exists():
            return False
        fd = self.seize(digest)
        if fd is not None:
            self.free(digest, fd, gone=False)
        return fd is None

    def holders(self, digest: str) -> tuple[int, ...]:
        """The processes that hold an image."""
        return lock_owners(self.path(digest))

    def close(self) -> None:
        """End what prepares left behind."""
        with self._guard:
            for digest in list(self._pending):
                self._close(digest)

    def _expire(self) -> None:
        now = time.monotonic()
        for digest, pending in list(self._pending.items()):
            pending.ends = [end for end in pending.ends if end > now]
            if not pending.ends:
                self._close(digest)

    def _close(self, digest: str) -> None:
        os.close(self._pending.pop(digest).fd)
