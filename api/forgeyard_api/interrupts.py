"""What a signal means: the first cancels with grace, the second kills at once, cleanup is never skipped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final, Protocol

from forgeyard_model.result import CancellationReason

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Cancellable(Protocol):
    """The part of a running attempt that signals need."""

    async def cancel(self, reason: CancellationReason = ..., *, kill: bool = False) -> None:
        """Ask it to stop."""


class Interrupts:
    """Turns signals into cancels of the attempt, or of `task` while no attempt exists yet.

    :param task: what to cancel during set-up; its cleanup runs as for any cancelled task.
    :param say: tells the user what happens now.
    :param killed: called at the second signal, to give up on a reader that no longer reads.
    """

    def __init__(
        self, task: asyncio.Task[object], *, say: Callable[[str], None], killed: Callable[[], None] = lambda: None
    ) -> None:
        self._task = task
        self._say = say
        self._killed = killed
        self._execution: Cancellable | None = None
        self._requests: list[asyncio.Task[None]] = []
        self.received: list[signal.Signals] = []

    @property
    def exit_code(self) -> int | None:
        """128 + the first signal; None when there was none."""
        return 128 + self.received[0] if self.received else None

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take over the signals of this process."""
        for number in SIGNALS:
            loop.add_signal_handler(number, self.on_signal, number)

    def attach(self, execution: Cancellable) -> None:
        """From now on signals go to `execution`; one that has already come counts."""
        self._execution = execution
        if self.received:
            self._request(execution, kill=len(self.received) > 1)

    def on_signal(self, number: signal.Signals) -> None:
        """One signal has come. Runs on the event loop."""
        self.received.append(number)
        count = len(self.received)
        if count == 1:
            self._say(f"{number.name}: stopping the job; once more to kill it at once")
        elif count == 2:
            self._say(f"{number.name}: killing the job")
            self._killed()
        if self._execution is not None:
            self._request(self._execution, kill=count > 1)
        elif count == 1:
            self._task.cancel()

    async def settle(self) -> None:
        """Wait for the cancels that were asked for, and raise what one of them met."""
        for request in self._requests:
            await request

    def _request(self, execution: Cancellable, *, kill: bool) -> None:
        cancel = execution.cancel(CancellationReason.USER, kill=kill)
        self._requests.append(asyncio.ensure_future(cancel))
