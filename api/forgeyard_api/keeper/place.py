"""A keeper's directory: its socket, its lock, what it says of itself, and a log that has a bound.

lock         held by the keeper for as long as it lives: the kernel lets it go with the process
keeper.json  there once it serves
sock         where it serves
log, log.1   what it said
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from forgeyard_host.locks import is_locked
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.config_serve import ServeConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

LOCK, ABOUT, SOCKET, LOG, OLD_LOG = "lock", "keeper.json", "sock", "log", "log.1"
LOG_BYTES: Final = 512 << 10
"""Of a log; with the one before it a keeper has at most twice that, and what it says within a second."""
POOL: Final = "pool.json"
_MAX_SOCKET_PATH: Final = 107
"""Of sun_path, less its end (unix(7))."""


@dataclass(frozen=True, slots=True)
class About:
    """What a keeper says of itself.

    :param config: digest of what it goes by; see `config_digest`.
    :param left: what dead ones left and it could not destroy, a line each.
    """

    pid: int
    runtime: str
    version: str
    config: str
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """One keeper's directory."""

    directory: Path

    @classmethod
    def new(cls, run_dir: Path, state_dir: str) -> Place:
        """A place for a keeper that is about to start.

        :raises ExecutorError: UNSUPPORTED, socket_path, when no socket can have so long a name.
        """
        directory = run_dir / "keepers" / f"{_mark(state_dir)}-{secrets.token_hex(3)}"
        if len(os.fsencode(directory / SOCKET)) > _MAX_SOCKET_PATH:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "socket_path",
                f"{directory / SOCKET} is too long for the name of a socket",
                resolution="name a shorter path with serve.socket: keepers are beside it",
            )
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700)
        return cls(directory)

    @classmethod
    def all(cls, run_dir: Path, state_dir: str) -> tuple[Place, ...]:
        """Those of the keepers of `state_dir`, oldest first, whether they live or not."""
        found = [(_made(entry), entry) for entry in (run_dir / "keepers").glob(f"{_mark(state_dir)}-*")]
        return tuple(cls(directory) for _, directory in sorted(found))

    @property
    def target(self) -> str:
        """Its socket, as gRPC has it."""
        return f"unix:{self.directory / SOCKET}"

    @property
    def kept(self) -> bool:
        """Whether its keeper lives."""
        return is_locked(self.directory / LOCK)

    def about(self) -> About | None:
        """What its keeper says of itself; None before it serves, and once it has withdrawn."""
        try:
            return About(**json.loads((self.directory / ABOUT).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def announce(self, about: About) -> None:
        """Say so: whoever finds the file finds the socket served."""
        new = self.directory / f"{ABOUT}.new"
        new.write_text(json.dumps(asdict(about)))
        new.rename(self.directory / ABOUT)

    def tell_pool(self, counts: Mapping[str, int]) -> None:
        """Say how the pool of networks does, for the server's metrics."""
        new = self.directory / f"{POOL}.new"
        new.write_text(json.dumps(dict(counts)))
        new.rename(self.directory / POOL)

    def pool(self) -> Mapping[str, int]:
        """What it said last of its pool of networks; nothing where it has none."""
        try:
            found: Mapping[str, int] = json.loads((self.directory / POOL).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found

    def last_words(self, lines: int = 1) -> str:
        """The end of its log."""
        try:
            said = (self.directory / LOG).read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            said = []
        return "\n".join(said[-lines:])

    def bound_log(self) -> None:
        """Begin the log anew when it is long. Its writers append, so that they need not know."""
        path = self.directory / LOG
        if path.exists() and path.stat().st_size > LOG_BYTES:
            said = path.read_bytes()[-LOG_BYTES:]
            os.truncate(path, 0)
            (self.directory / OLD_LOG).write_bytes(said)

    def remove(self) -> None:
        """Remove it. Repeating it is no error."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _made(directory: Path) -> int:
    """When its lock was made; 0 for one that never came to that, or has just been removed."""
    with suppress(FileNotFoundError):
        return (directory / LOCK).stat().st_ctime_ns
    return 0


def _mark(state_dir: str) -> str:
    """Names the keepers of one state directory: others may have theirs beside them."""
    return hashlib.sha256(os.path.realpath(state_dir).encode()).hexdigest()[:8]


def config_digest(config: ExecutorConfig) -> str:
    """Of what an executor goes by: a keeper that was started under other rules takes no new attempts."""
    plain = replace(config, serve=ServeConfig(), origins=(), runtime="", state_dir="")
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]
