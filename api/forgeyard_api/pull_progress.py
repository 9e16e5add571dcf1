"""How far a pull is: a bar per layer on a terminal, a line per layer elsewhere. On stderr, never among a job's output.

Called from the threads that pull, so everything is behind one lock. Nothing is shown, and rich is not imported, until
a first blob is really fetched.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final

from forgeyard_api.main import say
from forgeyard_model.units import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_SHOWN_DIGEST: Final = 12
"""Hex digits, enough to tell the layers of an image apart."""


def pull_progress(*, quiet: bool = False, verb: str = "pull") -> PullProgress:
    """What fits stderr: bars, lines, or nothing for `quiet`.

    :param verb: pull, or push.
    """
    if quiet:
        return PullProgress()
    bars = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return BarProgress() if bars else LineProgress(verb)


class PullProgress:
    """Shows nothing."""

    def begin(self, digest: str, size: int, what: str) -> None:
        """A blob is about to be fetched."""

    def advance(self, digest: str, total_received: int) -> None:
        """So many of its bytes are here."""

    def done(self, digest: str, state: str) -> None:
        """It ended as pulled, present, unpacked or failed."""

    def close(self) -> None:
        """Nothing more is shown: the job's own output follows."""


class LineProgress(PullProgress):
    """A line when a blob begins and one when it is here: for logs."""

    def __init__(self, verb: str = "pull") -> None:
        self._verb = verb
        self._lock = threading.Lock()
        self._sizes: dict[str, tuple[int, str]] = {}

    def begin(self, digest: str, size: int, what: str) -> None:
        """Say that it is fetched."""
        with self._lock:
            if digest in self._sizes:
                return
            self._sizes[digest] = (size, what)
        say(f"{self._verb}ing {_name(what, digest)} ({format_size(size)})")

    def done(self, digest: str, state: str) -> None:
        """Say that it is here, if its begin was said."""
        with self._lock:
            known = self._sizes.pop(digest, None)
        if known is not None and state != "present":
            say(f"{f'could not {self._verb}' if state == 'failed' else f'{self._verb}ed'} {_name(known[1], digest)}")


class BarProgress(PullProgress):
    """A bar per blob, drawn by rich."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def begin(self, digest: str, size: int, what: str) -> None:
        """Draw its bar, empty."""
        with self._lock:
            if self._bars is None:
                self._bars = _bars()
                self._bars.start()
            if digest not in self._tasks:
                self._tasks[digest] = self._bars.add_task(_name(what, digest), total=size, state="")

    def advance(self, digest: str, total_received: int) -> None:
        """Move its bar, back too."""
        with self._lock:
            if self._bars is not None and digest in self._tasks:
                self._bars.update(self._tasks[digest], completed=total_received)

    def done(self, digest: str, state: str) -> None:
        """Fill its bar, or leave it where it failed."""
        with self._lock:
            if self._bars is None or digest not in self._tasks:
                return
            task = self._tasks[digest]
            if state == "failed":
                self._bars.update(task, state=state)
                self._bars.stop_task(task)
                return
            total = self._bars.tasks[task].total
            self._bars.update(task, completed=total, state=state)

    def close(self) -> None:
        """Leave the bars as they are and give the terminal back."""
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
            self._bars, self._tasks = None, {}


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        console=Console(stderr=True),
        # The job's bytes go to stdout untouched; rich must not stand in for it, nor for stderr.
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _name(what: str, digest: str) -> str:
    return f"{what} {digest.removeprefix('sha256:')[:_SHOWN_DIGEST]}"
