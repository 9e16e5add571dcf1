"""The attempts on disk: whole after any death of their server, never two servers', never silently thrown away."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from served import ALICE, JOB, prepare, table_over, within

from forgeyard_api.serve.attempt_types import Wanted
from forgeyard_api.serve.store import VERSION, AttemptStore, StoredAttempt
from forgeyard_executor.testing import FakeExecutor
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind


def row(number: int) -> StoredAttempt:
    """An attempt that somebody asked for."""
    return StoredAttempt(1000, f"a{number}", b"request", "digest", "queued", "runc", float(number))


def opened(path: Path, body: Callable[[AttemptStore], Awaitable[None]]) -> None:
    """Await `body` with the store at `path`."""

    async def main() -> None:
        store = await AttemptStore.open(path)
        try:
            await body(store)
        finally:
            await store.close()

    within(main())


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    """In the order of taking in, with what became of each."""
    path = tmp_path / "attempts.db"

    async def write(store: AttemptStore) -> None:
        for number in (2, 1, 3):
            await store.add(row(number))
        await store.update(1000, "a2", state="ended", handed=True, cancel_kill=True, result=b"\0\1")
        await store.remove(1000, "a3")
        with pytest.raises(ExecutorError, match="a1 already"):
            await store.add(row(1))

    async def read(store: AttemptStore) -> None:
        first, second = await store.all()
        assert first == row(1)
        assert (second.state, second.handed, second.cancel_kill, second.result) == ("ended", True, True, b"\0\1")

    opened(path, write)
    opened(path, read)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_killed_writer_leaves_whole_rows(tmp_path: Path) -> None:
    """Everything that was acknowledged, and nothing in halves."""
    path = tmp_path / "attempts.db"
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:

        async def write() -> None:
            store = await AttemptStore.open(path)
            for number in range(100_000):
                await store.add(row(number))
                os.write(theirs, b".")

        asyncio.run(write())
        os._exit(0)
    os.close(theirs)
    acknowledged = 0
    while acknowledged < 50:
        acknowledged += len(os.read(ours, 1))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    while more := os.read(ours, 4096):
        acknowledged += len(more)
    os.close(ours)

    async def read(store: AttemptStore) -> None:
        found = await store.all()
        assert acknowledged <= len(found) <= acknowledged + 1
        assert list(found) == [row(number) for number in range(len(found))]
        assert store.set_aside == ""

    opened(path, read)


def test_one_server_at_a_time(tmp_path: Path) -> None:
    """A second one would run the first one's attempts again."""
    path = tmp_path / "attempts.db"

    async def body(_: AttemptStore) -> None:
        with pytest.raises(ExecutorError, match="another server has the attempts") as refused:
            await AttemptStore.open(path)
        assert "--state-dir" in refused.value.resolution

    opened(path, body)


def test_tables_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    """Untouched, with the cure."""
    path = tmp_path / "attempts.db"
    opened(path, lambda store: store.add(row(1)))
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()

    async def main() -> None:
        await AttemptStore.open(path)

    with pytest.raises(ExecutorError) as refused:
        within(main())
    assert (refused.value.kind, refused.value.reason) == (ExecutorErrorKind.UNSUPPORTED, "newer_ledger")
    assert "newer version" in refused.value.resolution
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM attempts").fetchone() == (1,)
    connection.close()
    assert [each.name for each in tmp_path.glob("*damaged*")] == []


@pytest.mark.parametrize("damage", ["all of it", "a page"])
def test_a_damaged_store_is_set_aside(tmp_path: Path, damage: str) -> None:
    """What can't be read is kept for people; the server goes on with an empty one."""
    path = tmp_path / "attempts.db"

    async def fill(store: AttemptStore) -> None:
        for number in range(200):
            await store.add(row(number))

    opened(path, fill)
    whole = path.read_bytes()
    broken = b"\xff" * len(whole) if damage == "all of it" else whole[:4096] + b"\xff" * 4096 + whole[8192:]
    path.write_bytes(broken)

    async def body(store: AttemptStore) -> None:
        assert await store.all() == ()
        assert Path(store.set_aside).read_bytes() == broken
        await store.add(row(1))

    opened(path, body)
    opened(path, lambda store: _holds(store, 1))


async def _holds(store: AttemptStore, count: int) -> None:
    assert len(await store.all()) == count


def test_a_row_that_cannot_be_read_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others are taken up, and its name is free again."""
    path = tmp_path / "attempts.db"

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor()) as table:
            await prepare(table, ALICE, Wanted("good", JOB, start=True))
            await table.wait(ALICE, "good")
        store = await AttemptStore.open(path)
        await store.add(StoredAttempt(1000, "bad", b"\xff\xff", "digest", "running", "fake", 1.0))
        await store.close()
        async with table_over(tmp_path, FakeExecutor()) as table:
            assert [view.attempt_id for view in table.list(ALICE)] == ["good"]
            await prepare(table, ALICE, Wanted("bad", JOB, start=True))
            await table.wait(ALICE, "bad")

    within(body())
    assert "'bad' of uid 1000" in caplog.text


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    """As an error of ours, that names the file."""
    (tmp_path / "attempts.db").mkdir()

    async def main() -> None:
        await AttemptStore.open(tmp_path / "attempts.db")

    with pytest.raises(ExecutorError, match="can't be written") as refused:
        within(main())
    assert refused.value.kind is ExecutorErrorKind.IO_FAILED
