"""The executor's end of the channel to the init of one job container."""

from __future__ import annotations

import asyncio
import os
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, TypeVar

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.plan import SHIM_DIR
from forgeyard_process_shim import fifos, protocol
from forgeyard_process_shim.probe_pipe import ProbeEnd, ProbePipe
from forgeyard_process_shim.protocol import BackgroundExited, Exited, Hello, NoExec, Report, ShimNote, Started

FIFO_ARGV: Final = (f"{SHIM_DIR}/init", "fifo")
_Answer = TypeVar("_Answer")


class ShimDied(ExecutorError):  # noqa: N818  it reads as what happened
    """The init ended while something was asked of it. Nothing inside can end it but a limit of the job's own."""

    def __init__(self, details: str = "") -> None:
        super().__init__(
            ExecutorErrorKind.LOST, "shim_died", "the job's init ended before the job did", details=details
        )


class ShimChannel:
    """Runs steps through the init of one container, from one event loop.

    Order of use: `create`, start the container, `hello`, `unlink`, `release`, then steps, `finish`, `close`.

    :ivar stdout_fd, stderr_fd: what the job writes. Whoever reads them takes them with `take_output` and closes them;
        they can be read once `hello` has returned (before, an empty read is no end) and end when the init does.
    :ivar notes: what the shim could not do as asked.
    :ivar background_ends: background steps that have ended, by id.
    """

    argv: Final = FIFO_ARGV

    def __init__(self, directory: Path, ends: fifos.HostEnds, owner: tuple[int, int]) -> None:
        self._probe = None if ends.probe < 0 else ProbePipe(ends.probe)
        self._directory = directory
        self._owner = owner
        self._control, self._report = ends.control, ends.report
        self.stdout_fd, self.stderr_fd = ends.stdout, ends.stderr
        self._owns_output = True
        self._decoder = protocol.ReportDecoder()
        self._unsent = b""
        self._loop: AbstractEventLoop | None = None
        self._died: ExecutorError | None = None
        self._hello: Future[Hello] | None = None
        self._foreground: Future[Exited | NoExec] | None = None
        self._on_started: Callable[[Started], None] | None = None
        self._background: dict[int, Future[Started | NoExec | BackgroundExited]] = {}
        self._foreground_id = 0
        self.notes: list[str] = []
        self.background_ends: dict[int, BackgroundExited] = {}
        self.on_background_end: Callable[[BackgroundExited], None] | None = None

    @classmethod
    def create(cls, directory: Path, *, shim: Path, uid: int, gid: int, probes: bool = False) -> Self:
        """Make the FIFOs and the init in `directory`, and open our ends. `uid` and `gid` are the job's on the host.

        :param probes: for a container that `run_probe` is wanted in.
        :raises ExecutorError: IO_FAILED, reason ``shim_channel``.
        """
        try:
            fifos.make_fifos(directory, uid, gid, probes=probes)
            fifos.place_init(directory, shim)
            ends = fifos.open_host_ends(directory, probes=probes)
        except OSError as error:
            raise fifos.io_error(error, "make the channel to the job's init") from error
        return cls(directory, ends, (uid, gid))

    def take_output(self) -> tuple[int, int]:
        """Hand stdout_fd and stderr_fd over to the caller, who closes them."""
        self._owns_output = False
        return self.stdout_fd, self.stderr_fd

    async def hello(self, *, timeout: float) -> Hello:
        """Wait up to `timeout` seconds for the shim to be ready, and become the only writer of commands.

        :raises ShimDied: it ended first.
        :raises ExecutorError: TIMEOUT ``shim_silent``; INTERNAL ``shim_version`` for another version's binary.
        """
        self._loop = asyncio.get_running_loop()
        self._hello = self._loop.create_future()
        self._loop.add_reader(self._report, self._read_reports)
        try:
            async with asyncio.timeout(timeout):
                hello = await self._hello
        except TimeoutError as error:
            raise ExecutorError(
                ExecutorErrorKind.TIMEOUT, "shim_silent", f"the job's init did not report within {timeout:g}s"
            ) from error
        if hello.version != protocol.VERSION:
            raise ExecutorError(
                ExecutorErrorKind.INTERNAL,
                "shim_version",
                f"the job's init speaks version {hello.version}, not {protocol.VERSION}",
                resolution="run: python -m forgeyard_process_shim.build",
            )
        self._become_only_writer()
        return hello

    def _become_only_writer(self) -> None:
        # While we hold a reading end too, our death would be no end of file for the shim.
        try:
            control = os.open(self._directory / "control", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ShimDied(str(error)) from error
        os.close(self._control)
        self._control = control

    def unlink(self) -> None:
        """Remove the FIFOs' names, before any workload runs: nobody can open them again. Idempotent."""
        fifos.remove_fifos(self._directory)

    def release(self) -> None:
        """Open the gate: steps may run."""
        self._send(protocol.encode_go())

    async def run_step(
        self, command: protocol.StepCommand, *, started: Callable[[Started], None] | None = None
    ) -> Exited | NoExec:
        """Run a foreground step to its end; by then all it wrote is in the pipes and all it left behind is dead.

        `started` is called once, when it has a process. Cancelled: the step is killed; the next one waits for its end.

        :raises InvalidRequest: no frame can hold the step.
        :raises ShimDied: the init ended first.
        """
        frame = protocol.encode_step(replace(command, background=False))
        await self._idle()
        end: Future[Exited | NoExec] = self._new_future()
        self._foreground, self._foreground_id, self._on_started = end, command.id, started
        end.add_done_callback(self._foreground_done)
        self._send(frame)
        try:
            return await asyncio.shield(end)
        except asyncio.CancelledError:
            self.kill_step()
            raise

    async def _idle(self) -> None:
        while self._foreground is not None:
            await asyncio.wait([self._foreground])

    async def run_probe(self, command: protocol.StepCommand, *, timeout: float) -> ProbeEnd:
        """Run a foreground step whose output is kept apart, for `timeout` seconds; then it is killed with its children.

        What it wrote is complete by then, in so far as PROBE_TAIL holds it. Cancelled: as with `run_step`.

        :raises InvalidRequest: no frame can hold the step.
        :raises ExecutorError: INTERNAL ``shim_order``, for a channel without probes.
        :raises ShimDied: the init ended first.
        """
        pipe = self._probe
        if pipe is None:
            raise ExecutorError(ExecutorErrorKind.INTERNAL, "shim_order", "this container was made without probes")
        await self._idle()
        expired = asyncio.Event()

        def expire() -> None:
            expired.set()
            self.kill_step()

        timer = asyncio.get_running_loop().call_later(timeout, expire)
        try:
            with pipe.reading():
                end = await self.run_step(replace(command, probe=True))
                return ProbeEnd(end, pipe.drain(), timed_out=expired.is_set())
        finally:
            timer.cancel()

    def _foreground_done(self, end: Future[Exited | NoExec]) -> None:
        self._foreground = None
        if not end.cancelled():
            end.exception()  # seen: a cancelled caller is not there to see it

    async def start_background(self, command: protocol.StepCommand) -> Started | NoExec | BackgroundExited:
        """Start a step that outlives the next ones; returns when its program runs, or could not.

        :raises InvalidRequest: no frame can hold the step.
        :raises ShimDied: the init ended first.
        """
        frame = protocol.encode_step(replace(command, background=True))
        await self._idle()
        answer: Future[Started | NoExec | BackgroundExited] = self._new_future()
        self._background[command.id] = answer
        self._send(frame)
        try:
            return await answer
        finally:
            self._background.pop(command.id, None)

    def signal(self, signum: int, step_id: int = 0) -> None:
        """Signal the process group of the foreground step, or of a background step by id. None running: no effect."""
        self._send(protocol.encode_signal(step_id, signum))

    def kill_step(self) -> None:
        """SIGKILL the foreground step and what it left behind; its end is reported as usual."""
        if self._foreground is not None:
            self._send(protocol.encode_kill_step(self._foreground_id))

    def finish(self) -> None:
        """Tell the shim to kill everything and exit. Its container then ends."""
        self._send(protocol.encode_finish())

    def write_script(self, name: str, text: str) -> str:
        """A read-only script for a step; returns its path in the sandbox.

        :raises InvalidRequest: `name` is no plain file name.
        :raises ExecutorError: IO_FAILED, reason ``shim_channel``.
        """
        if "/" in name or name in fifos.RESERVED or not name.strip("."):
            raise InvalidRequest("script", name, "is not a plain file name")
        fifos.write_file(self._directory / name, text.encode("utf-8", "surrogateescape"), 0o444)
        return f"{SHIM_DIR}/{name}"

    def write_stdin(self, step_id: int, data: bytes) -> str:
        """Input of a step, readable by the job's uid alone; returns its path in the sandbox.

        :raises ExecutorError: IO_FAILED, reason ``shim_channel``.
        """
        name = f"stdin-{step_id}"
        fifos.write_file(self._directory / name, data, 0o400, self._owner)
        return f"{SHIM_DIR}/{name}"

    def remove(self, sandbox_path: str) -> None:
        """Remove a script or input once its step is over. Idempotent."""
        (self._directory / sandbox_path.rsplit("/", 1)[-1]).unlink(missing_ok=True)

    def close(self) -> None:
        """Close our ends; a shim that still runs then kills its container. Idempotent."""
        if self._report < 0:
            return
        self._fail(ShimDied("the channel was closed"))
        os.close(self._control)
        os.close(self._report)
        self._control = self._report = -1
        if self._probe is not None:
            self._probe.close(self._loop)
        if self._owns_output:
            os.close(self.stdout_fd)
            os.close(self.stderr_fd)
        self._owns_output = False

    def _new_future(self) -> Future[_Answer]:
        if self._died is not None:
            raise self._died
        if self._loop is None:
            raise ExecutorError(ExecutorErrorKind.INTERNAL, "shim_order", "a step was given before hello()")
        return self._loop.create_future()

    def _send(self, frame: bytes) -> None:
        if self._died is not None:
            return  # whoever waits has been told; a late signal or finish has nothing to reach
        waiting = bool(self._unsent)
        self._unsent += frame
        if not waiting:
            self._write_unsent()

    def _write_unsent(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._control, self._unsent) :]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self._control, self._write_unsent)
        except BrokenPipeError:
            self._fail(ShimDied("it stopped reading commands"))
        else:
            if self._loop is not None:
                self._loop.remove_writer(self._control)

    def _read_reports(self) -> None:
        try:
            data = os.read(self._report, 64 << 10)
            reports = self._decoder.feed(data)
        except BlockingIOError:
            return
        except protocol.ProtocolError as error:
            self._fail(error)
            return
        for report in reports:
            self._take(report)
        if not data:
            self._fail(ShimDied())

    def _take(self, report: Report) -> None:
        match report:
            case ShimNote(text):
                self.notes.append(text)
            case Hello():
                _answer(self._hello, report)
            case Started() if report.id in self._background:
                _answer(self._background[report.id], report)
            case Started():
                if self._on_started is not None and report.id == self._foreground_id:
                    self._on_started(report)
            case NoExec() if report.id in self._background:
                _answer(self._background[report.id], report)
            case BackgroundExited():
                self.background_ends[report.id] = report
                _answer(self._background.get(report.id), report)
                if self.on_background_end is not None:
                    self.on_background_end(report)
            case Exited() | NoExec():
                self._end_foreground(report)

    def _end_foreground(self, report: Exited | NoExec) -> None:
        if self._foreground is None or report.id != self._foreground_id:
            self._fail(protocol.ProtocolError(f"the end of step {report.id}, which is not running"))
        else:
            _answer(self._foreground, report)

    def _fail(self, error: ExecutorError) -> None:
        if self._died is not None:
            return
        self._died = error
        if self.notes and not error.details:
            error.details = "; ".join(self.notes)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._report)
            self._loop.remove_writer(self._control)
        for waiter in (self._hello, self._foreground, *self._background.values()):
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)


def _answer(waiter: Future[_Answer] | None, value: _Answer) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(value)
