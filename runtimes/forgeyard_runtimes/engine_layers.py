"""Layers that Podman or Docker unpacked, as directories: found, and known again while a job is prepared on them.

Neither engine has a hold on an image without a container that is made of it. Until there is one, open descriptors tell
whether the directories are still those that were mounted: a layer that was removed and loaded again may have its path,
but never its inode.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_oci.records import Records
from forgeyard_oci.store_paths import StorePaths


def layer_directories(graph: Mapping[str, Any], engine: str) -> tuple[str, ...]:
    """The layers of an image by its GraphDriver, topmost first, without symlinks.

    :raises ExecutorError: UNSUPPORTED, for a storage driver whose layers are no directories.
    """
    data = graph.get("Data") or {}
    top = data.get("UpperDir")
    if not top:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "engine_storage",
            f"{engine} keeps its images with the driver {graph.get('Name')}, whose layers are no directories",
            resolution=f'use its overlay driver, or rootfs = "own" for {engine}',
        )
    lower = [path for path in str(data.get("LowerDir") or "").split(":") if path]
    return tuple(os.path.realpath(path) for path in (top, *lower))


class HeldLayers:
    """Directories that are looked at again later. Blocking; `close` at the end."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._fds: list[int] = []

    @classmethod
    def open(cls, paths: Sequence[str]) -> Self:
        """Hold `paths`.

        :raises OSError: one is not there.
        """
        held = cls(paths)
        try:
            for path in paths:
                held._fds.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        except BaseException:
            held.close()
            raise
        return held

    def same(self) -> bool:
        """Whether each path still leads to the directory that it led to."""
        try:
            return all(
                os.path.samestat(Path(path).stat(), os.fstat(fd))
                for path, fd in zip(self.paths, self._fds, strict=True)
            )
        except OSError:
            return False

    def close(self) -> None:
        """Let go. Repeating it is no error."""
        while self._fds:
            os.close(self._fds.pop())


def image_removed(engine: str, identity: str) -> ExecutorError:
    """Somebody took the image away from the engine before the job had a container of it."""
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "image_removed",
        f"the image was removed at {engine} while a job was prepared on it",
        details=identity,
        resolution="run again: it is put there anew; look for whoever prunes images on this host",
    )


def other_image(engine: str, wanted: str, found: str) -> ExecutorError:
    """An engine says that it has, or runs, another image than it was told."""
    return ExecutorError(
        ExecutorErrorKind.LOST,
        "image_differs",
        f"{engine} has another image than the one that was asked for",
        details=f"wanted {wanted}, found {found}",
        resolution="look at what else changes images there; the job was not started",
    )


def known_images(store: str) -> frozenset[str]:
    """Digests of the manifests in our image store: what an engine may keep for us. Blocking."""
    paths = StorePaths(Path(store))
    if not store or not paths.records.is_dir():
        return frozenset()
    return frozenset(used.record.digest for used in Records(paths).all())
