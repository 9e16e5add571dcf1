"""A server's keepers: found again after a restart, started where there is none, replaced when one dies."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from forgeyard_api.client.calls import connected
from forgeyard_api.keeper.keeper import ABOUT, SOCKET
from forgeyard_api.keeper.kept import KeptExecutor
from forgeyard_api.wire.messages import executor as wire
from forgeyard_host.processes import start_time
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.identity import SandboxId

log: Final = logging.getLogger("forgeyard.serve")

START_SECONDS: Final = 60.0
LINGER_SECONDS: Final = 30.0
"""How long a keeper with nothing to keep waits for a server."""


@dataclass(frozen=True, slots=True)
class KeeperProcess:
    """A keeper that runs, and what it said of itself."""

    directory: Path
    pid: int
    start_time: int
    runtime: str
    version: str

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            return start_time(self.pid) == self.start_time
        except ProcessLookupError:
            return False


def find(run_dir: Path) -> tuple[KeeperProcess, ...]:
    """Keepers that live, oldest first; what dead ones left in `run_dir` is removed."""
    found = []
    for directory in sorted((run_dir / "keepers").glob("*")):
        keeper = _read(directory)
        if keeper is not None and keeper.alive:
            found.append(keeper)
        elif keeper is not None:
            shutil.rmtree(directory)
    return tuple(found)


def _read(directory: Path) -> KeeperProcess | None:
    try:
        about = json.loads((directory / ABOUT).read_text())
        return KeeperProcess(directory, about["pid"], about["start_time"], about["runtime"], about["version"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None  # one that is just starting, or never did


async def start(run_dir: Path, runtime: str, state_dir: str) -> KeeperProcess:
    """A new keeper, once it serves.

    :raises ExecutorError: SPAWN_FAILED, with what it said.
    """
    directory = run_dir / "keepers" / SandboxId.mint().value
    directory.mkdir(mode=0o700, parents=True)
    log_path = directory / "log"
    with log_path.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "forgeyard_api.keeper",
            f"--runtime={runtime}",
            f"--state-dir={state_dir}",
            f"--directory={directory}",
            f"--linger={LINGER_SECONDS}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
    try:
        async with asyncio.timeout(START_SECONDS):
            while (keeper := _read(directory)) is None:
                if process.returncode is not None:
                    raise _not_started(runtime, log_path)
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        process.kill()
        raise _not_started(runtime, log_path) from error
    return keeper


def _not_started(runtime: str, log_path: Path) -> ExecutorError:
    said = log_path.read_text(errors="replace").strip().splitlines()
    return ExecutorError(
        ExecutorErrorKind.SPAWN_FAILED,
        "keeper_not_started",
        f"the keeper for {runtime} did not start",
        details=said[-1] if said else "it said nothing",
        resolution=f"see {log_path}",
    )


Replaced = Callable[[str, "KeptExecutor"], None]


class Keepers:
    """The keepers of one server.

    :param replaced: told of the one that takes the place of one that died.
    """

    def __init__(self, run_dir: Path, state_dir: str, replaced: Replaced) -> None:
        self._run_dir = run_dir
        self._state_dir = state_dir
        self._replaced = replaced
        self._current: dict[str, KeptExecutor] = {}
        self._older: dict[str, list[KeptExecutor]] = {}
        self._stack = AsyncExitStack()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, run_dir: Path, state_dir: str, runtimes: tuple[str, ...], replaced: Replaced
    ) -> AsyncIterator[Keepers]:
        """Find or start a keeper for each of `runtimes`. At the end of the block they are left running.

        :raises ForgeyardError: one can't be started.
        """
        keepers = cls(run_dir, state_dir, replaced)
        async with keepers._stack:
            own = version("forgeyard-executor")
            for keeper in find(run_dir):
                if keeper.version == own and keeper.runtime in runtimes and keeper.runtime not in keepers._current:
                    keepers._current[keeper.runtime] = await keepers._connect(keeper)
                else:
                    keepers._older.setdefault(keeper.runtime, []).append(await keepers._connect(keeper))
            for runtime in runtimes:
                if runtime not in keepers._current:
                    await keepers._start(runtime)
            yield keepers

    def executors(self) -> dict[str, KeptExecutor]:
        """Whom new attempts are given to, by runtime."""
        return dict(self._current)

    async def _start(self, runtime: str) -> None:
        keeper = await start(self._run_dir, runtime, self._state_dir)
        self._current[runtime] = await self._connect(keeper)

    async def _connect(self, keeper: KeeperProcess) -> KeptExecutor:
        target = f"unix:{keeper.directory / SOCKET}"
        calls = await self._stack.enter_async_context(connected(target, reconnect=0.0))
        older = self._older.setdefault(keeper.runtime, [])
        kept = KeptExecutor(calls, older)
        listening = asyncio.ensure_future(self._listen(keeper, kept))
        self._stack.push_async_callback(_cancelled, listening)
        return kept

    async def _listen(self, keeper: KeeperProcess, kept: KeptExecutor) -> None:
        """Listen to its events, by which a keeper knows that it has a server, and we that it lives."""
        while keeper.alive:
            try:
                async with aclosing(kept.calls.stream("Events", wire.EventsRequest())) as events:
                    async for _ in events:
                        pass
            except ForgeyardError as error:
                log.info("the keeper %d for %s does not answer: %s", keeper.pid, keeper.runtime, error)
            await asyncio.sleep(0.1)
        await self._replace(keeper, kept)

    async def _replace(self, keeper: KeeperProcess, kept: KeptExecutor) -> None:
        """Opening another one destroys what the dead one left. Only then are its attempts reported lost."""
        log.warning("the keeper %d for %s is dead", keeper.pid, keeper.runtime)
        shutil.rmtree(keeper.directory, ignore_errors=True)
        runtime = keeper.runtime
        if self._current.get(runtime) is not kept:
            kept.was_lost()  # an older one: whoever is current has its leftovers to sweep at its next recovery
            return
        pause = 0.5
        while True:
            try:
                await self._start(runtime)
                break
            except ForgeyardError as error:
                log.error("no keeper for %s: %s", runtime, error)  # noqa: TRY400  # its message is all there is to it
                kept.was_lost()
                await asyncio.sleep(pause)
                pause = min(60.0, pause * 2)
        self._replaced(runtime, self._current[runtime])
        kept.was_lost()


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
