"""The time a pull or a push may take, its cancellation, and where its progress is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Event
from typing import Protocol

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass


class TransferCancelled(ExecutorError):  # noqa: N818  cancelling is no error of anything
    """Whoever asked for the image wants it no longer."""

    def __init__(self) -> None:
        super().__init__(ExecutorErrorKind.PREPARE, "cancelled", "the transfer of the image was cancelled")

    @property
    def failure_class(self) -> FailureClass:
        """Nobody's fault, and nothing to retry."""
        return FailureClass.CANCELLED


class TransferTimeout(ExecutorError):  # noqa: N818  the field's word
    """The image's time ran out."""

    def __init__(self) -> None:
        super().__init__(
            ExecutorErrorKind.TIMEOUT,
            "image_timeout",
            "the time for the image's transfer ran out",
            resolution="allow more time, or pull the image before the job",
        )

    @property
    def failure_class(self) -> FailureClass:
        """A time-out: whether to try again is the policy's to say."""
        return FailureClass.TIMEOUT


@dataclass(frozen=True, slots=True)
class Budget:
    """How long something may take. One budget serves every thread of a transfer.

    :param deadline: on time.monotonic's clock, in seconds; None for no limit.
    :param cancelled: set from anywhere to end the transfer within about a second.
    """

    deadline: float | None = None
    cancelled: Event = field(default_factory=Event, compare=False)

    @classmethod
    def within(cls, seconds: float | None) -> Budget:
        """A budget of `seconds` from now; None for no limit."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    def remaining(self) -> float | None:
        """Seconds left, never below 0; None for no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def over(self) -> bool:
        """Whether check() would raise."""
        return self.cancelled.is_set() or self.remaining() == 0.0

    def check(self) -> None:
        """Go on only while there is time.

        :raises TransferCancelled: when cancelled.
        :raises TransferTimeout: past the deadline.
        """
        if self.cancelled.is_set():
            raise TransferCancelled
        if self.remaining() == 0.0:
            raise TransferTimeout

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than there is time; raises as check() does, before and after."""
        self.check()
        left = self.remaining()
        self.cancelled.wait(seconds if left is None else min(seconds, left))
        self.check()


class Progress(Protocol):
    """Hears how far each blob is. Called from several threads, several times a second for each: be quick."""

    def begin(self, digest: str, size: int, what: str) -> None:
        """Something of `size` bytes starts; `what` names it for people ("layer", "config")."""

    def advance(self, digest: str, total_received: int) -> None:
        """So many bytes are there. Fewer than before after a restart from zero."""

    def done(self, digest: str, state: str) -> None:
        """It ended as "pulled", "present", "unpacked" or "failed"."""


class NoProgress:
    """A Progress that tells nobody."""

    def begin(self, digest: str, size: int, what: str) -> None:
        """Nothing."""

    def advance(self, digest: str, total_received: int) -> None:
        """Nothing."""

    def done(self, digest: str, state: str) -> None:
        """Nothing."""
