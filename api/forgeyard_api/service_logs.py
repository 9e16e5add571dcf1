"""`--service-logs DIR`: what each service of a job says, byte for byte, in a file of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forgeyard_model.errors import ForgeyardError

if TYPE_CHECKING:
    from forgeyard_executor import Execution


@asynccontextmanager
async def service_logs(execution: Execution, names: Sequence[str], directory: Path) -> AsyncIterator[None]:
    """Write the output of the services `names` while the block runs, and what is left of it at its end.

    :raises ForgeyardError: a file can't be written; the job is not ended for it.
    """
    tasks = [asyncio.ensure_future(_copy(execution, name, directory / f"{name}.log")) for name in names]
    try:
        yield
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(execution: Execution, name: str, path: Path) -> None:
    try:
        with path.open("wb") as file:
            async for chunk in execution.service_output(name):
                await asyncio.to_thread(file.write, chunk.data)
    except OSError as error:
        raise ForgeyardError(f"--service-logs: {path} can't be written", details=error.strerror or "") from error
