"""The executors that keep one contract, and how its tests say what a job does: as a program, and as a `FakeRun`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from jobs import sh
from served import socket_over

from forgeyard_api.client import RemoteExecutor
from forgeyard_executor import Executor, Job, Step
from forgeyard_executor.interface import JobExecutor, RunningAttempt
from forgeyard_executor.testing import FakeExecutor, FakeRun, FakeStep
from forgeyard_executor.testing.assertions import assert_nothing_left, assert_sound
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.result import ExecutionResult

SECONDS = 100.0
WELL = FakeRun()
HOLDS = FakeRun(holds=True)
STUBBORN = FakeRun(holds=True, stubborn=True)
SLEEPS = sh("sleep 1000")
DEAF = sh("trap '' TERM; echo deaf; while :; do sleep 1; done")
Body = Callable[[JobExecutor], Awaitable[None]]


class Bench:
    """The executors of these tests: one of this host, one in front of it, and a new pretended one for each test."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._opened: dict[str, JobExecutor] = {}

    def run(self, name: str, fake: FakeRun, body: Body) -> None:
        """Await `body` with the executor called `name`; afterwards nothing of it is left there."""

        async def main() -> None:
            async with asyncio.timeout(SECONDS):
                executor = FakeExecutor(lambda _: fake) if name == "fake" else await self._open(name)
                await body(executor)
                await assert_nothing_left(executor)

        self._runner.run(main())

    def close(self) -> None:
        """Close those that were opened."""
        with self._runner:
            self._runner.run(self._stack.aclose())

    async def _open(self, name: str) -> JobExecutor:
        if name not in self._opened:
            self._opened[name] = await (self._executor() if name == "runc" else self._remote())
        return self._opened[name]

    async def _executor(self) -> JobExecutor:
        return await self._stack.enter_async_context(Executor.open(self.state, config=ExecutorConfig()))

    async def _remote(self) -> JobExecutor:
        host = await self._open("runc")
        target, _ = await self._stack.enter_async_context(socket_over(self.state, host))
        return await self._stack.enter_async_context(RemoteExecutor.connect(target))


@contextmanager
def opened(shared_state: Path) -> Iterator[Bench]:
    """The executors, on a state directory of their own."""
    state = Path(tempfile.mkdtemp(prefix="fy-contract-", dir="/var/tmp"))
    state.chmod(0o711)
    if (shared_state / "rootfs").exists():
        shutil.copytree(shared_state / "rootfs", state / "rootfs", symlinks=True)
    made = Bench(state)
    yield made
    made.close()
    shutil.rmtree(state)


On = Callable[[FakeRun, Body], None]


def job(*steps: Step, **options: object) -> Job:
    """A job on the host rootfs."""
    return Job(rootfs="host", steps=steps, **options)  # type: ignore[arg-type]  # passed on by name


def named(name: str, script: str, **options: object) -> Step:
    """A step with a name."""
    return sh(script, name=name, **options)


async def ended(executor: JobExecutor, wanted: Job, **options: object) -> ExecutionResult:
    """Run a job to its end; its result, which says one thing."""
    async with executor.run(wanted, **options) as attempt:  # type: ignore[arg-type]  # passed on by name
        result = await attempt.wait()
    assert_sound(result)
    return result


def scripted(**steps: FakeStep) -> FakeRun:
    """A run of which steps are told by name."""
    return FakeRun(steps=MappingProxyType(steps))


async def first_output(attempt: RunningAttempt) -> None:
    """Return once it has written something."""
    chunks = attempt.output()
    await anext(chunks)
    await chunks.aclose()
