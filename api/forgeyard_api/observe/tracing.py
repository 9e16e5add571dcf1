"""Spans of attempts (seed, section 261), sent once an attempt has ended.

    attempt                         from Prepare to the end
    ├── queue
    ├── sandbox.prepare             pull, plan, sandbox.network, sandbox.mount (root, bundle and control groups)
    ├── executor.spawn              the container up to the open gate
    ├── sandbox.services
    ├── executor.wait               a span for each step
    ├── executor.cancel             from the end of the last step, where somebody stopped it
    └── sandbox.cleanup

A result has how long each phase took, and in which order they began; so inside `sandbox.prepare` the phases are laid
end to end, but for the network's, which begins beside the plan. The parent is the request's label ``traceparent``
(W3C Trace Context), where it has a valid one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from forgeyard_api.observe.follow import Times
from forgeyard_api.serve.attempt_types import AttemptEvent, AttemptView, EventKind
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import ExecutionResult, StepResult

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

FLUSH_MILLISECONDS: Final = 5000
"""What the collector has, at the server's end, to take what was not sent yet."""
QUEUED_SPANS: Final = 8192
"""About 600 attempts; beyond that the SDK drops spans, and says so in the log."""
_BEFORE: Final = ("pull", "plan", "network", "setup")
_NAMES: Final = {"setup": "sandbox.mount", "network": "sandbox.network", "pull": "sandbox.pull", "plan": "sandbox.plan"}
_PARENT: Final = ("traceparent", "tracestate")

Values = dict[str, str | int | float | bool]


@contextmanager
def traced(endpoint: str, version: str, exporter: SpanExporter | None = None) -> Iterator[Tracing]:
    """Send spans to `endpoint`, an OTLP collector's http://HOST:PORT (gRPC), for the block.

    :param exporter: in the place of OTLP's.
    :raises ExecutorError: UNSUPPORTED, not_installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "not_installed",
            f"serve.tracing needs the package {error.name}",
            resolution='pip install "forgeyard-executor[tracing]", or leave serve.tracing out',
        ) from error
    resource = Resource.create({"service.name": "forgeyard", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    to = exporter or OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http:"))
    provider.add_span_processor(BatchSpanProcessor(to, max_queue_size=QUEUED_SPANS))
    try:
        yield Tracing(provider.get_tracer("forgeyard", version))
    finally:
        provider.force_flush(FLUSH_MILLISECONDS)
        provider.shutdown()


class Tracing:
    """Watches attempts, and makes spans of them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def saw(self, event: AttemptEvent, times: Times) -> None:
        """All spans of an attempt at its end."""
        if event.kind is EventKind.ENDED and event.view is not None:
            self._attempt(event.view, times, event.time)

    def _attempt(self, view: AttemptView, times: Times, now: datetime) -> None:
        root = self._span("attempt", view.created_at, _parent(view), _of_attempt(view))
        within = _inside(root)
        # Of an attempt that was adopted, what was before is not known: its spans are left out.
        if EventKind.QUEUED in times:
            self._spanned("queue", times[EventKind.QUEUED], times.get(EventKind.PREPARING, now), within)
        if EventKind.PREPARING in times:
            self._prepare(view.result, times[EventKind.PREPARING], times.get(EventKind.PREPARED, now), within)
        if view.result is not None:
            self._ran(view.result, within)
        if view.error is not None:
            self._failed(root, type(view.error).__name__, view.error.brief)
        elif view.result is not None and view.result.exit_code != 0:
            self._failed(root, view.result.outcome.value, view.result.message)
        root.end(_nanoseconds(max(now, view.created_at)))

    def _prepare(self, result: ExecutionResult | None, start: datetime, end: datetime, within: Context) -> None:
        span = self._span("sandbox.prepare", start, within)
        inside, at = _inside(span), start
        phases = {} if result is None else result.startup
        for name in _BEFORE:
            if name not in phases:
                continue
            begun = start + timedelta(seconds=phases.get("pull", 0.0)) if name == "network" else at
            ended = begun + timedelta(seconds=phases[name])
            self._spanned(_NAMES[name], begun, ended, inside)
            at = max(at, ended)
        span.end(_nanoseconds(max(end, at)))

    def _ran(self, result: ExecutionResult, within: Context) -> None:
        spawn = sum(result.startup.get(name, 0.0) for name in ("start", "gate"))
        if spawn:
            # The first step begins where the gate opens.
            opened = next((step.started_at for step in result.steps if step.started_at), None)
            begun = result.started_at if opened is None else opened - timedelta(seconds=spawn)
            self._spanned("executor.spawn", begun, begun + timedelta(seconds=spawn), within)
        if "services" in result.startup:
            ready = result.started_at + timedelta(seconds=result.startup["services"])
            self._spanned("sandbox.services", result.started_at, ready, within)
        ended = _last(result)
        waiting = self._span("executor.wait", result.started_at, within, {"exit_code": result.exit_code})
        for step in result.steps:
            self._step(step, _inside(waiting))
        waiting.end(_nanoseconds(max(ended, result.started_at)))
        if result.cancellation is not None:
            self._spanned("executor.cancel", ended, ended, within, {"reason": result.cancellation.value})
        self._spanned("sandbox.cleanup", ended, result.finished_at, within)

    def _step(self, step: StepResult, within: Context) -> None:
        if step.started_at is None:
            return
        values: Values = {"step": step.name}
        if step.exit is not None:
            values["exit"] = str(step.exit)
        span = self._span("executor.step", step.started_at, within, values)
        if step.failed:
            self._failed(span, "failed", step.error or str(step.exit))
        span.end(_nanoseconds(step.started_at + timedelta(seconds=step.duration or 0.0)))

    def _span(self, name: str, start: datetime, within: Context | None, values: Values | None = None) -> Span:
        return self._tracer.start_span(name, within, attributes=values, start_time=_nanoseconds(start))

    def _spanned(
        self, name: str, start: datetime, end: datetime, within: Context, values: Values | None = None
    ) -> None:
        self._span(name, start, within, values).end(_nanoseconds(max(start, end)))

    @staticmethod
    def _failed(span: Span, kind: str, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, message))


def _parent(view: AttemptView) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: view.labels[name] for name in _PARENT if name in view.labels}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _inside(span: Span) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, Context())


def _of_attempt(view: AttemptView) -> Values:
    values: Values = {
        "forgeyard.attempt_id": view.attempt_id,
        "forgeyard.sandbox_id": view.sandbox_id,
        "forgeyard.tenant": view.tenant,
        "forgeyard.job": view.name,
        "forgeyard.executor": view.runtime,
    }
    if view.result is not None:
        values["forgeyard.isolation"] = view.result.provenance.isolation.value
        values["forgeyard.outcome"] = view.result.outcome.value
    return values


def _last(result: ExecutionResult) -> datetime:
    """When the last step ended; never after the whole did."""
    ends = [step.started_at + timedelta(seconds=step.duration or 0.0) for step in result.steps if step.started_at]
    return min(max(ends, default=result.started_at), result.finished_at)


def _nanoseconds(time: datetime) -> int:
    return round(time.timestamp() * 1e9)
