"""Images that are ready, for the jobs that use them: what the warm way needs, and no more of the store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import JobUser, RootfsPlan
from forgeyard_oci.image_user import resolve_user
from forgeyard_oci.records import ImageRecord
from forgeyard_oci.store_parts import StoreParts
from forgeyard_oci.unpack_merged import MergedTree

_MAX_CACHED: Final = 256


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image whose layers are all there. `users`: identities looked up so far, by their text."""

    record: ImageRecord
    plan: RootfsPlan
    users: dict[str, JobUser] = field(default_factory=dict)

    def user(self, override: str | None) -> JobUser:
        """Whom a job runs as: `override`, or the image's USER.

        :raises InvalidRequest: one the image does not know.
        """
        if override == "":
            raise InvalidRequest("user", override, "write a name or a uid, or leave it out for the image's USER")
        text = self.record.user if override is None else override
        if (known := self.users.get(text)) is None:
            field_name = "user" if override is not None else "image USER"
            known = self.users[text] = resolve_user(text, MergedTree(self.plan.lowers), field=field_name)
        return known


class ReadyImages:
    """The ready images of a store, by the digest asked for and the platform."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._known: dict[tuple[str, str], ReadyImage] = {}

    def get(self, digest: str, platform: str) -> ReadyImage | None:
        """An image, held for the hold() to come; None when something of it is missing."""
        ready = self._known.get((digest, platform))
        if ready is None:
            record = self._parts.records.load(digest, platform)
            if record is None or not self._believed(record):
                return None
            ready = self.add(record)
        # Held first: what is seen to be there then stays there.
        self._parts.holds.keep(ready.record.digest)
        if self._parts.records.use(digest, platform) and all(map(os.path.isdir, ready.plan.lowers)):
            return ready
        self._parts.holds.drop(ready.record.digest)
        self._known.pop((digest, platform), None)
        return None

    def add(self, record: ImageRecord) -> ReadyImage:
        """Remember an image."""
        ready = ReadyImage(record, record.rootfs(self._parts.paths.layers))
        if record.default_user is not None:
            ready.users[record.user] = record.default_user
        if len(self._known) >= _MAX_CACHED:
            self._known.pop(next(iter(self._known)), None)
        self._known[record.requested, record.platform] = ready
        return ready

    def is_whole(self, ready: ReadyImage) -> bool:
        """Whether the store has all blobs of an image, beside its trees."""
        return all(self._parts.blobs.has(digest, size) for digest, size in ready.record.blobs().items())

    def _believed(self, record: ImageRecord) -> bool:
        """Whether the trees can be trusted; looked at once in each boot."""
        layers = self._parts.layers
        if record.boot == layers.boot:
            return True
        if not layers.trusted(record.folders()):
            return False
        self._parts.records.save(replace(record, boot=layers.boot))
        return True
