"""Where security events go: a file that only grows, the journal, or syslog."""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Any, Final, Protocol

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

JOURNALD: Final = "journald"
SYSLOG: Final = "syslog"
JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"
SYSLOG_SOCKET: Final = "/dev/log"
_WARNING, _NOTICE = 4, 5
"""Priorities of syslog(3)."""


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One event: `text` is a line of JSON without its end."""

    text: str
    event: str
    warning: bool


class Sink(Protocol):
    """Takes lines for good."""

    def write(self, lines: Sequence[AuditLine]) -> None:
        """All of them, in order. Blocking.

        :raises OSError: they may be there in part.
        """

    def close(self) -> None:
        """Repeating it is no error."""


def open_sink(where: str) -> Sink:
    """A file's path, ``journald`` or ``syslog``.

    :raises ExecutorError: IO_FAILED, audit_sink: a server that can't record what it must does not start.
    """
    try:
        if where == JOURNALD:
            return JournalSink(JOURNAL_SOCKET)
        if where == SYSLOG:
            return SyslogSink(SYSLOG_SOCKET)
        return FileSink(Path(where))
    except OSError as error:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "audit_sink",
            f"security events can't be written to {where}",
            details=error.strerror or str(error),
            resolution="name a file in a directory that exists, journald or syslog with serve.audit",
        ) from error


class FileSink:
    """Lines at the end of a file of mode 0600. One that was moved away, by logrotate say, is begun anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()

    def write(self, lines: Sequence[AuditLine]) -> None:
        """One write, so that another process's lines never stand in the midst of ours; on disk when this returns."""
        if self._moved():
            os.close(self._fd)
            self._fd = self._open()
        data = "".join(f"{line.text}\n" for line in lines).encode()
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            _check_regular(fd)
            os.fchmod(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _moved(self) -> bool:
        try:
            found, ours = self._path.stat(follow_symlinks=False), os.fstat(self._fd)
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino)


def _check_regular(fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError("it is no regular file")


class JournalSink:
    """The journal's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): a datagram of fields for each event."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise

    def write(self, lines: Sequence[AuditLine]) -> None:
        """A datagram each. A journal that was restarted has another socket at the same place."""
        for line in lines:
            try:
                self._socket.send(_entry(line))
            except ConnectionError:
                self._socket.connect(self._address)
                self._socket.send(_entry(line))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _entry(line: AuditLine) -> bytes:
    fields = {
        "MESSAGE": line.text,
        "PRIORITY": str(_WARNING if line.warning else _NOTICE),
        "SYSLOG_IDENTIFIER": "forgeyard-audit",
        "FORGEYARD_EVENT": line.event,
    }
    return b"".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: str) -> bytes:
    """With its length: then nothing in a value can pass for another field."""
    data = value.encode()
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


class SyslogSink:
    """The authentication messages of syslog."""

    def __init__(self, address: str) -> None:
        self._handler = _Strict(address, facility=SysLogHandler.LOG_AUTHPRIV)
        self._handler.socket.getpeername()  # the handler itself would say nothing before the first message
        self._handler.ident = "forgeyard-audit: "

    def write(self, lines: Sequence[AuditLine]) -> None:
        """A message each."""
        for line in lines:
            level = logging.WARNING if line.warning else logging.INFO
            self._handler.emit(logging.LogRecord("forgeyard.audit", level, "", 0, line.text, None, None))

    def close(self) -> None:
        """Hang up."""
        self._handler.close()


class _Strict(SysLogHandler):
    """One that tells when it can't."""

    socket: Any  # typeshed leaves it out

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name for it
        """Called while the error is handled.

        :raises OSError: that error.
        """
        raise  # noqa: PLE0704  # as said
