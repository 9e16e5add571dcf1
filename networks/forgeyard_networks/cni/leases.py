"""Addresses that the plugin host-local has given out, read from its own files.

Plugins have come to skip the release when a namespace is gone, and say that all is well. What counts is the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.config import Conflist
from forgeyard_networks.names import is_address

_DEFAULT_DATA: Final = "/var/lib/cni/networks"  # host-local's own default
_LOCK_SECONDS: Final = 5.0
_LONGEST: Final = 512


@dataclass(frozen=True, slots=True)
class Lease:
    """One address in use. `ifname` is "" in files of old releases."""

    path: Path
    container: str
    ifname: str

    @property
    def address(self) -> str:
        """Which one."""
        return self.path.name

    def belongs_to(self, attachment: Attachment) -> bool:
        """Whether that is its holder."""
        return self.container == attachment.container and self.ifname in ("", attachment.ifname)


def lease_directories(config: Conflist) -> list[Path]:
    """Where host-local keeps the leases of this network; none when nothing in it uses host-local."""
    local = [plugin.ipam for plugin in config.plugins if plugin.ipam.get("type") == "host-local"]
    found = [Path(str(ipam.get("dataDir") or _DEFAULT_DATA)) / config.name for ipam in local]
    return list(dict.fromkeys(found))


def leases(directory: Path) -> list[Lease]:
    """All in `directory`; a directory that is not there has none. Blocking.

    :raises OSError: it can't be read.
    """
    found = []
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    for path in paths:
        if not is_address(path.name):
            continue
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            container, _, ifname = file.read(_LONGEST).decode("utf-8", "replace").strip().partition("\r\n")
            found.append(Lease(path, container.strip(), ifname.strip()))
    return found


def held(config: Conflist, attachment: Attachment) -> list[Lease]:
    """Leases of `attachment`. Blocking.

    :raises OSError: as `leases`.
    """
    return [lease for place in lease_directories(config) for lease in leases(place) if lease.belongs_to(attachment)]


def release(directory: Path, stale: Callable[[Lease], bool]) -> list[Lease]:
    """Remove the leases that are `stale`, under host-local's own lock, which is taken only when there are some.

    Blocking, for five seconds at most.

    :return: what was removed.
    :raises OSError: it can't be read or written. TimeoutError: host-local's lock is held.
    """
    if not any(map(stale, leases(directory))):
        return []
    with _locked(directory):
        # Read again: only under the lock is a lease still the one that its file names.
        found = [lease for lease in leases(directory) if stale(lease)]
        for lease in found:
            lease.path.unlink(missing_ok=True)
    return found


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the lock of {directory} is held") from error
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)
