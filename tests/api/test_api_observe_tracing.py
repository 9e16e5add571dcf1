"""Spans: which there are, when they were, whose child the first is, and what happens without the library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import pytest
from ended_attempts import BEGIN, TIMES, at, ended, result
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from forgeyard_api.observe.tracing import traced
from forgeyard_api.serve.attempt_types import AttemptEvent, EventKind
from forgeyard_executor import Outcome
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import CancellationReason, ProcessExit, StepResult

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans_of(event: AttemptEvent, times: object = TIMES) -> dict[str, ReadableSpan]:
    """What an attempt's end sends, by name; steps by their own."""
    exporter = InMemorySpanExporter()
    with traced("http://127.0.0.1:1", "1.2.3", exporter) as tracing:
        tracing.saw(event, times)  # type: ignore[arg-type]  # times by kind
    spans: Sequence[ReadableSpan] = exporter.get_finished_spans()
    return {str((span.attributes or {}).get("step", span.name)): span for span in spans}


def when(span: ReadableSpan) -> tuple[float, float]:
    """Its begin and end, in seconds after the attempt was taken in."""
    begin = BEGIN.timestamp()
    return round((span.start_time or 0) / 1e9 - begin, 3), round((span.end_time or 0) / 1e9 - begin, 3)


def parent(spans: dict[str, ReadableSpan], name: str) -> str:
    """The name of a span's parent; empty where that is not of this process."""
    above = spans[name].parent
    return next((key for key, span in spans.items() if above and span.context.span_id == above.span_id), "")


def test_every_span_of_the_architecture() -> None:
    """Those of section 261, each where it belongs and when it was."""
    spans = spans_of(ended(result()))
    assert {name: (parent(spans, name), when(span)) for name, span in spans.items()} == {
        "attempt": ("", (0.0, 20.0)),
        "queue": ("attempt", (0.0, 2.0)),
        "sandbox.prepare": ("attempt", (2.0, 4.0)),
        "sandbox.pull": ("sandbox.prepare", (2.0, 3.0)),
        "sandbox.plan": ("sandbox.prepare", (3.0, 3.25)),
        "sandbox.network": ("sandbox.prepare", (3.0, 3.5)),
        "sandbox.mount": ("sandbox.prepare", (3.5, 4.0)),
        "executor.spawn": ("attempt", (4.75, 5.0)),
        "executor.wait": ("attempt", (4.0, 15.0)),
        "one": ("executor.wait", (5.0, 10.0)),
        "two": ("executor.wait", (10.0, 15.0)),
        "sandbox.cleanup": ("attempt", (15.0, 16.0)),
    }


def test_names_are_attributes() -> None:
    """What /metrics may not say is here: attempt, sandbox, tenant, outcome."""
    root = spans_of(ended(result()))["attempt"]
    attributes = dict(root.attributes or {})
    assert attributes["forgeyard.attempt_id"] == "attempt-1"
    assert attributes["forgeyard.sandbox_id"] == "01SANDBOX"
    assert attributes["forgeyard.tenant"] == "tenant-x"
    assert (attributes["forgeyard.isolation"], attributes["forgeyard.outcome"]) == ("container", "succeeded")
    assert root.resource.attributes["service.name"] == "forgeyard"
    assert root.status.status_code is StatusCode.UNSET


def test_the_parent_is_the_requests() -> None:
    """A label traceparent continues the caller's trace."""
    labels = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"}
    spans = spans_of(ended(result(), labels=labels))
    root = spans["attempt"]
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}


@pytest.mark.parametrize(
    "label", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{SPAN}", "00-" + "x" * 10_000]
)
def test_a_parent_that_is_none(label: str) -> None:
    """A label that is not of the format begins a trace of its own, and fails nothing."""
    assert spans_of(ended(result(), labels={"traceparent": label}))["attempt"].parent is None


def test_a_caller_that_samples_nothing() -> None:
    """Its decision is kept: no span is sent."""
    assert not spans_of(ended(result(), labels={"traceparent": f"00-{TRACE}-{SPAN}-00"}))


def test_a_failed_step_and_a_cancel() -> None:
    """The step's span says so, the cancel is one of its own, and the attempt has failed."""
    steps = (StepResult("bad", ProcessExit(256, code=1), at(5), 1.0), StepResult("never", None, skipped=True))
    ran = result(
        steps=steps, outcome=Outcome.CANCELLED, exit_code=130, message="by hand", cancellation=CancellationReason.USER
    )
    spans = spans_of(ended(ran))
    assert "never" not in spans
    assert spans["bad"].status.status_code is StatusCode.ERROR
    assert dict(spans["executor.cancel"].attributes or {}) == {"reason": "user"}
    root = spans["attempt"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "by hand")


def test_an_attempt_without_a_result() -> None:
    """It has the spans of what was tried, and the error's first line alone: details may hold paths."""
    error = ExecutorError(ExecutorErrorKind.SPAWN_FAILED, "spawn", "it did not start", details="/secret/place")
    spans = spans_of(ended(None, error), {EventKind.QUEUED: at(0), EventKind.PREPARING: at(2)})
    assert spans.keys() == {"attempt", "queue", "sandbox.prepare"}
    assert when(spans["sandbox.prepare"]) == (2.0, 20.0)
    assert spans["attempt"].status.description == "it did not start"


def test_an_adopted_attempt() -> None:
    """What was before the restart is not made up."""
    spans = spans_of(ended(result()), {EventKind.ENDED: at(20)})
    assert "queue" not in spans
    assert "sandbox.prepare" not in spans
    assert when(spans["attempt"]) == (0.0, 20.0)


def test_spans_never_end_before_they_begin() -> None:
    """Whatever clocks did: a result whose end is before its steps' is cut, not turned round."""
    spans = spans_of(ended(result(finished_at=BEGIN + timedelta(seconds=3))))
    assert all(begin <= end for begin, end in map(when, spans.values()))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error, before anything is served, that says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ExecutorError) as caught, traced("http://127.0.0.1:1", "1"):
        pass
    assert (caught.value.reason, "forgeyard-executor[tracing]" in str(caught.value)) == ("not_installed", True)
