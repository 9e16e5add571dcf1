"""Processes that keep containers over a server's death: what they take over, what is reported lost, how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, counted, counting, first_output, lost, served, whole

from forgeyard_api.client import RemoteExecutor
from forgeyard_api.client.attempt import RemoteAttempt
from forgeyard_api.keeper.place import LOG, LOG_BYTES, OLD_LOG, Place
from forgeyard_api.keeper.process import environment
from forgeyard_api.serve.attempt_types import OnClientDeath, Wanted
from forgeyard_api.serve.requests import request_from
from forgeyard_api.wire.messages import executor as wire
from forgeyard_executor import Job, Outcome, Step
from forgeyard_host.locks import lock_alone
from forgeyard_model.errors import ExecutorErrorKind, ForgeyardError
from forgeyard_model.result import EndCause

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(400)]

LONG = 100_000
"""Lines of a job that does not come to its end by itself."""


async def running(client: RemoteExecutor, name: str, job: Job) -> RemoteAttempt:
    """An attempt that has said something."""
    execution = await client.start(await client.prepare_job(job, attempt_id=name))
    await first_output(execution)
    return execution


async def asked(client: RemoteExecutor, name: str, job: Job, *, start: bool = False) -> RemoteAttempt:
    """An attempt that was taken in, whatever has become of it."""
    wanted = Wanted(name, job, on_client_death=OnClientDeath.CONTINUE, start=start)
    await client.calls.call("Prepare", request_from(wanted))
    return RemoteAttempt(client.calls, name, "", reconnect=300.0)


async def until(client: RemoteExecutor, name: str, state: Any) -> None:
    """Until it has got that far."""
    await client.calls.call("Wait", wire.WaitRequest(attempt_id=name, until=state), seconds=90.0)


_STATES = wire.Attempt.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number


async def states(client: RemoteExecutor) -> dict[str, str]:
    """How far each attempt has got."""
    answer = await client.calls.call("ListSandboxes", wire.ListSandboxesRequest())
    return {each.attempt_id: _STATES[each.state].name.rpartition("_")[2] for each in answer.attempts}


async def restarted(server: ServerProcess) -> None:
    """Kill it, and start it again."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


