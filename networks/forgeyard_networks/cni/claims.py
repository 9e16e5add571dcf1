"""Which attachments a living process answers for, told to every executor of the host by locks on files.

State directories and lists of jobs tell one executor about its own. Address leases are the whole host's, so that what
another executor uses must be seen as well; a lock ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from forgeyard_host.locks import is_locked
from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.failures import setup_failed

DEFAULT_CLAIMS: Final = "/run/forgeyard/cni"


class Claims:
    """The locks of one process, in the directory that all share."""

    def __init__(self, directory: str = DEFAULT_CLAIMS) -> None:
        self._dir = Path(directory)
        self._held: dict[Attachment, int] = {}

    def take(self, attachment: Attachment) -> None:
        """Answer for `attachment` from now on.

        :raises SandboxError: NETWORK_SETUP_FAILED: somebody does already, or the directory is not writable.
        """
        if self.live(attachment):
            brief = f"{attachment.container} is being attached to network {attachment.network} elsewhere"
            raise setup_failed("cni_already_attached", brief)
        try:
            self._held[attachment] = self._locked(attachment.key)
        except OSError as error:
            brief = f"cannot use the locks in {self._dir}"
            cure = "make the directory writable for the executor"
            raise setup_failed("cni_claims", brief, details=str(error), resolution=cure) from error

    def drop(self, attachment: Attachment) -> None:
        """No longer answer for it. A second call is fine."""
        fd = self._held.pop(attachment, None)
        if fd is not None:
            with contextlib.suppress(FileNotFoundError):
                (self._dir / attachment.key).unlink()
            os.close(fd)

    def live(self, attachment: Attachment) -> bool:
        """Whether a living process, this one too, answers for it."""
        return attachment in self._held or is_locked(self._dir / attachment.key)

    def all_live(self, network: str) -> list[Attachment]:
        """Those on `network`, of every executor of this host."""
        try:
            names = [path.name for path in self._dir.iterdir()]
        except FileNotFoundError:
            return []
        known = [found for name in names if (found := Attachment.from_key(name)) is not None]
        return [found for found in known if found.network == network and self.live(found)]

    def sweep(self) -> None:
        """Remove the files of processes that are gone."""
        with contextlib.suppress(FileNotFoundError):
            for path in list(self._dir.iterdir()):
                found = Attachment.from_key(path.name)
                if found is not None and not self.live(found):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of all; the attachments stay for a reconciliation to find."""
        for attachment in list(self._held):
            self.drop(attachment)

    def _locked(self, key: str) -> int:
        """A new file that is locked before it gets its name: one that can be locked has no owner."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._dir / f".{key}"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self._dir / key)
        except OSError:
            os.close(fd)
            raise
        return fd
