"""`forgeyard serve` as a process of its own, with a state directory, a run directory and a configuration of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from adapter_jobs import ADDRESS_VARIABLES
from daemon_remains import mounts_below, processes_of
from jobs import collect

from forgeyard_api.client import RemoteExecutor
from forgeyard_api.serve.attempt_types import OnClientDeath
from forgeyard_executor import Executor, Job, Step
from forgeyard_host.locks import is_locked
from forgeyard_model.errors import ExecutorError

T = TypeVar("T")

READY_SECONDS, END_SECONDS = 240.0, 120.0
"""On a machine that is busy with other tests."""
RECONNECT = 300.0
_WORRIES = ("Traceback", "was destroyed", "never retrieved", "never awaited", "ResourceWarning")
"""What a server's log must not say."""


@dataclass(frozen=True, slots=True)
class KeeperSeen:
    """A keeper, by what it says of itself."""

    pid: int
    runtime: str
    directory: Path

    @property
    def lives(self) -> bool:
        """Whether it still does."""
        return is_locked(self.directory / "lock")


class ServerProcess:
    """One server at a time; it may be killed and started again.

    :param settings: lines of its table `serve`.
    """

    def __init__(self, state: Path, *settings: str, runtimes: tuple[str, ...] = ("runc",), linger: str = "2s") -> None:
        self.state = state
        self.run_dir = Path(tempfile.mkdtemp(prefix="fy-run-", dir="/tmp"))
        self.socket = self.run_dir / "executor.sock"
        self.target = f"unix:{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.run_dir / "server.log"
        self.config = self.run_dir / "config.toml"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("FORGEYARD_", "NOTIFY_"))
        }
        names = ", ".join(f'"{name}"' for name in runtimes)
        table = (f'socket = "{self.socket}"', f"runtimes = [{names}]", f'keeper_linger = "{linger}"', *settings)
        rules = (f'state_dir = "{state}"', 'user_namespace = "preferred"', "[serve]", 'default_roots = ["/"]')
        self.config.write_text("\n".join((*rules, *table)) + "\n")
        self.config.chmod(0o600)

    @property
    def pid(self) -> int:
        """Of the server."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, and return once it says that it is ready."""
        path = self.run_dir / "notify"
        path.unlink(missing_ok=True)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as notified, self.log.open("ab") as log:
            notified.bind(str(path))
            argv = [sys.executable, "-X", "dev", "-m", "forgeyard_api", "serve", "--config", str(self.config)]
            self.process = subprocess.Popen(
                argv,
                env={**self.environment, "NOTIFY_SOCKET": str(path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            notified.settimeout(1.0)
            deadline = time.monotonic() + READY_SECONDS
            while True:
                with suppress(TimeoutError):
                    if b"READY=1" in notified.recv(4096):
                        return
                assert self.process.poll() is None, f"it did not start: {self.said()}"
                assert time.monotonic() < deadline, f"it is not ready: {self.said()}"

    def fails_to_start(self) -> str:
        """Start it, and return what it says when it ends at once."""
        argv = [sys.executable, "-m", "forgeyard_api", "serve", "--config", str(self.config)]
        done = subprocess.run(
            argv, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=END_SECONDS
        )  # fmt: skip
        assert done.returncode != 0
        return done.stderr

    def kill(self) -> None:
        """As the kernel does it when memory is short."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal that ends it, and wait for that."""
        os.kill(self.pid, number)
        self.ended()

    def ended(self) -> None:
        """Wait for that."""
        assert self.process is not None
        self.process.wait(END_SECONDS)

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def keepers(self) -> list[KeeperSeen]:
        """Those that live and serve."""
        found = []
        for path in sorted((self.run_dir / "keepers").glob("*/keeper.json")):
            with suppress(FileNotFoundError, ValueError):
                about = json.loads(path.read_text())
                found.append(KeeperSeen(about["pid"], about["runtime"], path.parent))
        return [keeper for keeper in found if keeper.lives]

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Wait for what nothing announces."""
        deadline = time.monotonic() + END_SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} does not come; {self.said()[-4000:]}"
            time.sleep(0.05)
        return found

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[RemoteExecutor]:
        """Somebody who outlasts its restarts, as its attempts outlast him."""
        options = {"reconnect": RECONNECT, "on_client_death": OnClientDeath.CONTINUE, **options}
        async with RemoteExecutor.connect(self.target, **options) as executor:
            yield executor

    def assert_calm(self) -> None:
        """It has not said anything of errors that nobody caught."""
        said = self.said()
        assert not [worry for worry in _WORRIES if worry in said], said[-8000:]

    def assert_nothing_left(self) -> None:
        """No attempt, no keeper and none of their directories. For when it has ended, and they have or are about to."""
        self.until(lambda: not self.keeper_directories(), "the end of keepers")
        left = [path for place in ("sandboxes", "ledger", "spool/*") for path in self.state.glob(f"{place}/*")]
        assert not left, left
        self.until(lambda: not list(processes_of(self.state)), "the end of processes")
        assert not mounts_below(self.state)

    def keeper_directories(self) -> list[Path]:
        """Of keepers, dead or alive."""
        return list((self.run_dir / "keepers").glob("*"))

    def close(self) -> None:
        """End it, its keepers, and whatever they have."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(END_SECONDS)
        keepers = self.keepers()
        for keeper in keepers:
            with suppress(ProcessLookupError):
                os.kill(keeper.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for keeper in keepers:
            while keeper.lives and time.monotonic() < deadline:
                time.sleep(0.05)
            if keeper.lives:
                os.kill(keeper.pid, signal.SIGKILL)
        shutil.rmtree(self.run_dir)


@contextmanager
def served(state: Path, *settings: str, **options: Any) -> Iterator[ServerProcess]:
    """A server that runs. What it and its keepers left when a test failed is undone."""
    server = ServerProcess(state, *settings, **options)
    try:
        server.start()
        yield server
    except BaseException:
        print(server.said()[-8000:])
        for path in sorted((server.run_dir / "keepers").glob("*/log")):
            print(path, path.read_text(errors="replace")[-4000:])
        server.close()
        asyncio.run(_recovered(state))
        raise
    server.close()


async def _recovered(state: Path) -> None:
    async with Executor.open(state):
        pass


def address_of(daemon: Any, runtime: str) -> dict[str, str]:
    """The variable by which a runtime finds a daemon."""
    return {ADDRESS_VARIABLES[runtime]: daemon.address}


def counting(lines: int, *, pause: float = 0.05, code: int = 0, **job: Any) -> Job:
    """A job that says one line after another."""
    script = f"i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); sleep {pause}; done; exit {code}"
    return Job(rootfs="host", steps=(Step("/bin/sh", "-c", script),), **job)


def counted(lines: int) -> bytes:
    """What it says."""
    return b"".join(b"line %d\n" % number for number in range(lines))


async def whole(execution: Any) -> tuple[Any, bytes]:
    """The result of an attempt, and all of its output."""
    out, _ = await collect(execution)
    return await execution.wait(), out


async def first_output(execution: Any) -> None:
    """Until it has said something."""
    async for _ in execution.output():
        return


async def lost(waiting: Awaitable[Any]) -> ExecutorError:
    """The error that an attempt ends with."""
    try:
        result = await waiting
    except ExecutorError as error:
        return error
    raise AssertionError(f"it ended with {result}")