class HungRegistry:
    """A registry that answers nothing until it is told to, and then that it has nothing."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            """Waits."""

            def do_GET(self) -> None:
                """Any path."""
                registry.asked.set()
                registry.released.wait()
                self.send_error(404)

            do_HEAD = do_GET  # noqa: N815  # the base class's names

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.image = f"127.0.0.1:{self.server.server_address[1]}/nothing@sha256:{'0' * 64}"


@pytest.fixture
def hung_registry() -> Iterator[HungRegistry]:
    """One, for a test."""
    registry = HungRegistry()
    thread = threading.Thread(target=registry.server.serve_forever)
    thread.start()
    yield registry
    registry.released.set()
    registry.server.shutdown()
    thread.join()
    registry.server.server_close()


def test_attempts_are_taken_over_in_every_state(
    state_dir: Path, warm_rootfs: None, hung_registry: HungRegistry
) -> None:
    """Prepared, being prepared, cancelled, waiting in the queue, running, ended: none is lost, none begins anew."""

    async def main(server: ServerProcess) -> None:
        async with server.client() as client:
            runs = await running(client, "runs", counting(LONG))
            prepared = await client.prepare_job(counting(3), attempt_id="prepared")
            done, out = await whole(await client.start(await client.prepare_job(counting(3), attempt_id="done")))
            hung = Job(image=hung_registry.image, steps=(Step("true"),))
            pulls = await asked(client, "pulls", hung, start=True)
            stopped = await asked(client, "stopped", hung, start=True)
            await asyncio.to_thread(hung_registry.asked.wait)
            for name in ("pulls", "stopped"):
                await until(client, name, wire.ATTEMPT_STATE_PREPARING)
            waits = await asked(client, "waits", counting(2), start=True)
            reading = asyncio.ensure_future(whole(runs))
            assert (await states(client))["waits"] == "QUEUED"  # four slots, four that have not ended

            await restarted(server)
            assert await states(client) == {
                "runs": "RUNNING", "prepared": "PREPARED", "done": "ENDED", "pulls": "PREPARING",
                "stopped": "PREPARING", "waits": "QUEUED",
            }  # fmt: skip
            await stopped.cancel()
            assert (await lost(stopped.wait())).kind is ExecutorErrorKind.CANCELLED
            await runs.cancel(kill=True)
            result, said = await reading
            assert result.outcome is Outcome.CANCELLED
            assert said == counted(said.count(b"\n"))

            again = await client.start(await client.prepare_job(counting(3), attempt_id="prepared"))
            assert again.sandbox_id == prepared.sandbox_id.value
            assert (await whole(again))[1] == counted(3)
            hung_registry.released.set()
            with pytest.raises(ForgeyardError, match="nothing") as refused:  # what the keeper found out
                await pulls.wait()
            assert getattr(refused.value, "kind", None) is not ExecutorErrorKind.LOST
            assert (await whole(waits))[1] == counted(2)

            ended = RemoteAttempt(client.calls, "done", done.sandbox_id, reconnect=300.0)
            assert await whole(ended) == (done, out)
            assert out == counted(3)
            for name in await states(client):
                await client.forget(name)
            assert await states(client) == {}

    with served(state_dir, "slots = 4") as server:
        asyncio.run(main(server))
        server.kill()
        server.assert_nothing_left()
        server.assert_calm()


def test_a_cancel_that_was_written_down_is_carried_out(state_dir: Path, warm_rootfs: None) -> None:
    """Though its server died before it could pass it on: the keeper was stopped at that moment."""

    async def main(server: ServerProcess) -> None:
        async with server.client() as client:
            execution = await running(client, "a", counting(LONG))
            (keeper,) = server.keepers()
            os.kill(keeper.pid, signal.SIGSTOP)
            try:
                cancelling = asyncio.ensure_future(client.calls.call("Cancel", wire.CancelRequest(attempt_id="a")))
                await asyncio.to_thread(server.until, lambda: b"user" in written(state_dir), "the cancel on disk")
                await asyncio.to_thread(server.kill)
            finally:
                os.kill(keeper.pid, signal.SIGCONT)
            await asyncio.to_thread(server.start)
            await cancelling
            result = await execution.wait()
            assert (result.outcome, result.end_cause) == (Outcome.CANCELLED, EndCause.CANCELLED)
            await execution.drop_output()

    with served(state_dir) as server:
        asyncio.run(main(server))
        server.kill()
        server.assert_nothing_left()
        server.assert_calm()


def written(state: Path) -> bytes:
    """What the store has of cancels, without opening it."""
    import sqlite3

    connection = sqlite3.connect(f"file:{state}/attempts.db?mode=ro", uri=True)
    try:
        return "".join(row[0] for row in connection.execute("SELECT cancel_asked FROM attempts")).encode()
    finally:
        connection.close()


def test_a_keeper_is_killed(state_dir: Path, warm_rootfs: None) -> None:
    """Its attempts are lost once what it had is destroyed; others run. With its server, it is the same."""

    async def main(server: ServerProcess) -> None:
        async with server.client() as client:
            execution = await running(client, "a", counting(LONG))
            (keeper,) = server.keepers()
            os.kill(keeper.pid, signal.SIGKILL)
            error = await lost(execution.wait())
            assert (error.kind, error.reason) == (ExecutorErrorKind.LOST, "keeper_lost")
            assert not list((state_dir / "ledger").glob("*"))  # recovered before it is told
            assert (await lost(execution.wait())).reason == "keeper_lost"
            async with client.run(counting(2), attempt_id="b") as other:
                assert (await whole(other))[1] == counted(2)
            (after,) = server.keepers()
            assert after.pid != keeper.pid
            assert not keeper.directory.exists()

            both = await running(client, "c", counting(LONG))
            await asyncio.to_thread(server.kill)
            os.kill(after.pid, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            error = await lost(both.wait())
            assert (error.kind, error.reason) == (ExecutorErrorKind.LOST, "server_lost")
            assert not list((state_dir / "ledger").glob("*"))
            assert await states(client) == {"a": "ENDED", "c": "ENDED"}

    with served(state_dir) as server:
        asyncio.run(main(server))
        server.kill()
        server.assert_nothing_left()
        server.assert_calm()


def test_a_server_that_destroys(state_dir: Path, warm_rootfs: None) -> None:
    """What ran is reported lost, once, and nothing of it is left; what waited runs."""

    async def main(server: ServerProcess) -> None:
        async with server.client() as client:
            execution = await running(client, "a", counting(LONG))
            waits = await asked(client, "b", counting(2), start=True)
            assert server.keeper_directories() == []
            await restarted(server)
            for _ in range(2):
                error = await lost(execution.wait())
                assert (error.kind, error.reason) == (ExecutorErrorKind.LOST, "server_lost")
            assert (await whole(waits))[1] == counted(2)
            await restarted(server)
            assert await states(client) == {"a": "ENDED", "b": "ENDED"}

    with served(state_dir, 'on_restart = "destroy"', "slots = 1") as server:
        asyncio.run(main(server))
        server.end()
        server.assert_nothing_left()
        server.assert_calm()


def test_an_older_keeper_serves_its_attempts_to_their_end(state_dir: Path, warm_rootfs: None) -> None:
    """New ones go to a new keeper; the older one ends when its last attempt is forgotten."""

    async def main(server: ServerProcess) -> None:
        async with server.client() as client:
            execution = await running(client, "a", counting(60, code=4))
            (older,) = server.keepers()
            reading = asyncio.ensure_future(whole(execution))
            await asyncio.to_thread(server.kill)
            about = older.directory / "keeper.json"
            about.write_text(json.dumps({**json.loads(about.read_text()), "version": "0.0.1"}))
            await asyncio.to_thread(server.start)
            assert len(server.keepers()) == 2
            async with client.run(counting(2), attempt_id="b") as other:
                assert (await whole(other))[1] == counted(2)
            result, out = await reading
            assert (result.exit_code, out) == (4, counted(60))
            assert older.lives
            await execution.drop_output()
            await asyncio.to_thread(server.until, lambda: not older.lives, "the end of the older one")
            (newer,) = server.keepers()
            assert newer.pid != older.pid

    with served(state_dir) as server:
        asyncio.run(main(server))
        server.kill()
        server.assert_nothing_left()
        server.assert_calm()


def test_a_keeper_as_a_process(state_dir: Path, warm_rootfs: None) -> None:
    """Signals to the server's group do not reach it, its environment is small, and dead ones' directories go."""

    async def main(server: ServerProcess) -> None:
        async with server.client() as client:
            execution = await running(client, "a", counting(60))
            (keeper,) = server.keepers()
            assert os.getpgid(keeper.pid) == os.getsid(keeper.pid) == keeper.pid
            environ = Path(f"/proc/{keeper.pid}/environ").read_bytes()
            assert b"PATH=" in environ
            assert b"SECRET_OF_THE_SERVER" not in environ
            assert b"NOTIFY_SOCKET" not in environ
            os.killpg(server.pid, signal.SIGHUP)
            for number in (signal.SIGHUP, signal.SIGINT):
                os.kill(keeper.pid, number)
            reading = asyncio.ensure_future(whole(execution))
            await asyncio.to_thread(server.kill)
            stillborn = Place.new(server.run_dir, str(state_dir))
            others = Place.new(server.run_dir, "/another")
            await asyncio.to_thread(server.start)
            result, out = await reading
            assert (result.outcome, out) == (Outcome.SUCCEEDED, counted(60))
            assert [each.pid for each in server.keepers()] == [keeper.pid]
            assert not stillborn.directory.exists()
            assert others.directory.exists()
            others.remove()
            os.killpg(server.pid, signal.SIGUSR1)
            await asyncio.to_thread(server.ended)
            assert keeper.lives  # it has an ended attempt, which somebody may ask for
            await asyncio.to_thread(server.start)
            assert (await whole(execution))[1] == counted(60)
            await execution.drop_output()
            os.kill(server.pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_SERVER", "hidden")
        with served(state_dir) as server:
            asyncio.run(main(server))
            server.until(lambda: not server.keeper_directories(), "the keeper's own end")
            server.assert_nothing_left()
            server.assert_calm()


def test_a_store_that_is_gone_leaves_no_stray(state_dir: Path, warm_rootfs: None) -> None:
    """What nobody can ask for any more is ended when the server starts; a newer version's store is refused."""
    import sqlite3

    async def begin(server: ServerProcess) -> None:
        async with server.client() as client:
            await running(client, "a", counting(LONG))

    async def look(server: ServerProcess) -> None:
        async with server.client() as client:
            assert await states(client) == {}
            assert not list((state_dir / "ledger").glob("*"))
            async with client.run(counting(2), attempt_id="a") as other:  # the name is free
                assert (await whole(other))[1] == counted(2)

    store = state_dir / "attempts.db"
    with served(state_dir) as server:
        asyncio.run(begin(server))
        server.kill()
        for suffix in ("-wal", "-shm"):
            store.with_name(store.name + suffix).unlink(missing_ok=True)
        store.write_bytes(b"\xff" * 8192)
        server.start()
        assert "were damaged: they are in" in server.said()
        asyncio.run(look(server))
        server.kill()
        with sqlite3.connect(store) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
        said = server.fails_to_start()
        assert "newer forgeyard (version 99" in said
        assert "start the newer version again" in said
        assert "Traceback" not in said
        server.assert_nothing_left()
        server.assert_calm()


