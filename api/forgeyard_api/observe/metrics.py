"""Counters and durations of attempts (seed, sections 258-260), and what the server is at when it is asked.

Grouped by executor (the runtime's name), isolation level and platform. No label holds what a caller chose: attempts,
sandboxes and tenants are for spans and logs. An attempt that came to no result has the isolation ``unknown``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from forgeyard_api.observe.follow import Times
from forgeyard_api.serve.admission import Capacity
from forgeyard_api.serve.attempt_types import AttemptEvent, EventKind
from forgeyard_model.errors import ExecutorError, FailureClass, ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.result import CLEANUP_NOTE, ExecutionOutcome, ExecutionResult

GROUPED: Final = ("executor", "isolation", "platform")
UNKNOWN: Final = "unknown"
PHASES: Final = ("pull", "plan", "network", "setup", "services", "start", "gate")
SHORT: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
"""Seconds: from a warm start to a large pull."""
LONG: Final = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)
"""Seconds: from a smoke test to a night's build."""
SIZES: Final = tuple(float(16 << 20 << power) for power in range(13))
"""Bytes: 16 MiB to 64 GiB."""


class Metrics:
    """Watches attempts. `registry` is its own: nothing else of the process shows up in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._platform = f"{os.uname().sysname}/{os.uname().machine}".lower()
        self._prepare = self._histogram("sandbox_prepare_duration_seconds", "From its slot until it can start.", SHORT)
        self._phases = self._histogram("sandbox_phase_duration_seconds", "Each phase of a start.", SHORT, "phase")
        self._spawn = self._histogram("executor_spawn_duration_seconds", "From start to the open gate.", SHORT)
        self._runtime = self._histogram("executor_runtime_duration_seconds", "From start to the end.", LONG)
        self._queued = self._histogram("executor_queue_duration_seconds", "From Prepare to its slot.", LONG)
        self._memory = self._histogram("resource_peak_memory_bytes", "The most that an attempt used.", SIZES)
        self._start_failures = self._counter("sandbox_start_failures", "Attempts that came to no result.", "kind")
        self._cleanup_failures = self._counter("sandbox_cleanup_failures", "What could not be undone at once.")
        self._violations = self._counter("sandbox_violations", "Attempts that tried what no job may.")
        self._cancellations = self._counter("executor_cancellations", "Attempts that were cancelled.", "reason")
        self._timeouts = self._counter("executor_timeouts", "Attempts whose time was over.")
        self._oom = self._counter("executor_oom", "Attempts that met their memory limit.")
        self._attempts = self._counter("executor_attempts", "Attempts that ended.", "outcome")

    def saw(self, event: AttemptEvent, times: Times) -> None:
        """Count what became of an attempt."""
        view = event.view
        if view is None or event.kind is not EventKind.ENDED:
            return
        isolation = UNKNOWN if view.result is None else view.result.provenance.isolation.value
        labels = (view.runtime or UNKNOWN, isolation, self._platform)
        _lasted(self._queued.labels(*labels), times, EventKind.QUEUED, EventKind.PREPARING)
        _lasted(self._prepare.labels(*labels), times, EventKind.PREPARING, EventKind.PREPARED)
        if view.result is not None:
            self._result(view.result, labels)
        elif view.error is not None:
            self._error(view.error, labels)

    def _result(self, result: ExecutionResult, labels: tuple[str, ...]) -> None:
        self._attempts.labels(*labels, result.outcome.value).inc()
        self._runtime.labels(*labels).observe(_seconds(result.finished_at - result.started_at))
        spawn = [result.startup[name] for name in ("start", "gate") if name in result.startup]
        if spawn:
            self._spawn.labels(*labels).observe(sum(spawn))
        for name, seconds in result.startup.items():
            self._phases.labels(*labels, name if name in PHASES else "other").observe(seconds)
        if result.usage.peak_memory is not None:
            self._memory.labels(*labels).observe(result.usage.peak_memory)
        failed = sum(note.startswith(CLEANUP_NOTE) for note in result.notes)
        self._cleanup_failures.labels(*labels).inc(failed)
        self._outcome(result, labels)

    def _outcome(self, result: ExecutionResult, labels: tuple[str, ...]) -> None:
        if result.outcome is ExecutionOutcome.SANDBOX_VIOLATION:
            self._violations.labels(*labels).inc()
        elif result.outcome is ExecutionOutcome.TIMED_OUT:
            self._timeouts.labels(*labels).inc()
        elif result.outcome is ExecutionOutcome.OUT_OF_MEMORY:
            self._oom.labels(*labels).inc()
        elif result.cancellation is not None:
            self._cancellations.labels(*labels, result.cancellation.value).inc()

    def _error(self, error: ForgeyardError, labels: tuple[str, ...]) -> None:
        sandbox = error.sandbox if isinstance(error, ExecutorError) else error
        kind = sandbox.kind if isinstance(sandbox, SandboxError) else None
        if error.failure_class is FailureClass.CANCELLED:
            self._cancellations.labels(*labels, "before_start").inc()
            return
        if kind is SandboxErrorKind.SECURITY_VIOLATION:
            self._violations.labels(*labels).inc()
        if kind is SandboxErrorKind.CLEANUP_FAILED:
            self._cleanup_failures.labels(*labels).inc()
        named = kind or getattr(error, "kind", None)
        self._start_failures.labels(*labels, "invalid_request" if named is None else named.value).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *more: str) -> Histogram:
        return Histogram(f"forgeyard_{name}", text, (*GROUPED, *more), registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"forgeyard_{name}", text, (*GROUPED, *more), registry=self.registry)


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server is at.

    :param keepers: by runtime, how many processes keep its containers (``keepers``), and how their networks that were
        made ahead of time do (``size``, ``ready``, ``hits``, ``misses``, ``refused``). audit_lost: security events.
    """

    running: int
    queued: int
    draining: bool
    used: ResourceReservation
    capacity: Capacity
    keepers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    audit_lost: int = 0


