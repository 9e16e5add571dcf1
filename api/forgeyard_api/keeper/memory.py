"""Attempts that are remembered as long as this process lives: a keeper's jobs die with it anyway."""

from __future__ import annotations

from typing import Any

from forgeyard_api.serve.life import AttemptLife, Record
from forgeyard_api.serve.store import StoredAttempt

Key = tuple[int, str]


class MemoryRows:
    """What `Rows` is to a server's table, for a keeper's."""

    def __init__(self) -> None:
        self._digests: dict[Key, str] = {}

    def digest(self, key: Key) -> str:
        """Of the Prepare that an attempt came from."""
        return self._digests[key]

    async def add(self, life: AttemptLife, request: bytes, digest: str, owner: tuple[int, int]) -> None:
        """Remember a new attempt."""
        self._digests[life.view.owner_uid, life.view.attempt_id] = digest

    async def update(self, key: Key, **changes: Any) -> None:
        """Nobody reads it after this process's end."""

    async def become(self, key: Key, life: AttemptLife) -> None:
        """As `update`."""

    async def remove(self, key: Key) -> None:
        """Forget it."""
        self._digests.pop(key, None)

    async def all(self, record: Record) -> list[tuple[AttemptLife, StoredAttempt]]:
        """None: there is nothing from before."""
        return []
