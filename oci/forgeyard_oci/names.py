"""The names of a store's images: descriptors in the layout's index.json, with org.opencontainers.image.ref.name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forgeyard_oci.durable import write_whole
from forgeyard_oci.locks import locked
from forgeyard_oci.reference import REF_NAME
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.store_paths import StorePaths


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest, index or config of the store: its digest, bytes and media type."""

    digest: str
    size: int
    media_type: str


class Names:
    """Full references, ``registry/repository:tag`` or ``…@sha256:…``, and what they name."""

    def __init__(self, paths: StorePaths) -> None:
        self._index = paths.layout / "index.json"
        self._lock = paths.locks / "index"

    def all(self) -> dict[str, str]:
        """Digest by name."""
        entries = self._read()["manifests"]
        return {name: str(entry["digest"]) for entry in entries if (name := _name(entry))}

    def set(self, name: str, document: Document) -> None:
        """Give a name, or point it at something else."""
        entry = {
            "mediaType": document.media_type,
            "digest": document.digest,
            "size": document.size,
            "annotations": {REF_NAME: name},
        }

        def change(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
            if entry in entries:
                return entries
            return [*(other for other in entries if _name(other) != name), entry]

        self._change(change)

    def remove(self, unwanted: Callable[[str, str], bool]) -> tuple[str, ...]:
        """Take away the names for which `unwanted(name, digest)` is true; which they were."""
        removed: list[str] = []
        if not any(unwanted(_name(entry), str(entry["digest"])) for entry in self._read()["manifests"]):
            return ()  # nothing to write, which a full disk would not take

        def change(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
            kept = []
            for entry in entries:
                if unwanted(_name(entry), str(entry["digest"])):
                    removed.append(_name(entry))
                else:
                    kept.append(entry)
            return kept

        self._change(change)
        return tuple(filter(None, removed))

    def _change(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        with locked(self._lock, Budget()):
            index = self._read()
            entries = change(index["manifests"])
            if entries != index["manifests"]:
                text = json.dumps({**index, "manifests": entries}, indent=1)
                write_whole(self._index, text.encode(), sync=True)

    def _read(self) -> dict[str, Any]:
        """The index; one that can't be read holds no names. Images are found by their records all the same."""
        try:
            index = json.loads(self._index.read_bytes())
            entries = [entry for entry in index["manifests"] if isinstance(entry["digest"], str)]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            index, entries = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json"}, []
        return {**index, "manifests": entries}


def _name(entry: dict[str, Any]) -> str:
    annotations = entry.get("annotations")
    name = annotations.get(REF_NAME, "") if isinstance(annotations, dict) else ""
    return name if isinstance(name, str) else ""
