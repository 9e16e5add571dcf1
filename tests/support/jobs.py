"""How tests run a job to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from forgeyard_executor import Execution, ExecutionResult, Executor, Job, Step


async def collect(execution: Execution) -> tuple[bytes, bytes]:
    """All output of an attempt, per stream."""
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    async for chunk in execution.output():
        streams[chunk.stream] += chunk.data
    return bytes(streams["stdout"]), bytes(streams["stderr"])


def cleaned(result: ExecutionResult) -> ExecutionResult:
    """`result`, of which everything could be undone."""
    assert not [note for note in result.notes if note.startswith("cleanup: ")], result.notes
    return result


def run(state: Path, job: Job, **options: object) -> tuple[ExecutionResult, bytes, bytes]:
    """Run a job to its end."""

    async def main() -> tuple[ExecutionResult, bytes, bytes]:
        async with Executor.open(state) as executor, executor.run(job, **options) as execution:  # type: ignore[arg-type]  # passed on by name
            out, err = await collect(execution)
            return cleaned(await execution.wait()), out, err

    return asyncio.run(main())


def sh(script: str, **options: object) -> Step:
    """A step in exec form that gives `script` to sh."""
    return Step("/bin/sh", "-c", script, **options)  # type: ignore[arg-type]  # passed on by name
