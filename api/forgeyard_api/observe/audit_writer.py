"""Takes security events to their sink: in order, from a thread of its own, loud where it can't."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

from forgeyard_api.observe.audit import Event
from forgeyard_api.observe.audit import log as audit_log
from forgeyard_api.observe.audit_sinks import AuditLine, Sink, open_sink

log: Final = logging.getLogger("forgeyard.serve")

BACKLOG: Final = 10_000
"""Lines that a sink may be behind. Beyond that they are lost, and counted."""
BATCH: Final = 256
"""Lines that share one fsync."""
MAX_LINE: Final = 16 << 10
"""Characters. An event with more is cut to its plain facts."""
_MAX_FACT: Final = 256
RETRY_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 10.0


@contextmanager
def auditing(where: str, *, gate_only: bool = False) -> Iterator[AuditWriter | None]:
    """Record security events for the block; nothing where `where` is empty.

    :param where: a file's path, ``journald`` or ``syslog``.
    :param gate_only: what runtimes refuse and what the host loses, and no more: at a keeper, whose server records who
        asked for what.
    :raises ExecutorError: IO_FAILED, audit_sink.
    """
    if not where:
        yield None
        return
    writer = AuditWriter(open_sink(where), where)
    if gate_only:
        writer.addFilter(_is_of_the_host)
    before = audit_log.level
    audit_log.setLevel(logging.INFO)
    audit_log.addHandler(writer)
    try:
        yield writer
    finally:
        audit_log.removeHandler(writer)
        audit_log.setLevel(before)
        writer.close()


def _is_of_the_host(record: logging.LogRecord) -> bool:
    facts = getattr(record, "audit", None)
    return facts is None or facts["event"] in (Event.CAPABILITY_LOST, Event.CAPABILITY_BACK)


class AuditWriter(logging.Handler):
    """A handler of the audit's logger. Never holds up who records.

    :ivar lost: lines that came while the sink was too far behind.
    """

    def __init__(self, sink: Sink, where: str, *, backlog: int = BACKLOG) -> None:
        super().__init__()
        self.lost = 0
        self._sink = sink
        self._where = where
        self._lines: queue.Queue[AuditLine | None] = queue.Queue(backlog)
        self._closing = threading.Event()
        self._behind = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="forgeyard-audit", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue it."""
        line = line_of(record)
        with self._idle:
            try:
                self._lines.put_nowait(line)
                self._behind += 1
            except queue.Full:
                self.lost += 1

    def settled(self, timeout: float) -> bool:
        """Whether everything that was recorded is written within `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._behind, timeout)

    def close(self) -> None:
        """Write what is left, for a bounded time. Repeating it is no error."""
        if not self._closing.is_set():
            self._closing.set()
            try:
                self._lines.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                log.error("%s takes no security events: %d are lost", self._where, self._lines.qsize())  # noqa: TRY400  # all there is
            self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write_all(self) -> None:
        told = 0
        while batch := self._batch():
            lines = [line for line in batch if line is not None]
            if (lost := self.lost) > told:
                log.error("%d security events were lost: %s was too far behind", lost - told, self._where)
                lines.append(_lost(lost - told))
                told = lost
            written = self._written(lines)
            with self._idle:
                self._behind -= len(batch) - batch.count(None)
                self._idle.notify_all()
            if None in batch or not written:
                break
        self._sink.close()

    def _batch(self) -> list[AuditLine | None]:
        found = [self._lines.get()]
        while len(found) < BATCH and found[-1] is not None:
            try:
                found.append(self._lines.get_nowait())
            except queue.Empty:
                break
        return found

    def _written(self, lines: list[AuditLine]) -> bool:
        """Until it is; false when the server ends before. Loud, once for each time that it stops working."""
        failing = False
        while True:
            try:
                self._sink.write(lines)
            except OSError as error:
                if not failing:
                    log.error("security events can't be written to %s: %s", self._where, error)  # noqa: TRY400  # all there is
                failing = True
                if self._closing.wait(RETRY_SECONDS):
                    log.error("%d security events are lost: %s", len(lines), self._where)  # noqa: TRY400  # as above
                    return False
            else:
                if failing:
                    log.warning("security events are written to %s again", self._where)
                return True


def line_of(record: logging.LogRecord) -> AuditLine:
    """A record as a line. One that a runtime wrote says which container it did not let go."""
    facts: dict[str, Any] = dict(getattr(record, "audit", {"event": Event.GATE_REFUSED}))
    if hasattr(record, "container"):
        facts["container"] = record.container
    event = str(facts.pop("event"))
    warning = record.levelno >= logging.WARNING
    head = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
        "event": event,
        "severity": "warning" if warning else "info",
        "process": os.getpid(),
        "message": record.getMessage(),
    }
    text = json.dumps({**head, **facts})
    if len(text) > MAX_LINE:
        text = json.dumps({**_cut(head), **_cut(facts), "truncated": True})
    return AuditLine(text, event, warning)


def _cut(facts: dict[str, Any]) -> dict[str, Any]:
    """What is plain, and short."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, str):
            found[name] = value[:_MAX_FACT]
        elif isinstance(value, int | float):
            found[name] = value
    return found


def _lost(count: int) -> AuditLine:
    facts = {"event": Event.AUDIT_LOST, "count": count}
    record = logging.makeLogRecord({"msg": "security events were lost", "levelno": logging.WARNING, "audit": facts})
    return line_of(record)
