"""An engine's socket in a sandbox is root on the host: paths that are one, or hold one, are never given to a job."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ENGINE_SOCKETS: Final = (
    "/run/docker.sock",
    "/run/docker/containerd/containerd.sock",
    "/run/containerd/containerd.sock",
    "/run/podman/podman.sock",
    "/run/crio/crio.sock",
    "/run/buildkit/buildkitd.sock",
)
_NAMES: Final = frozenset(Path(path).name for path in ENGINE_SOCKETS)


def is_engine_socket(path: str, endpoints: Iterable[str] = ()) -> bool:
    """Whether `path` is a container engine's socket under any name, or a directory that has one somewhere below.

    :param endpoints: paths of sockets that are known beside the usual ones, such as the adapter's own.
    """
    real = os.path.realpath(path)
    try:
        info = os.stat(real)  # noqa: PTH116  of a path that realpath made
    except OSError:
        # Not there yet: judged by its name, since a daemon may come up later.
        return Path(real).name in _NAMES
    known = [os.path.realpath(socket) for socket in (*ENGINE_SOCKETS, *endpoints)]
    if stat.S_ISSOCK(info.st_mode):
        return Path(real).name in _NAMES or any(_same(info, socket) for socket in known)
    # Also one that is not there now: the directory would show it as soon as a daemon makes it.
    return any(socket.startswith(real.rstrip("/") + "/") for socket in known)


def _same(info: os.stat_result, path: str) -> bool:
    try:
        other = os.stat(path)  # noqa: PTH116  as above
    except OSError:
        return False
    return (info.st_dev, info.st_ino) == (other.st_dev, other.st_ino)
