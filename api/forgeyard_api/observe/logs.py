"""The server's own log: lines for people on a terminal, lines of JSON for programs everywhere else."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "audit"}
"""What every record has; the rest is what its writer added to it: attempt_id, sandbox, step."""


class JsonLines(logging.Formatter):
    """An object a line: time, level, logger, message, and what the record was given beyond that."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end. JSON escapes whatever could begin another one."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **added(record),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


class PlainText(logging.Formatter):
    """For people: one line for each record but for an exception's."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name for it
        """Names that callers chose are in it: what they hold of control characters is shown, not sent."""
        shown = super().formatMessage(record) + "".join(f" {name}={value}" for name, value in added(record).items())
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


def added(record: logging.LogRecord) -> dict[str, Any]:
    """What a record was given as ``extra``, where it is plain."""
    return {
        name: value
        for name, value in record.__dict__.items()
        if name not in _STANDARD and isinstance(value, str | int | float)
    }


def set_up(stream: TextIO | None = None) -> None:
    """Log to `stream`, stderr: as JSON unless it is a terminal. What was set up before is replaced."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainText() if stream.isatty() else JsonLines())
    handler.addFilter(_not_audited)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _not_audited(record: logging.LogRecord) -> bool:
    """Security events have a log of their own; those that are warnings belong here too."""
    return not (record.name == "forgeyard.audit" and record.levelno < logging.WARNING)
