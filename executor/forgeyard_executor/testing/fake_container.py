"""A pretended container: its steps end when they are told to, and it can be killed, or lost."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import UTC, datetime
from typing import Final

from forgeyard_executor.testing.fake_run import FakeStep
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.job import Step
from forgeyard_model.result import ProcessExit, StepResult
from forgeyard_process_shim.channel import ShimDied

_NEVER: Final = -1


class FakeContainer:
    """As an attempt's own has it. A step at a time runs.

    :ivar death: done once its first process is dead.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.death: asyncio.Future[None] = loop.create_future()
        self.released = asyncio.Event()
        self._signalled: asyncio.Future[int] = loop.create_future()
        self._stubborn = False
        self._loss: ForgeyardError | None = None

    def signal_step(self, number: int) -> None:
        """The soft signal, which a stubborn step ignores."""
        if not self._stubborn:
            self._end(number)

    def kill_step(self) -> None:
        """End the step that runs, and it alone."""
        self._end(signal.SIGKILL)

    async def kill(self) -> None:
        """End everything in it. Repeating it is no error."""
        if not self.death.done():
            self.death.set_result(None)

    def lose(self, error: ForgeyardError | None = None) -> None:
        """Its first process is killed from outside. `error`: what its engine knows of that."""
        self._loss = error
        if not self.death.done():
            self.death.set_result(None)

    async def loss(self) -> ForgeyardError | None:
        """What the engine knows of such a death."""
        return self._loss

    async def run(self, step: Step, script: FakeStep) -> StepResult:
        """Run `step` to its end; of a background step, until it runs.

        :raises ShimDied: the container ended first.
        """
        if self.death.done():
            raise ShimDied
        started, clock = datetime.now(UTC), time.monotonic()
        may_fail = step.continue_on_error
        if script.error:
            return StepResult(
                step.name, None, started, 0.0, masked=may_fail, error=script.error, exec_code=script.exec_code
            )
        if step.background:
            return StepResult(step.name, None, started, 0.0)
        number = await self._until_its_end(script)
        raw = script.signal or script.exit_code << 8 if number == _NEVER else number
        end = ProcessExit.from_wait_status(raw)
        return StepResult(step.name, end, started, time.monotonic() - clock, masked=may_fail and not end.ok)

    async def _until_its_end(self, script: FakeStep) -> int:
        """The signal that ended it, or _NEVER.

        :raises ShimDied: the container ended first.
        """
        self._signalled = asyncio.get_running_loop().create_future()
        self._stubborn = script.stubborn
        course = asyncio.ensure_future(self._course(script))
        try:
            await asyncio.wait((course, self._signalled, self.death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            course.cancel()
        if self._signalled.done():
            return self._signalled.result()
        if self.death.done():
            raise ShimDied
        return _NEVER

    async def _course(self, script: FakeStep) -> None:
        if script.holds:
            await self.released.wait()
        await asyncio.sleep(script.seconds)

    def _end(self, number: int) -> None:
        if not self._signalled.done():
            self._signalled.set_result(number)
