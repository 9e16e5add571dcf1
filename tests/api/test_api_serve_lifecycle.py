"""The life of a server: what it tells its service manager, how it drains, and what signals do. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import reserve
from server_process import ServerProcess

from forgeyard_api.client.calls import Calls, connected
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Wanted
from forgeyard_api.serve.requests import request_from
from forgeyard_api.serve.rows import Rows
from forgeyard_api.serve.shown import STATES
from forgeyard_api.serve.store import AttemptStore
from forgeyard_api.wire.messages import executor as wire
from forgeyard_executor import Job, Outcome, Step
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.job import Timeouts
from forgeyard_model.policy import SourceMode
from forgeyard_model.result import CancellationReason

SECONDS = 300.0
"""For anything that has to come: a server, its keeper and its job are Python three times, on a busy machine."""
# The source must be the tree itself: an overlay need not show what is put beneath it later.
HOLDS = "while [ ! -e /work/source/go ]; do sleep 0.1; done"
STUBBORN = "trap : TERM; while :; do sleep 0.1; done"


class Manager:
    """A service manager: the socket that it hears its service at, and never ceases to listen to."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._heard: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def told(self, word: str) -> dict[str, str]:
        """The next message with that word, by its lines."""
        while True:
            lines = dict(line.split("=", 1) for line in self._heard.get(timeout=SECONDS).splitlines())
            if word in lines:
                return lines

    def close(self) -> None:
        """Listen no more. Repeating it is no error."""
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"", self._socket.getsockname())
            self._thread.join()
            self._socket.close()

    def _listen(self) -> None:
        while data := self._socket.recv(4096):
            self._heard.put(data.decode())


class Managed(ServerProcess):
    """A server under a service manager that goes on listening."""

    def start(self) -> None:
        """As the manager starts it; once it is ready."""
        path = self.run_dir / "manager"
        self.manager = Manager(path)
        told = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "1000000", "MANAGED_BY": "this test"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "dev", "-m", "forgeyard_api", "serve", "--config", str(self.config)],
                env={**self.environment, **told},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.manager.told("READY")

    def close(self) -> None:
        """With the manager."""
        self.manager.close()
        super().close()


@contextmanager
def managed(state: Path, *settings: str) -> Iterator[Managed]:
    """A server that runs. Its log is shown when the test fails."""
    server = Managed(state, *settings)
    try:
        server.start()
        yield server
        server.assert_calm()
    except BaseException:
        print(server.said()[-8000:])
        raise
    finally:
        server.close()


def in_time(body: Any) -> Any:
    """Run `body`; nothing of it may take for ever."""

    async def bounded() -> Any:
        async with asyncio.timeout(SECONDS):
            return await body

    return asyncio.run(bounded())


@asynccontextmanager
async def calling(server: ServerProcess) -> AsyncIterator[Calls]:
    """A connection to it."""
    async with connected(server.target, reconnect=SECONDS) as calls:
        yield calls


def job(script: str, **changes: Any) -> Job:
    """A job of one step."""
    return Job(rootfs="host", steps=(Step("/bin/sh", "-c", script),), **changes)


async def prepare(calls: Calls, name: str, what: Job, source: Path | None = None) -> None:
    """Take an attempt in, that runs as soon as it can."""
    wanted = Wanted(name, what, source=None if source is None else str(source), start=True)
    await calls.call("Prepare", request_from(wanted), seconds=SECONDS)


async def reached(calls: Calls, name: str, state: AttemptState) -> None:
    """Once it has got that far."""
    request, number = wire.WaitRequest(attempt_id=name, until=STATES[state]), STATES[state]
    while (await calls.call("Wait", request, seconds=SECONDS)).attempt.state < number:
        continue


async def heard(calls: Calls, name: str, word: bytes) -> bytes:
    """What it has written, up to `word`."""
    said = b""
    async for answer in calls.stream("Output", wire.OutputRequest(attempt_id=name)):
        said += answer.data
        if word in said:
            return said
    raise AssertionError(f"it ended with {said!r}")


def kept(state: Path) -> dict[str, AttemptView]:
    """The attempts as the server left them on disk."""

    async def read() -> dict[str, AttemptView]:
        store = await AttemptStore.open(state / "attempts.db")
        try:
            lives = await Rows(store, reserve).all(lambda _: asyncio.sleep(0))
            return {life.view.attempt_id: life.view for life, _ in lives}
        finally:
            await store.close()

    return asyncio.run(read())


def gone(server: ServerProcess) -> int:
    """Its exit code, once it has ended."""
    assert server.process is not None
    return server.process.wait(SECONDS)


def cancellation(view: AttemptView) -> CancellationReason | None:
    """Of an attempt that had begun."""
    assert view.result is not None, view.error
    return view.result.cancellation


