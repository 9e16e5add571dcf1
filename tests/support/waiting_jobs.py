"""Jobs that wait for a word, so that a test can do something in the middle of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jobs import collect, sh

from forgeyard_executor import Execution, Executor, Job

WAITS = "echo started; read -r line < /work/tmp/go; echo ended $line; exit 5"


class Waiting:
    """A running job, and what it has written."""

    def __init__(self, executor: Executor, state: Path, execution: Execution) -> None:
        self.execution = execution
        self._executor = executor
        self._reading = asyncio.ensure_future(collect(execution))
        self._gate = state / "sandboxes" / execution.sandbox_id / "scratch/worktmp/go"

    @property
    def pid(self) -> int:
        """Of its PID 1."""
        own = next(item for item in self._executor.list_sandboxes() if item.sandbox_id == self.execution.sandbox_id)
        assert own.pid is not None
        return own.pid

    async def end(self) -> bytes:
        """Give the word; all output, once the job has written its last."""
        await asyncio.to_thread(self._gate.write_text, "well\n")
        return (await self._reading)[0]


@asynccontextmanager
async def waiting(executor: Executor, state: Path, script: str = WAITS, **more: Any) -> AsyncIterator[Waiting]:
    """Such a job, once its step runs."""
    job = Job(rootfs="host", steps=(sh("mkfifo /work/tmp/go"), sh(script)), **more)
    async with executor.run(job) as execution:
        made = Waiting(executor, state, execution)
        async for _ in execution.output():
            break
        yield made