def test_the_environment_of_a_keeper() -> None:
    """What says how things are found is passed on, and nothing else."""
    useful = {"PATH": "/bin", "FORGEYARD_RUNTIME": "crun", "https_proxy": "p", "DOCKER_HOST": "d"}
    assert environment({**useful, "TOKEN": "t", "NOTIFY_SOCKET": "n", "PYTHONSTARTUP": "/tmp/x"}) == useful


def test_a_keepers_log_has_a_bound(tmp_path: Path) -> None:
    """The last of it stays readable; whoever writes goes on as before."""
    place = Place.new(tmp_path, "/state")
    with (place.directory / LOG).open("ab", buffering=0) as log:
        for number in range(40):
            log.write(b"line %05d\n" % number * 5000)
            place.bound_log()
        assert (place.directory / LOG).stat().st_size <= LOG_BYTES
        assert (place.directory / OLD_LOG).stat().st_size <= LOG_BYTES
        log.write(b"the last\n")
    assert place.last_words() == "the last"


@contextmanager
def held(place: Place) -> Iterator[None]:
    """As if its keeper lived."""
    lock = lock_alone(place.directory / "lock")
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)


def test_a_directory_tells_whether_its_keeper_lives(tmp_path: Path) -> None:
    """By a lock that goes with the process; those of another state directory are not ours."""
    place, other = Place.new(tmp_path, "/state"), Place.new(tmp_path, "/other")
    assert not place.kept  # not even a lock
    with held(place), held(other):
        assert place.kept
        assert Place.all(tmp_path, "/state") == (place,)
    assert not place.kept
    assert place.about() is None
    with pytest.raises(ForgeyardError, match="too long for the name of a socket"):
        Place.new(tmp_path / ("x" * 90), "/state")
