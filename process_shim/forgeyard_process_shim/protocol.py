"""Frames between the executor and the init of a job container (init.c is the other end).

A frame is a little-endian u32 length, one type byte, and a payload; the length counts type and payload.
Commands carry u32 words and NUL-terminated strings, reports carry u64 words.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Final, TypeAlias

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.job import EMPTY

VERSION: Final = 2
MAX_FRAME: Final = 4 << 20
"""Bytes of a command with its length, as init.c bounds it; execve's own limits are below that."""
MAX_REPORT: Final = 255
"""Bytes of a report after its length: reports are written in one piece, so they stay below PIPE_BUF."""
MAX_WORDS: Final = (1 << 16) - 2
"""Arguments and variables of a step together."""


class ProtocolError(ExecutorError):
    """Bytes that are no frame, or a frame that means nothing. Only a broken init can cause it."""

    def __init__(self, details: str) -> None:
        super().__init__(
            ExecutorErrorKind.IO_FAILED, "shim_protocol", "the job's init sent what can't be read", details=details
        )


class CommandType(IntEnum):
    """Executor to init."""

    GO = 1
    STEP = 2
    SIGNAL = 3
    KILL_STEP = 4
    FINISH = 5


class ReportType(IntEnum):
    """Init to executor."""

    HELLO = 0x81
    STARTED = 0x82
    NOEXEC = 0x83
    EXITED = 0x84
    BACKGROUND_EXITED = 0x85
    ERROR = 0x86


class StepFlag(IntFlag):
    """Bits of a STEP frame; MASKED, ON_FAILURE and ALWAYS count in replay only."""

    NONE = 0
    BACKGROUND = 1
    MERGE_OUTPUT = 2
    MASKED = 4
    ON_FAILURE = 8
    ALWAYS = 16
    PROBE = 32


class Stage(IntEnum):
    """Where starting a step failed. INTERPRETER: the file is there, the program its #! line names is not."""

    FORK = 1
    STDIN = 2
    CHDIR = 3
    EXEC = 4
    INTERPRETER = 5


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One process to run. Paths are as the sandbox sees them.

    :param id: positive, different for each step of an attempt.
    :param env: the whole environment; PATH in it finds `argv[0]`.
    :param stdin: file to read from; empty is /dev/null.
    :param probe: what it writes goes into the channel's probe pipe, as one stream, and not into the job's output.
    """

    id: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    cwd: str = "/"
    stdin: str = ""
    background: bool = False
    merge_output: bool = False
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Hello:
    """The shim is ready and holds its ends of the channel. pid, uid and gid as it sees them."""

    version: int
    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Started:
    """The step has a process. `pid` is that of the sandbox's namespace."""

    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class NoExec:
    """The step never ran: `errno` of the call that failed, and which one it was."""

    id: int
    errno: int
    stage: Stage

    @property
    def shell_code(self) -> int:
        """127 not found, 126 found but not executable or not startable (CONTRACT, Command line)."""
        return 127 if self.stage is Stage.EXEC and self.errno in (2, 20) else 126  # ENOENT, ENOTDIR


@dataclass(frozen=True, slots=True)
class Exited:
    """The step's own process ended, and nothing it left behind lives.

    :param status: as wait(2) gives it.
    :param leftovers: processes the step had left behind, which were killed.
    :param user_time, system_time: seconds, of the process and the children it waited for.
    :param max_rss: bytes, of the largest of them.
    """

    id: int
    status: int
    leftovers: int
    user_time: float
    system_time: float
    max_rss: int


@dataclass(frozen=True, slots=True)
class BackgroundExited:
    """A background step's own process ended; what it started may live on. Status 9 too if its keeper was killed."""

    id: int
    status: int
    user_time: float
    system_time: float
    max_rss: int


@dataclass(frozen=True, slots=True)
class ShimNote:
    """Something the shim could not do as asked, in words."""

    text: str


Report: TypeAlias = Hello | Started | NoExec | Exited | BackgroundExited | ShimNote


def _frame(kind: CommandType, payload: bytes = b"") -> bytes:
    return struct.pack("<IB", len(payload) + 1, kind) + payload


def encode_go() -> bytes:
    """Open the gate."""
    return _frame(CommandType.GO)


