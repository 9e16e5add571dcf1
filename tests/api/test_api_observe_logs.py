"""The server's log: JSON for programs, lines for people, and nobody's name can begin a line."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from ended_attempts import TIMES, ended, result
from served import ALICE, JOB, prepare, table_over, within

from forgeyard_api.observe import audit, logs
from forgeyard_api.observe.follow import EventLog, Times, followed
from forgeyard_api.serve import events as events_module
from forgeyard_api.serve.attempt_types import AttemptEvent, EventKind, Wanted
from forgeyard_api.serve.events import EventHub
from forgeyard_executor.testing import FakeExecutor

log = logging.getLogger("forgeyard.serve")


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines() -> None:
    """An object each, with what the record was given: attempt, sandbox, step."""
    stream = io.StringIO()
    logs.set_up(stream)
    log.info(
        "step %s ends", "one\ntwo", extra={"attempt_id": "a\u2028b", "sandbox": "01X", "seconds": 1.5, "odd": object()}
    )
    (text,) = stream.getvalue().splitlines()
    line = json.loads(text)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "forgeyard.serve",
        "message": "step one\ntwo ends",
        "attempt_id": "a\u2028b",
        "sandbox": "01X",
        "seconds": 1.5,
    }


def test_an_exception_stays_in_its_line() -> None:
    """For programs, with its traceback."""
    stream = io.StringIO()
    logs.set_up(stream)
    try:
        int("x")
    except ValueError:
        log.exception("it failed")
    (text,) = stream.getvalue().splitlines()
    assert "ValueError: invalid" in json.loads(text)["exception"]


def test_people_get_text() -> None:
    """On a terminal: one line each, in which control characters are shown and not sent."""
    stream = Terminal()
    logs.set_up(stream)
    log.warning("attempt %s", "x\n2026-01-01 INFO all is well\x1b[2J", extra={"attempt_id": "a\rb"})
    (text,) = stream.getvalue().splitlines()
    assert "WARNING forgeyard.serve: attempt x\\n2026-01-01 INFO all is well\\x1b[2J attempt_id=a\\rb" in text


def test_security_events_have_a_log_of_their_own() -> None:
    """Only those that are warnings are here too."""
    stream = io.StringIO()
    logs.set_up(stream)
    audit.record(audit.Event.CONNECTED, "quiet")
    audit.record(audit.Event.VIOLATION, "loud", warning=True)
    assert [json.loads(text)["message"] for text in stream.getvalue().splitlines()] == ["loud"]


def test_attempts_are_logged_by_their_names() -> None:
    """A line for what became of each, found by attempt and sandbox."""
    stream = io.StringIO()
    logs.set_up(stream)
    EventLog().saw(ended(result()), TIMES)
    EventLog().saw(AttemptEvent(TIMES[EventKind.ENDED], EventKind.DRAIN), {})
    first, second = (json.loads(text) for text in stream.getvalue().splitlines())
    assert (first["message"], first["attempt_id"], first["sandbox"]) == (
        "attempt ended: succeeded",
        "attempt-1",
        "01SANDBOX",
    )
    assert second["message"] == "drain"


class Watching:
    """Remembers what it saw, and fails when it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen: list[tuple[EventKind, set[EventKind]]] = []
        self._fails = fails

    def saw(self, event: AttemptEvent, times: Times) -> None:
        if self._fails:
            raise RuntimeError("of its own making")
        self.seen.append((event.kind, set(times)))


def test_watchers_see_everything_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the times up to then; one that fails is logged and blinds no other; the last event is seen too."""
    broken, watching = Watching(fails=True), Watching()

    async def body() -> None:
        async with table_over(tmp_path, FakeExecutor()) as table, followed(table.events_hub, [broken, watching]):
            await prepare(table, ALICE, Wanted("a", JOB, start=True))
            await table.wait(ALICE, "a")
            table.drain()

    with caplog.at_level(logging.ERROR, "forgeyard.serve"):
        within(body())
    kinds = [kind for kind, _ in watching.seen]
    own = [EventKind.QUEUED, EventKind.PREPARING, EventKind.PREPARED, EventKind.RUNNING, EventKind.ENDED]
    assert [kind for kind in kinds if kind is not EventKind.DRAIN] == own
    assert kinds[-1] is EventKind.DRAIN
    assert dict(watching.seen)[EventKind.ENDED] == set(own)
    assert "Watching failed at queued" in caplog.text


def test_a_follower_that_fell_behind_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It says that it missed events, and sees those that come after."""
    monkeypatch.setattr(events_module, "BACKLOG", 2)
    hub, watching = EventHub(), Watching()
    event = AttemptEvent(TIMES[EventKind.ENDED], EventKind.DRAIN)

    async def body() -> None:
        async with followed(hub, [watching]):
            for _ in range(4):
                hub.publish(event)
            while "miss events" not in caplog.text or not hub.listened:
                await asyncio.sleep(0)
            hub.publish(AttemptEvent(event.time, EventKind.UNDRAIN))

    with caplog.at_level(logging.ERROR, "forgeyard.serve"):
        within(body())
    assert [kind for kind, _ in watching.seen] == [EventKind.DRAIN, EventKind.DRAIN, EventKind.UNDRAIN]
