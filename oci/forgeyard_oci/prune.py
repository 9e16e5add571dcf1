"""Takes images out of a store, and what no image needs any more. Never what a job uses or a pull is about to.

Decisions are made under the store's lock, where nobody can start to use anything; what they take out is renamed into
trash/ there, and removed after the lock is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_oci.claims import claimed
from forgeyard_oci.image_errors import refused
from forgeyard_oci.image_info import PruneReport, RemoveReport
from forgeyard_oci.layers import EMPTY, RECORD, named_by
from forgeyard_oci.locks import store_lock, try_lock
from forgeyard_oci.reference import Reference
from forgeyard_oci.store_parts import StoredImage, StoreParts

_GRACE: Final = 3600.0
"""Seconds for which blobs, layers and downloads that nothing needs are kept: a later pull may go on with them."""


class Usage:
    """How many bytes images take, each shared blob and tree counted once."""

    def __init__(self, images: Iterable[StoredImage]) -> None:
        self._needed: Counter[str] = Counter()
        self.total = 0
        for image in images:
            for name, size in _parts(image):
                self.total += size if not self._needed[name] else 0
                self._needed[name] += 1

    def drop(self, image: StoredImage) -> int:
        """Take an image away; the bytes that only it needed."""
        freed = 0
        for name, size in _parts(image):
            self._needed[name] -= 1
            freed += size if not self._needed[name] else 0
        self.total -= freed
        return freed


def _parts(image: StoredImage) -> Iterator[tuple[str, int]]:
    yield from image.blobs().items()
    yield from image.folders().items()


class Collector:
    """Removal from one store. Safe beside pulls and jobs, also those of other processes."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts, self._paths = parts, parts.paths

    def rm(self, reference: Reference, digest: str) -> RemoveReport:
        """Take away a name; with its last name, or by digest, the image.

        :param digest: what the reference names in this store.
        :raises SandboxError: it is not there.
        :raises ExecutorError: a job uses it.
        """
        name = "" if reference.digest else str(reference)
        with self._removing() as trash:
            images = [image for image in self._parts.images() if image.is_called(digest)]
            names = self._parts.names.all()
            if not images and digest not in names.values():
                raise refused("not_present", f"image {reference} is not in the store")
            if name and any(other != name and named == digest for other, named in names.items()):
                return RemoveReport(self._parts.names.remove(lambda other, _: other == name), (), 0)
            if (held := self._parts.forget(images)) is not None:
                raise _in_use(str(reference), self._parts.holds.holders(held.digest))
            freed = self._take_unneeded(images, trash)
        return RemoveReport(self._remove_dangling(), tuple(image.digest for image in images), freed)

    def prune(self, unused_for: float | None, keep_bytes: int | None, free_bytes: int | None) -> PruneReport:
        """Remove the images that were used least recently, as ImageStore.prune() has it."""
        dropped: list[StoredImage] = []
        kept: list[str] = []
        with self._removing() as trash:
            images = sorted(self._parts.images(), key=lambda image: image.used)
            usage, now, freed = Usage(images), time.time(), 0
            for image in images:
                old = unused_for is not None and now - image.used >= unused_for
                large = keep_bytes is not None and usage.total > keep_bytes
                if not (old or large or (free_bytes is not None and freed < free_bytes)):
                    continue
                if self._parts.forget([image]) is None:
                    dropped.append(image)
                    freed += usage.drop(image)
                else:
                    kept.append(image.digest)
            freed = self._take_unneeded(dropped, trash) + self._take_leftovers(trash)
        return PruneReport(self._remove_dangling(), tuple(image.digest for image in dropped), tuple(kept), freed)

    def sweep(self, *, everything: bool) -> int:
        """Remove what killed processes and earlier failures left; how many things. See ImageStore.sweep()."""
        whole = everything or _is_old(self._paths.swept)
        left = any(any(folder.iterdir()) for folder in (self._paths.partial, self._paths.trash, self._paths.claims))
        if not (whole or left):
            return 0
        with self._removing() as trash:
            if whole:
                self._take_unneeded([], trash)
            self._take_leftovers(trash)
        if whole:
            self._remove_dangling()
            os.utime(self._paths.swept)
            if unmarked := self._parts.layers.unmarked():
                self._parts.layers.sync_later(unmarked)
        return len(trash)

    @contextmanager
    def _removing(self) -> Iterator[list[Path]]:
        """Hold the store for the block, then remove what it put into the list."""
        trash: list[Path] = []
        try:
            with store_lock(self._paths.store_lock, alone=True):
                yield trash
        finally:
            for path in trash:
                remove_tree(path)

    def _remove_dangling(self) -> tuple[str, ...]:
        """Take away names of what has no record any more. Last, since writing it takes room on the disk."""
        with store_lock(self._paths.store_lock, alone=True):
            known = {used.record.requested for used in self._parts.records.all()}
            claims = claimed(self._paths.claims)
            return self._parts.names.remove(lambda _, digest: digest not in known and digest not in claims)

    def _take_unneeded(self, dropped: list[StoredImage], trash: list[Path]) -> int:
        """Blobs and trees that no record and no pull needs: those of `dropped` at once, others when they are old."""
        claims = claimed(self._paths.claims)
        blobs, folders = set(claims), {EMPTY}
        for image in self._parts.images():
            blobs.update(image.blobs())
            folders.update(image.folders())
        now_blobs = {digest for image in dropped for digest in image.blobs()}
        now_folders = {folder for image in dropped for folder in image.folders()}
        freed = 0
        for digest, path in list(self._parts.blobs.all()):
            if digest not in blobs and (digest in now_blobs or _is_old(path)):
                freed += self._take(path, trash)
        for path in list(self._paths.layers.iterdir()):
            if path.name in folders or named_by(path.name) in claims:
                continue
            if path.name in now_folders or _is_old(path):
                freed += self._take(path, trash)
        return freed

    def _take_leftovers(self, trash: list[Path]) -> int:
        """What no living process is making: half-unpacked layers, old downloads and temporary files, lock files."""
        claims = claimed(self._paths.claims)
        freed = 0
        for path in list(self._paths.partial.iterdir()):
            if f"sha256:{path.name.partition('.')[0]}" not in claims:
                freed += self._take(path, trash)
        for path in list(self._paths.ingest.iterdir()):
            if f"sha256:{path.name}" not in claims and _is_old(path):
                freed += self._take(path, trash)
        trash.extend(path for path in self._paths.trash.iterdir() if path not in trash)
        for folder in (self._paths.records, self._paths.layout, self._paths.layout / "blobs" / "sha256"):
            trash.extend(path for path in folder.glob(".*") if _is_old(path))
        self._remove_lock_files()
        return freed

    def _remove_lock_files(self) -> None:
        used = {self._paths.store_lock, *(self._parts.holds.path(image.digest) for image in self._parts.images())}
        for path in {*self._paths.locks.iterdir(), *self._paths.holds.iterdir()} - used:
            with suppress(OSError):  # it is no loss to keep one, and a full disk must not stop the sweep
                fd = try_lock(path)
                if fd is not None:
                    path.unlink(missing_ok=True)
                    os.close(fd)

    def _take(self, path: Path, trash: list[Path]) -> int:
        """Take a file or tree out of use; the bytes it has."""
        size = _size(path)
        target = self._paths.trash / f"{path.name}.{secrets.token_hex(6)}"
        try:
            path.rename(target)
        except FileNotFoundError:
            return 0
        except OSError:
            # No space for a new name. Without its record a tree is no tree, however much of it is left.
            (path / RECORD).unlink(missing_ok=True)
            target = path
        trash.append(target)
        return size


def remove_tree(path: Path) -> None:
    """Remove what was taken out of use."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _GRACE
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if not path.is_dir() else _unpacked(path)
    except FileNotFoundError:
        return 0


def _unpacked(folder: Path) -> int:
    try:
        return int(json.loads((folder / RECORD).read_bytes())["report"]["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _in_use(shown: str, owners: tuple[int, ...]) -> ExecutorError:
    who = ", ".join(f"process {pid}" for pid in owners) or "a job"
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "image_in_use",
        f"image {shown} is in use by {who}",
        resolution="remove it when the jobs that run from it have ended",
    )
