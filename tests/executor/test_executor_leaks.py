"""Many jobs at once, some killed half-way: the host is as it was."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from forgeyard_executor import Executor, Job, Limits, Outcome, Step, Timeouts

pytestmark = [pytest.mark.kernel, pytest.mark.exclusive]

JOBS, AT_ONCE = 200, 8


@pytest.mark.timeout(240)
def test_200_jobs_leave_nothing(state_dir: Path, leaks: object, warm_rootfs: None) -> None:
    """200 jobs, 8 at a time; every fifth is cancelled or killed at a random moment (section 285)."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    outcomes: list[Outcome] = []

    async def one(executor: Executor, gate: asyncio.Semaphore, number: int) -> None:
        script = "setsid sleep 600 & echo out; test $(($0 % 7)) != 0"
        victim = number % 5 == 0
        if victim:
            script = "trap '' TERM; setsid sleep 600 & sleep 600"
        job = Job(
            rootfs="host",
            steps=(Step("/bin/sh", "-c", script, str(number)),),
            limits=Limits(memory="64MiB", pids=64),
            timeouts=Timeouts(grace=0.1),
        )
        async with gate, executor.run(job) as execution:
            if victim:
                await asyncio.sleep(dice.random() * 0.2)
                await execution.cancel(kill=dice.random() < 0.5)
            outcomes.append((await execution.wait()).outcome)

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            gate = asyncio.Semaphore(AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for number in range(JOBS):
                    group.create_task(one(executor, gate, number))

    asyncio.run(main())
    assert outcomes.count(Outcome.CANCELLED) == JOBS // 5
    failed = sum(1 for number in range(JOBS) if number % 5 and number % 7 == 0)
    assert outcomes.count(Outcome.FAILED) == failed
    assert outcomes.count(Outcome.SUCCEEDED) == JOBS - JOBS // 5 - failed


@pytest.mark.timeout(120)
def test_closing_the_executor_ends_its_jobs(state_dir: Path, leaks: object, warm_rootfs: None) -> None:
    """An executor that is closed with jobs running ends them as shut down, and leaves nothing."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            contexts = [executor.run(Job(rootfs="host", steps=(Step("sleep", "600"),))) for _ in range(4)]
            executions = [await context.__aenter__() for context in contexts]
        for execution in executions:
            result = await execution.wait()
            assert result.outcome is Outcome.CANCELLED
            assert result.cancellation is not None
            assert result.cancellation.value == "shutdown"
        for context in contexts:
            await context.__aexit__(None, None, None)

    asyncio.run(main())


@pytest.mark.timeout(120)
def test_cancelled_callers_leave_nothing(state_dir: Path, leaks: object, warm_rootfs: None) -> None:
    """A task that is cancelled at any moment of prepare, start or wait cleans up on its way out."""

    async def one(executor: Executor) -> None:
        async with executor.run(Job(rootfs="host", steps=(Step("sleep", "600"),), timeouts=Timeouts(grace=0.1))) as run:
            await run.wait()

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            for n in range(25):
                task = asyncio.get_running_loop().create_task(one(executor))
                await asyncio.sleep(n * 0.002)
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()

    asyncio.run(main())