class StateMetrics(Collector):
    """Asks when it is asked itself."""

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        """Nothing to look for at registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Gauges of this moment."""
        state = self._state()
        yield GaugeMetricFamily("forgeyard_queue_length", "Attempts that wait.", state.queued)
        yield GaugeMetricFamily("forgeyard_queue_limit", "Attempts that may wait.", state.capacity.queue)
        yield GaugeMetricFamily("forgeyard_draining", "1: no more attempts are taken in.", int(state.draining))
        promised = GaugeMetricFamily("forgeyard_admission_used", "What is promised to attempts.", labels=["resource"])
        bounds = GaugeMetricFamily("forgeyard_admission_limit", "What may be promised.", labels=["resource"])
        for name, used, limit in _admitted(state):
            promised.add_metric([name], used)
            if limit is not None:
                bounds.add_metric([name], limit)
        yield promised
        yield bounds
        keepers = GaugeMetricFamily("forgeyard_keepers", "Processes that keep containers.", labels=["executor"])
        for runtime, counts in state.keepers.items():
            keepers.add_metric([runtime], counts.get("keepers", 0))
        yield keepers
        yield from _pools(state.keepers)
        yield CounterMetricFamily("forgeyard_audit_lost", "Security events that were not recorded.", state.audit_lost)


def _pools(keepers: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
    """Of hits and misses a hit rate is made where it is looked at."""
    pooled = {runtime: counts for runtime, counts in keepers.items() if counts.get("size")}
    size = GaugeMetricFamily("forgeyard_network_pool_size", "Networks kept ready at the most.", labels=["executor"])
    ready = GaugeMetricFamily("forgeyard_network_pool_ready", "Networks that are ready.", labels=["executor"])
    takes = CounterMetricFamily(
        "forgeyard_network_pool_takes",
        "Networks given to attempts: ready ones (hit), or made then (miss); refused: ready, but changed.",
        labels=["executor", "kind"],
    )
    for runtime, counts in pooled.items():
        size.add_metric([runtime], counts["size"])
        ready.add_metric([runtime], counts.get("ready", 0))
        for kind, name in (("hit", "hits"), ("miss", "misses"), ("refused", "refused")):
            takes.add_metric([runtime, kind], counts.get(name, 0))
    return size, ready, takes


def _admitted(state: ServerState) -> tuple[tuple[str, float, float | None], ...]:
    used, capacity = state.used, state.capacity
    return (
        ("slots", state.running, capacity.slots),
        ("cpus", used.cpus, capacity.cpus),
        ("memory_bytes", used.memory, capacity.memory),
        ("disk_bytes", used.disk or 0, capacity.disk),
        ("pids", used.pids or 0, capacity.pids),
    )


def _lasted(histogram: Histogram, times: Times, first: EventKind, last: EventKind) -> None:
    if first in times and last in times:
        histogram.observe(_seconds(times[last] - times[first]))


def _seconds(time: timedelta) -> float:
    return max(0.0, time.total_seconds())
