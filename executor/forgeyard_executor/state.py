"""Where an executor keeps what on disk. One directory tree per state directory; see ARCHITECTURE.md."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId


@dataclass(frozen=True, slots=True)
class StatePaths:
    """Paths below one state directory."""

    root: Path

    @classmethod
    def at(cls, state_dir: str | Path) -> Self:
        """Those of `state_dir`, with its symlinks resolved; nothing is made.

        :raises InvalidRequest: for a path that can't stand in a bundle, which is JSON and so UTF-8.
        """
        shown = str(state_dir)
        if not shown or "\0" in shown:
            raise InvalidRequest("state_dir", shown, "name a directory")
        try:
            shown.encode()
            real = os.path.realpath(shown)
            real.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "state_dir", shown, "is not valid UTF-8, and bundles are JSON: name another directory"
            ) from error
        return cls(Path(real))

    @property
    def sandboxes(self) -> Path:
        """One directory per attempt."""
        return self.root / "sandboxes"

    @property
    def spools(self) -> Path:
        """Output of attempts, until their handles are closed."""
        return self.root / "spool"

    @property
    def engines(self) -> Path:
        """Addresses of the daemons that ever had a container of this state directory."""
        return self.root / "engines"

    @property
    def rootfs(self) -> Path:
        """Skeletons of the host rootfs."""
        return self.root / "rootfs"

    @property
    def images(self) -> Path:
        """Unpacked image layers."""
        return self.root / "images"

    @property
    def caches(self) -> Path:
        """Caches between jobs."""
        return self.root / "caches"

    @property
    def kept(self) -> Path:
        """Workspaces of failed attempts."""
        return self.root / "kept"

    def attempt(self, sandbox: SandboxId) -> Path:
        """Directory of one attempt."""
        return self.sandboxes / sandbox.value

    def spool(self, executor_id: str, sandbox: SandboxId) -> Path:
        """Output of one attempt; below its executor's name, since it outlives the attempt's ledger."""
        return self.spools / executor_id / sandbox.value

    def make(self) -> None:
        """Create the tree. A job's root, mapped to a high uid, must be able to pass through, never to list.

        :raises SandboxError: when an ancestor does not let others pass, which a user namespace needs.
        """
        try:
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
            self.sandboxes.mkdir(mode=0o711, exist_ok=True)
            self.sandboxes.chmod(0o711)
            self.spools.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SandboxError(
                SandboxErrorKind.INTERNAL,
                "state_dir",
                f"the state directory {self.root} can't be made",
                details=str(error),
                resolution="name a writable directory with --state-dir",
            ) from error
        closed = [path for path in (self.root, *self.root.parents) if not path.stat().st_mode & stat.S_IXOTH]
        if closed:
            raise SandboxError(
                SandboxErrorKind.INVALID_FILESYSTEM_PLAN,
                "state_dir_closed",
                f"{closed[-1]} does not let a job's user pass to the state directory {self.root}",
                resolution=f"chmod o+x {closed[-1]}, or name another directory with --state-dir",
            )