@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_what_a_service_manager_hears(state_dir: Path, warm_rootfs: None) -> None:
    """READY, WATCHDOG over and over, RELOADING with its time, STOPPING with the time it asks for; then it is gone.

    Nothing that was meant for the server alone reaches keepers and jobs: a runtime would mount NOTIFY_SOCKET.
    """
    with managed(state_dir, 'drain = "7s"', "slots = 2") as server:
        for _ in range(2):
            server.manager.told("WATCHDOG")
        (keeper,) = server.keepers()
        environments = Path(f"/proc/{keeper.pid}/environ").read_bytes()
        assert not [name for name in (b"NOTIFY_SOCKET", b"WATCHDOG", b"MANAGED_BY") if name in environments]

        async def runs() -> None:
            async with calling(server) as calls:
                await prepare(calls, "a", job("env; ls / /run; echo all"))
                assert b"otify" not in (await heard(calls, "a", b"all")).lower()
                await reached(calls, "a", AttemptState.ENDED)

        in_time(runs())
        good = server.config.read_text()
        server.config.write_text(good.replace("slots = 2", 'slots = "many"'))
        os.kill(server.pid, signal.SIGHUP)
        assert int(server.manager.told("RELOADING")["MONOTONIC_USEC"]) > 0
        server.manager.told("READY")
        assert "the configuration stays as it was" in server.said()
        server.config.write_text(good.replace("slots = 2", "slots = 1"))
        os.kill(server.pid, signal.SIGHUP)
        server.manager.told("RELOADING")
        server.manager.told("READY")
        assert "the configuration was read again" in server.said()
        os.kill(server.pid, signal.SIGTERM)
        assert int(server.manager.told("STOPPING")["EXTEND_TIMEOUT_USEC"]) >= 7_000_000
        assert gone(server) == 0
    result = kept(state_dir)["a"].result
    assert result is not None
    assert result.outcome is Outcome.SUCCEEDED


@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_sigterm_drains(state_dir: Path, tree: Path, warm_rootfs: None) -> None:
    """The queue is handed back, nothing more is taken in, what runs comes to its own end, and then it is gone.

    What was done is in the audit file; /metrics says who keeps, and has no attempt's name.
    """
    audit, metrics = state_dir / "audit.jsonl", state_dir / "metrics.sock"
    with managed(state_dir, "slots = 1", f'audit = "{audit}"', f'metrics = "{metrics}"') as server:

        async def body() -> None:
            async with calling(server) as calls:
                await prepare(calls, "runs", job(HOLDS, source_mode=SourceMode.RO), tree)
                await reached(calls, "runs", AttemptState.RUNNING)
                await prepare(calls, "waits", job("true"))
                text = await scraped(metrics)
                assert 'forgeyard_keepers{executor="runc"} 1.0' in text
                assert "forgeyard_queue_length 1.0" in text
                assert 'forgeyard_admission_used{resource="slots"} 1.0' in text
                assert "waits" not in text
                os.kill(server.pid, signal.SIGTERM)
                await asyncio.to_thread(server.manager.told, "STOPPING")
                await reached(calls, "waits", AttemptState.ENDED)
                with pytest.raises(ExecutorError) as refused:
                    await prepare(calls, "late", job("true"))
                assert refused.value.reason == "draining"
                (tree / "go").touch()

        in_time(body())
        assert gone(server) == 0
        found = kept(state_dir)
    assert found.keys() == {"runs", "waits"}
    assert found["runs"].result is not None
    assert found["runs"].result.outcome is Outcome.SUCCEEDED
    error = found["waits"].error
    assert isinstance(error, ExecutorError)
    assert (error.kind, "runner drain" in str(error)) == (ExecutorErrorKind.CANCELLED, True)
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {"server_started", "connected", "prepared", "refused"} <= {event["event"] for event in events}
    assert [event["attempt_id"] for event in events if event["event"] == "prepared"] == ["runs", "waits"]


async def scraped(path: Path) -> str:
    """What /metrics says."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.decode()


@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_what_runs_is_cancelled_after_the_drain(state_dir: Path, warm_rootfs: None) -> None:
    """With the runner's drain as its reason, and its grace."""
    with managed(state_dir, 'drain = "1s"') as server:

        async def body() -> None:
            async with calling(server) as calls:
                await prepare(calls, "a", job("trap 'echo soft; exit 0' TERM; echo up; while :; do sleep 0.1; done"))
                await heard(calls, "a", b"up")
                os.kill(server.pid, signal.SIGTERM)
                await heard(calls, "a", b"soft")

        in_time(body())
        assert gone(server) == 0
        assert cancellation(kept(state_dir)["a"]) is CancellationReason.RUNNER_DRAIN


@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_a_second_signal_ends_it_at_once(state_dir: Path, warm_rootfs: None) -> None:
    """Neither the drain nor a job's grace is waited for: it is shut down, and nothing of it is left."""
    with managed(state_dir, 'drain = "1h"') as server:

        async def body() -> None:
            async with calling(server) as calls:
                await prepare(calls, "a", job(f"echo up; {STUBBORN}", timeouts=Timeouts(grace=3000.0)))
                await heard(calls, "a", b"up")

        in_time(body())
        os.kill(server.pid, signal.SIGTERM)
        server.manager.told("STOPPING")
        os.kill(server.pid, signal.SIGINT)
        assert gone(server) == 0
        assert cancellation(kept(state_dir)["a"]) is CancellationReason.SHUTDOWN
        assert not list((state_dir / "ledger").iterdir())


@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_sigusr1_leaves_what_runs(state_dir: Path, tree: Path, warm_rootfs: None) -> None:
    """The server goes at once, its keeper stays, and the next server finds the job at its work."""
    with managed(state_dir) as server:

        async def runs() -> None:
            async with calling(server) as calls:
                await prepare(calls, "a", job(f"echo up; {HOLDS}; exit 7", source_mode=SourceMode.RO), tree)
                await heard(calls, "a", b"up")

        in_time(runs())
        os.kill(server.pid, signal.SIGUSR1)
        assert gone(server) == 0
        (keeper,) = server.keepers()
        assert kept(state_dir)["a"].state is AttemptState.RUNNING
        server.manager.close()
        server.start()
        assert server.keepers() == [keeper]

        async def ends() -> None:
            async with calling(server) as calls:
                (tree / "go").touch()
                await reached(calls, "a", AttemptState.ENDED)

        in_time(ends())
        os.kill(server.pid, signal.SIGTERM)
        assert gone(server) == 0
    result = kept(state_dir)["a"].result
    assert result is not None
    assert result.exit_code == 7
