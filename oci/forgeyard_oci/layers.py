"""Unpacked layers, shared by every job: one directory per layer, made once, trusted because of how it came to be.

A tree is trusted in the boot it was unpacked in. After a crash of the machine a file system may have kept a directory
and lost what was in it, so in any later boot it is trusted only if all of it had reached the disk: `synced` says so.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_host.processes import boot_id
from forgeyard_oci.durable import write_whole
from forgeyard_oci.locks import locked
from forgeyard_oci.reference import sha256
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.store_paths import StorePaths, hex_of

if TYPE_CHECKING:
    from forgeyard_oci.unpack import UnpackReport

EMPTY: Final = "empty"
TREE: Final = "tree"
FILES: Final = "files"
RECORD: Final = "layer.json"
_SYNCED: Final = "synced"


@dataclass(frozen=True, slots=True)
class UnpackedLayer:
    """A tree that is there: its folder in layers/, the bytes of its files, and whether it hides all below it."""

    folder: str
    unpacked: int
    opaque_root: bool

    @property
    def lower(self) -> str:
        """The tree, relative to layers/."""
        return f"{self.folder}/{TREE}"


def chain_id(parent: str, diff_id: str) -> str:
    """Image spec, layer ChainID: names a layer together with everything below it."""
    return sha256(f"{parent} {diff_id}".encode()) if parent else diff_id


def named_by(folder: str) -> str:
    """The diff id or chain id that names a folder in layers/."""
    return f"sha256:{folder.removeprefix('chain-')}"


class LayerStore:
    """The trees of a store. Safe between threads and processes."""

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self.folder = paths.layers
        self.boot = boot_id()

    def empty(self) -> str:
        """A tree of nothing, relative to layers/: an image of no layers is legal, an overlay of none is not."""
        (self.folder / EMPTY).mkdir(mode=0o755, exist_ok=True)
        return EMPTY

    def find(self, diff_id: str, chain: str) -> UnpackedLayer | None:
        """The tree of a layer on top of those that `chain` names; None when there is none to be trusted."""
        for folder in (hex_of(diff_id), f"chain-{hex_of(chain)}"):
            if (layer := self._trusted(folder)) is not None:
                return layer
        return None

    def trusted(self, folders: Iterable[str]) -> bool:
        """Whether each folder holds a tree to be trusted."""
        return all(self._trusted(folder) is not None for folder in folders)

    def _trusted(self, folder: str) -> UnpackedLayer | None:
        place = self._paths.layers / folder
        try:
            words = json.loads((place / RECORD).read_bytes())
            believed = words["boot"] == self.boot or (place / _SYNCED).exists()
            report = words["report"]
            layer = UnpackedLayer(folder, int(report["bytes"]), bool(report["opaque_root"]))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        return layer if believed and (place / TREE).is_dir() else None

    def unpack(
        self, diff_id: str, chain: str, unpacker: Callable[[Path, Path], UnpackReport], budget: Budget
    ) -> UnpackedLayer:
        """The tree of a layer, unpacked by `unpacker(tree, files)` if it isn't there, once however many ask.

        :raises OSError: when the host can't write.
        """
        with locked(self._paths.locks / f"layer-{hex_of(diff_id)}", budget):
            if (known := self.find(diff_id, chain)) is not None:
                return known
            # A name of its own: what a killed process started may still be writing to the last attempt's.
            partial = self._paths.partial / f"{hex_of(diff_id)}.{secrets.token_hex(6)}"
            for left in self._paths.partial.glob(f"{hex_of(diff_id)}.*"):
                shutil.rmtree(left, ignore_errors=True)
            try:
                (partial / TREE).mkdir(parents=True)
                report = unpacker(partial / TREE, partial / FILES)
                words = {"diff_id": diff_id, "boot": self.boot, "report": asdict(report)}
                write_whole(partial / RECORD, json.dumps(words).encode())
                folder = f"chain-{hex_of(chain)}" if report.used_lowers else hex_of(diff_id)
                self._replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return UnpackedLayer(folder, report.bytes, report.opaque_root)

    def _replace(self, partial: Path, folder: str) -> None:
        target = self._paths.layers / folder
        if target.exists():  # not trusted, or it would have been found
            self.discard(folder)
        partial.rename(target)

    def discard(self, folder: str) -> Path:
        """Take a tree out of use at once; where it lies until it is removed."""
        trash = self._paths.trash / f"{folder}.{secrets.token_hex(6)}"
        (self._paths.layers / folder).rename(trash)
        return trash

    def sync(self, folders: Iterable[str]) -> None:
        """Write the trees to the disk and mark them. Slow: as long as the disk takes.

        :raises OSError: when the disk fails; then none is marked.
        """
        unmarked = [place for folder in folders if not (place := self._paths.layers / folder / _SYNCED).exists()]
        if not unmarked:
            return
        # ctypes is slow to import, and only this needs it.
        from forgeyard_host.syscalls import syncfs

        fd = os.open(self._paths.layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syncfs(fd, str(self._paths.layers))
        finally:
            os.close(fd)
        for mark in unmarked:
            with suppress(FileNotFoundError):  # removed meanwhile
                write_whole(mark, b"")

    def unmarked(self) -> tuple[str, ...]:
        """Folders of trees of this boot whose process ended before they were marked."""
        places = [place for place in self.folder.iterdir() if not (place / _SYNCED).exists()]
        return tuple(place.name for place in places if self._trusted(place.name) is not None)

    def sync_later(self, folders: Iterable[str]) -> threading.Thread:
        """The same beside what goes on; a process that ends before simply leaves its trees unmarked."""
        thread = threading.Thread(target=self._sync_quietly, args=(tuple(folders),), name="image-sync", daemon=True)
        thread.start()
        return thread

    def _sync_quietly(self, folders: tuple[str, ...]) -> None:
        # Without its mark a tree is unpacked again after the next boot, which is all that a failure here costs.
        with suppress(OSError):
            self.sync(folders)