def encode_finish() -> bytes:
    """Kill everything and exit 0."""
    return _frame(CommandType.FINISH)


def encode_signal(step_id: int, signum: int) -> bytes:
    """Signal the process group of a step; id 0 is the foreground step."""
    return _frame(CommandType.SIGNAL, struct.pack("<II", step_id, signum))


def encode_kill_step(step_id: int) -> bytes:
    """SIGKILL a step; the shim kills what it left behind when it is dead."""
    return _frame(CommandType.KILL_STEP, struct.pack("<I", step_id))


def encode_step(command: StepCommand, extra: StepFlag = StepFlag.NONE) -> bytes:
    """Frame of a step.

    :raises InvalidRequest: no argv, a NUL, a bad variable name, or more than a frame or an exec can hold.
    """
    if not command.argv or len(command.argv) + len(command.env) > MAX_WORDS:
        raise InvalidRequest("step", command.argv[:1], f"needs 1 to {MAX_WORDS} arguments and variables")
    flags = extra | (StepFlag.BACKGROUND if command.background else 0)
    flags |= StepFlag.MERGE_OUTPUT if command.merge_output else 0
    flags |= StepFlag.PROBE if command.probe else 0
    strings = [command.cwd, command.stdin, *command.argv, *map(_variable, command.env.items())]
    head = struct.pack("<IIII", command.id, flags, len(command.argv), len(command.env))
    payload = head + b"".join(_string(text) for text in strings)
    if len(payload) + 5 > MAX_FRAME:
        raise InvalidRequest("step", command.argv[0], f"arguments and environment exceed {MAX_FRAME >> 20} MiB")
    return _frame(CommandType.STEP, payload)


def _variable(item: tuple[str, str]) -> str:
    name, value = item
    if not name or "=" in name:
        raise InvalidRequest("env", name, "a variable's name is not empty and has no '='")
    return f"{name}={value}"


def _string(text: str) -> bytes:
    try:
        # surrogateescape carries bytes that are no UTF-8 through str, whatever the locale.
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest("step", ascii(text), "has characters that no byte string can hold") from error
    if b"\0" in raw:
        raise InvalidRequest("step", text, "has a NUL byte, which no argument or variable can hold")
    return raw + b"\0"


class ReportDecoder:
    """Incremental and bounded: feed it what the pipe gave, get whole reports."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    @property
    def idle(self) -> bool:
        """No part of a report is waiting for its rest."""
        return not self._pending

    def feed(self, data: bytes) -> list[Report]:
        """Reports that `data` completes.

        :raises ProtocolError: a length, type or payload that no report has.
        """
        buffer, reports, at = self._pending + data, [], 0
        while len(buffer) - at >= 4:
            (length,) = struct.unpack_from("<I", buffer, at)
            if not 1 <= length <= MAX_REPORT:
                raise ProtocolError(f"a report of {length} bytes")
            if len(buffer) - at < 4 + length:
                break
            reports.append(_report(buffer[at + 4], buffer[at + 5 : at + 4 + length]))
            at += 4 + length
        self._pending = buffer[at:]
        return reports


_WORDS: Final = {
    ReportType.HELLO: 4,
    ReportType.STARTED: 2,
    ReportType.NOEXEC: 3,
    ReportType.EXITED: 8,
    ReportType.BACKGROUND_EXITED: 8,
}


def _report(number: int, payload: bytes) -> Report:
    if number == ReportType.ERROR:
        return ShimNote(payload.decode("utf-8", "replace").rstrip("\n"))
    try:
        kind = ReportType(number)
        words = struct.unpack(f"<{_WORDS[kind]}Q", payload)
        return _from_words(kind, words)
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"report type {number} with {len(payload)} bytes") from error


def _from_words(kind: ReportType, words: tuple[int, ...]) -> Report:
    if kind is ReportType.HELLO:
        return Hello(*words)
    if kind is ReportType.STARTED:
        return Started(*words)
    if kind is ReportType.NOEXEC:
        return NoExec(words[0], words[1], Stage(words[2]))
    step, status, leftovers, user, user_us, system, system_us, rss = words
    times = (user + user_us / 1e6, system + system_us / 1e6, rss * 1024)
    if kind is ReportType.EXITED:
        return Exited(step, status, leftovers, *times)
    return BackgroundExited(step, status, *times)
