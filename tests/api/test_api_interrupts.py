"""First signal cancels with grace, the second kills, cleanup is never skipped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from forgeyard_api.interrupts import Interrupts
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.result import CancellationReason


class FakeExecution:
    """Stands in for an attempt: what it was asked for is the whole of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[bool] = []
        self.error = error

    async def cancel(self, reason: CancellationReason = CancellationReason.USER, *, kill: bool = False) -> None:
        """Note the request."""
        assert reason is CancellationReason.USER
        self.asked.append(kill)
        if self.error is not None:
            raise self.error


def interrupts(said: list[str], **more: Any) -> Interrupts:
    """For the running task."""
    task: asyncio.Task[Any] | None = asyncio.current_task()
    assert task is not None
    return Interrupts(task, say=said.append, **more)


def run(work: Coroutine[Any, Any, None]) -> None:
    """To its end, on a loop of its own."""
    asyncio.run(work)


def test_first_cancels_second_kills_third_is_no_more() -> None:
    """With grace, then without; every later one only repeats the kill."""

    async def work() -> None:
        said: list[str] = []
        killed: list[bool] = []
        execution = FakeExecution()
        signals = interrupts(said, killed=lambda: killed.append(True))
        signals.attach(execution)
        for _ in range(3):
            signals.on_signal(signal.SIGINT)
        await signals.settle()
        assert execution.asked == [False, True, True]
        assert killed == [True]
        assert len(said) == 2

    run(work())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_decides_the_exit_code(number: signal.Signals, code: int) -> None:
    """TERM then INT is 143: what came later only hurried."""

    async def work() -> None:
        signals = interrupts([])
        assert signals.exit_code is None
        signals.attach(FakeExecution())
        signals.on_signal(number)
        signals.on_signal(signal.SIGINT)
        assert signals.exit_code == code
        await signals.settle()

    run(work())


def test_before_the_job_exists_the_set_up_is_cancelled() -> None:
    """As any task is, so that its clean-up runs, once: a second signal does not tear at it."""

    async def work() -> None:
        cleaned: list[str] = []
        ready = asyncio.Event()

        async def set_up() -> None:
            try:
                ready.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append("done")

        task = asyncio.ensure_future(set_up())
        signals = Interrupts(task, say=lambda text: None)
        await ready.wait()
        signals.on_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        signals.on_signal(signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == ["done"]

    run(work())


@pytest.mark.parametrize(("count", "kill"), [(1, False), (2, True)])
def test_a_signal_before_the_attempt_counts_when_it_comes(count: int, kill: bool) -> None:
    """Set-up that could not be cancelled in time still ends in a cancel."""

    async def work() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        signals = Interrupts(task, say=lambda text: None)
        for _ in range(count):
            signals.on_signal(signal.SIGINT)
        execution = FakeExecution()
        signals.attach(execution)
        await signals.settle()
        assert execution.asked == [kill]

    run(work())


def test_a_cancel_that_fails_is_not_swallowed() -> None:
    """`settle` raises what the cancel met."""

    async def work() -> None:
        signals = interrupts([])
        signals.attach(FakeExecution(ForgeyardError("it would not die")))
        signals.on_signal(signal.SIGINT)
        with pytest.raises(ForgeyardError, match="would not die"):
            await signals.settle()

    run(work())


def test_real_signals_arrive() -> None:
    """Installed on a loop, a TERM to this process is a cancel."""

    async def work() -> None:
        cancelled = asyncio.Event()

        class Waiting(FakeExecution):
            async def cancel(self, reason: CancellationReason = CancellationReason.USER, *, kill: bool = False) -> None:
                """Wake the test."""
                cancelled.set()

        signals = interrupts([])
        signals.install(asyncio.get_running_loop())
        signals.attach(Waiting())
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await cancelled.wait()
        assert signals.exit_code == 143

    run(work())
