"""Where an image store keeps what.

::

    <root>/layout/          an OCI image layout: oci-layout, index.json (the names), blobs/sha256/
    <root>/ingest/<hex>     a blob being downloaded; what is left of one is resumed
    <root>/layers/<hex>/    one layer unpacked, by its diff id; chain-<chain id>/ for one that needed what lay below
        tree/               its files
        files               what they are, to be checked against
        layer.json          what was counted, and in which boot
        synced              the mark that all of it reached the disk
    <root>/partial/         layers being unpacked
    <root>/records/         one file for each image that is ready: all that a job needs to know of it
    <root>/holds/           locks of the images that jobs use
    <root>/claims/          what pulls in progress are going to use
    <root>/locks/           locks of single blobs and layers; locks/store for the whole
    <root>/trash/           taken out, not yet removed
    <root>/swept            when things that nothing needs were last looked for

The root is 0700: trees hold setuid programs that no user of this host may reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDERS: Final = ("ingest", "layers", "partial", "records", "holds", "claims", "locks", "trash")


@dataclass(frozen=True, slots=True)
class StorePaths:
    """The folders of one store."""

    root: Path

    def make(self) -> None:
        """Create what is missing."""
        if not (self.trash.is_dir() and (self.layout / "index.json").exists()):
            for name in FOLDERS:
                (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            # Now, while there is room: a full disk is swept under this lock.
            self.store_lock.touch(mode=0o600)
            self.swept.touch(mode=0o600)
        self.root.chmod(0o700)

    @property
    def layout(self) -> Path:
        """The OCI image layout."""
        return self.root / "layout"

    @property
    def ingest(self) -> Path:
        """Downloads in progress."""
        return self.root / "ingest"

    @property
    def layers(self) -> Path:
        """Unpacked layers."""
        return self.root / "layers"

    @property
    def partial(self) -> Path:
        """Layers being unpacked."""
        return self.root / "partial"

    @property
    def records(self) -> Path:
        """What is known of the images that are ready."""
        return self.root / "records"

    @property
    def holds(self) -> Path:
        """Locks of images in use."""
        return self.root / "holds"

    @property
    def claims(self) -> Path:
        """What pulls are going to use."""
        return self.root / "claims"

    @property
    def locks(self) -> Path:
        """Locks of single things."""
        return self.root / "locks"

    @property
    def trash(self) -> Path:
        """What is being removed."""
        return self.root / "trash"

    @property
    def swept(self) -> Path:
        """Its time is that of the last whole sweep."""
        return self.root / "swept"

    @property
    def store_lock(self) -> Path:
        """The lock of the store as a whole."""
        return self.root / "locks" / "store"


def hex_of(digest: str) -> str:
    """The digits of a digest, as a file name."""
    return digest.removeprefix("sha256:")
