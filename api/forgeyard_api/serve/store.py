"""The attempts that the server took in, on disk: what it said it would do survives its own death.

SQLite in WAL mode: a killed writer leaves the last whole transaction. One thread owns the database, so that nothing
here ever holds up the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from forgeyard_host.locks import lock_alone
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

T = TypeVar("T")

VERSION: Final = 1
"""Of the tables. A newer server reads an older one's; an older one refuses a newer one's."""

_BUSY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """A row. Times are seconds since the epoch.

    :param request: the Prepare as it came. digest: of that, by which a repeated one is known.
    :param owner_pid, owner_start: the process that prepared it, where its death is to end the attempt; else 0.
    :param start_asked: somebody said Start. cancel_asked: the reason, where somebody said Cancel. cancel_kill: without
        grace. finish_asked: no further step comes.
    :param handed: it was given to a keeper, which may know of it; before that nobody but this row does.
    :param result, error: as messages; at most one of them.
    :param lease: seconds; lease_until: when it expires.
    """

    owner_uid: int
    attempt_id: str
    request: bytes
    digest: str
    state: str
    runtime: str
    created_at: float
    owner_pid: int = 0
    owner_start: int = 0
    sandbox_id: str = ""
    bundle_digest: str = ""
    notes: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    start_asked: bool = False
    cancel_asked: str = ""
    cancel_kill: bool = False
    finish_asked: bool = False
    handed: bool = False
    lease: float | None = None
    lease_until: float | None = None
    result: bytes | None = None
    error: bytes | None = None


_COLUMNS: Final = tuple(item.name for item in fields(StoredAttempt))
_BOOLEAN: Final = ("start_asked", "cancel_kill", "finish_asked", "handed")


class AttemptStore:
    """All methods are awaited; each is one transaction."""

    def __init__(
        self, path: Path, pool: ThreadPoolExecutor, connection: sqlite3.Connection, set_aside: str, lock: int
    ) -> None:
        self._path = path
        self._lock = lock
        self._pool = pool
        self._connection = connection
        self.set_aside = set_aside
        """Where a damaged database was put; empty when it was sound."""

    @classmethod
    async def open(cls, path: Path) -> Self:
        """The store in the file `path`, made where there is none.

        :raises ExecutorError: UNSUPPORTED for tables of a newer version; IO_FAILED where it can't be written, or where
            another server has it.
        """
        lock = _locked(path)
        pool = ThreadPoolExecutor(1, thread_name_prefix="forgeyard-attempts")
        loop = asyncio.get_running_loop()
        try:
            connection, set_aside = await loop.run_in_executor(pool, _opened, path)
        except BaseException:
            pool.shutdown(wait=False)
            os.close(lock)
            raise
        return cls(path, pool, connection, set_aside, lock)

    async def close(self) -> None:
        """Close the file."""
        await self._do(lambda connection: connection.close())
        self._pool.shutdown()
        os.close(self._lock)

    async def add(self, row: StoredAttempt) -> None:
        """Take a new attempt in.

        :raises ExecutorError: INTERNAL, attempt_exists.
        """
        marks = ", ".join("?" * len(_COLUMNS))
        try:
            await self._write(f"INSERT INTO attempts ({', '.join(_COLUMNS)}) VALUES ({marks})", _values(row))  # noqa: S608  # our own column names
        except sqlite3.IntegrityError as error:
            raise ExecutorError(
                ExecutorErrorKind.INTERNAL, "attempt_exists", f"there is an attempt {row.attempt_id} already"
            ) from error

    async def update(self, owner_uid: int, attempt_id: str, **changes: Any) -> None:
        """Change columns of an attempt, by their names."""
        unknown = changes.keys() - set(_COLUMNS)
        if unknown:
            raise ValueError(f"no such columns: {unknown}")
        columns = ", ".join(f"{name} = ?" for name in changes)
        statement = f"UPDATE attempts SET {columns} WHERE owner_uid = ? AND attempt_id = ?"  # noqa: S608  # as above
        await self._write(statement, (*changes.values(), owner_uid, attempt_id))

    async def remove(self, owner_uid: int, attempt_id: str) -> None:
        """Forget an attempt."""
        await self._write("DELETE FROM attempts WHERE owner_uid = ? AND attempt_id = ?", (owner_uid, attempt_id))

    async def all(self) -> tuple[StoredAttempt, ...]:
        """Every attempt, oldest first."""

        def read(connection: sqlite3.Connection) -> tuple[StoredAttempt, ...]:
            rows = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM attempts ORDER BY created_at")  # noqa: S608  # as above
            return tuple(_row(row) for row in rows)

        return await self._do(read)

    async def _write(self, statement: str, values: Sequence[Any]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute(statement, values)

        await self._do(write)

    async def _do(self, act: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, act, self._connection)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise _io_failed(self._path, error) from error


def _locked(path: Path) -> int:
    """The descriptor of a lock on the store: two servers would run each other's attempts."""
    try:
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)  # jobs' users pass through the state directory
        lock = lock_alone(path.with_name(f"{path.name}-lock"))
    except OSError as error:
        raise _io_failed(path, error) from error
    if lock is None:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "store_in_use",
            f"another server has the attempts in {path}",
            resolution="stop that one, or give this one a state directory of its own with --state-dir",
        )
    return lock


def _values(row: StoredAttempt) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in _COLUMNS)


def _row(values: Sequence[Any]) -> StoredAttempt:
    found = dict(zip(_COLUMNS, values, strict=True))
    found |= {name: bool(found[name]) for name in _BOOLEAN}
    return StoredAttempt(**found)


def _opened(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database, and where a damaged one was put."""
    try:
        return _connected(path), ""
    except sqlite3.OperationalError as error:
        raise _io_failed(path, error) from error
    except sqlite3.DatabaseError:
        aside = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
        path.rename(aside)
        path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
        wal = path.with_name(f"{path.name}-wal")
        if wal.exists():
            wal.rename(f"{aside}-wal")
        return _connected(path), str(aside)


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
    try:
        path.chmod(0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA secure_delete = ON")  # a job's environment is nobody's once it is forgotten
        connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine ends every attempt anyway
        _check(path, connection)
        with connection:
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: Path, connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "newer_ledger",
            f"{path} was written by a newer forgeyard (version {version}, this one knows {VERSION})",
            resolution="start the newer version again, or let it drain first and then remove the file",
        )
    if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise sqlite3.DatabaseError("quick_check")


_TABLE: Final = """
CREATE TABLE IF NOT EXISTS attempts (
    owner_uid INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    request BLOB NOT NULL,
    digest TEXT NOT NULL,
    state TEXT NOT NULL,
    runtime TEXT NOT NULL,
    created_at REAL NOT NULL,
    owner_pid INTEGER NOT NULL,
    owner_start INTEGER NOT NULL,
    sandbox_id TEXT NOT NULL,
    bundle_digest TEXT NOT NULL,
    notes TEXT NOT NULL,
    started_at REAL,
    finished_at REAL,
    start_asked INTEGER NOT NULL,
    cancel_asked TEXT NOT NULL,
    cancel_kill INTEGER NOT NULL,
    finish_asked INTEGER NOT NULL,
    handed INTEGER NOT NULL,
    lease REAL,
    lease_until REAL,
    result BLOB,
    error BLOB,
    PRIMARY KEY (owner_uid, attempt_id)
)
"""


def _io_failed(path: Path, error: Exception) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "attempt_store",
        f"the attempts in {path} can't be written",
        details=str(error),
        resolution="check the space and the permissions of its directory",
    )
