"""`crictl exec --sync`: one more step in an attempt that runs steps on demand, and what it wrote."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from forgeyard_api.cri.ids import owner, pod_id
from forgeyard_api.cri.logs import after
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.job import Step
from forgeyard_model.result import StepResult
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark

log: Final = logging.getLogger("forgeyard.serve")

MAX_OUTPUT: Final = 4 << 20
"""Bytes of each stream that are given back: a client takes 16 MiB in one message."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended, and its output."""

    stdout: bytes
    stderr: bytes
    exit_code: int


class ExecSync:
    """Runs commands, in one attempt one after the other: between two looks at its output there is one step's."""

    def __init__(self, table: AttemptTable) -> None:
        self._table = table
        self._locks: dict[str, asyncio.Lock] = {}
        self._running: set[asyncio.Task[StepResult]] = set()

    async def run(self, view: AttemptView, argv: Sequence[str], seconds: int) -> Ran:
        """Run `argv` in the job's container, as its user and within its limits.

        A failure of it does not make the job fail.

        :param seconds: after which nobody waits any more; 0 waits to its end.
        :raises TimeoutError: it goes on in its sandbox.
        :raises ForgeyardError: it could not be run.
        """
        if view.state is not AttemptState.RUNNING:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED, "not_running", f"the attempt is {view.state.value}: nothing runs in it"
            )
        step = Step(*argv, name="crictl exec", continue_on_error=True)
        async with asyncio.timeout(seconds or None):
            async with self._locks.setdefault(pod_id(view), asyncio.Lock()):
                before, _ = await self._output(view, START)
                result = await asyncio.shield(self._started(view, step))
                _, output = await self._output(view, before)
        return Ran(output["stdout"], output["stderr"], _code(result))

    async def close(self) -> None:
        """Wait for none of them."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(tuple(self._running))

    def _started(self, view: AttemptView, step: Step) -> asyncio.Task[StepResult]:
        """In a task of its own: a step can't be taken back by whoever stops waiting for it."""
        task = asyncio.get_running_loop().create_task(self._table.exec(owner(view), view.attempt_id, step))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[StepResult]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), ForgeyardError):
            log.info("a command of exec: %s", error)

    async def _output(self, view: AttemptView, mark: SpoolMark) -> tuple[SpoolMark, dict[str, bytes]]:
        kept = {"stdout": bytearray(), "stderr": bytearray()}
        chunks = self._table.output(owner(view), view.attempt_id, after=mark, follow=False)
        async with aclosing(chunks):
            async for chunk in chunks:
                mark = after(mark, chunk)
                _keep(kept[chunk.stream], chunk)
        return mark, {stream: bytes(data) for stream, data in kept.items()}


def _keep(kept: bytearray, chunk: OutputChunk) -> None:
    kept += chunk.data[: max(0, MAX_OUTPUT - len(kept))]


def _code(result: StepResult) -> int:
    """As a shell has it."""
    if result.exit is not None:
        return result.exit.shell_code
    if result.exec_code is not None:
        return result.exec_code
    raise ExecutorError(ExecutorErrorKind.LOST, "exec_lost", "the command's end is not known", details=result.error)
