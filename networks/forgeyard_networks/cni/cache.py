"""What was attached with which configuration, kept on disk so that it is taken back with the same.

An entry is there before the first plugin runs. Whoever finds one without an owner knows that something may be left,
and has all that DEL needs, whatever became of the conflist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from forgeyard_model.errors import InvalidRequest, SandboxError
from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.config import Conflist, conflist_of
from forgeyard_networks.cni.failures import setup_failed

DEFAULT_CACHE: Final = "/var/lib/forgeyard/cni/results"
_VERSION: Final = 1
_LARGEST: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One attachment.

    :ivar added: False from before the first plugin until after the last.
    :ivar netns: path of the namespace, and `inode` which one it was then.
    :ivar config: as it was used; None when the entry can't be read, which leaves its name alone.
    :ivar result: printed by the last plugin that succeeded.
    """

    attachment: Attachment
    added: bool = False
    netns: str = ""
    inode: int = 0
    args: Mapping[str, str] | None = None
    runtime_config: Mapping[str, Any] | None = None
    config: Conflist | None = None
    result: Mapping[str, Any] | None = None

    def text(self) -> bytes:
        """As a file holds it."""
        assert self.config is not None  # noqa: S101  only entries that were read can lack one
        return json.dumps(
            {
                "version": _VERSION,
                "state": "added" if self.added else "adding",
                "netns": self.netns,
                "inode": self.inode,
                "args": dict(self.args or {}),
                "runtimeConfig": dict(self.runtime_config or {}),
                "cniVersion": self.config.version,
                "source": self.config.source,
                "config": self.config.raw,
                "result": self.result,
            }
        ).encode()

    @classmethod
    def parse(cls, attachment: Attachment, text: bytes) -> Self:
        """From a file.

        :raises ValueError, KeyError, TypeError, InvalidRequest: it is none of ours.
        """
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise ValueError("another version's entry")
        config = conflist_of(data["config"], data["source"])
        if data["cniVersion"] not in config.versions:
            raise ValueError("a version that the configuration does not offer")
        return cls(
            attachment,
            data["state"] == "added",
            data["netns"],
            int(data["inode"]),
            dict(data["args"]),
            dict(data["runtimeConfig"]),
            config.at(data["cniVersion"]),
            data["result"],
        )


class Cache:
    """The entries in one directory. Not synced: what a power failure takes, the leases of our names still tell."""

    def __init__(self, directory: str = DEFAULT_CACHE) -> None:
        self._dir = Path(directory)

    def begin(self, entry: Entry) -> None:
        """Write down what is about to be attached.

        :raises SandboxError: NETWORK_SETUP_FAILED: it is attached already, or can't be written; nothing may be run.
        """
        at = entry.attachment
        try:
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._draft(entry)
            try:
                taken = not _linked(draft, self._dir / at.key)
            finally:
                draft.unlink()
        except OSError as error:
            raise self._unusable(error) from error
        if taken:
            brief = f"{at.container} has an interface {at.ifname} on network {at.network} already"
            raise setup_failed("cni_already_attached", brief, resolution="delete it first")

    def update(self, entry: Entry) -> None:
        """Replace what `begin` wrote.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            self._draft(entry).replace(self._dir / entry.attachment.key)
        except OSError as error:
            raise self._unusable(error) from error

    def read(self, attachment: Attachment) -> Entry | None:
        """The entry, or None when there is none. One that can't be read has no configuration.

        :raises SandboxError: NETWORK_SETUP_FAILED, for a directory that can't be read.
        """
        try:
            with (self._dir / attachment.key).open("rb") as file:
                text = file.read(_LARGEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error
        try:
            return Entry.parse(attachment, text)
        except (ValueError, KeyError, TypeError, RecursionError, InvalidRequest):
            return Entry(attachment)

    def entries(self) -> list[Entry]:
        """All there are, by name.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            names = sorted(path.name for path in self._dir.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error
        known = [found for name in names if (found := Attachment.from_key(name)) is not None]
        return [entry for attachment in known if (entry := self.read(attachment)) is not None]

    def remove(self, attachment: Attachment) -> None:
        """Forget it. One that is gone is no error.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        try:
            (self._dir / attachment.key).unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def _draft(self, entry: Entry) -> Path:
        path = self._dir / f".{entry.attachment.key}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123  a descriptor
            file.write(entry.text())
        return path

    def _unusable(self, error: OSError) -> SandboxError:
        brief = f"cannot keep what was attached in {self._dir}"
        return setup_failed("cni_cache", brief, details=str(error), resolution="make room, and the directory writable")


def _linked(draft: Path, path: Path) -> bool:
    """Give `draft` the name `path`, whole and at once; False when there is such a file."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    return True
