"""/metrics: what is counted, by which few labels, and who may ask for it."""

from __future__ import annotations

import asyncio
import socket
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from ended_attempts import TIMES, ended, result
from prometheus_client.parser import text_string_to_metric_families
from served import ALICE, JOB, capacity, prepare, table_over, within

from forgeyard_api.observe.metrics import Metrics, ServerState, StateMetrics
from forgeyard_api.observe.metrics_socket import MAX_CONNECTIONS, metrics_served
from forgeyard_api.observe.observed import observed
from forgeyard_api.serve.attempt_types import EventKind, Wanted
from forgeyard_executor import Outcome
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.config_serve import ServeConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.result import CancellationReason

SEED = (
    "sandbox_prepare_duration_seconds",
    "sandbox_start_failures_total",
    "sandbox_cleanup_failures_total",
    "sandbox_violations_total",
    "executor_spawn_duration_seconds",
    "executor_runtime_duration_seconds",
    "executor_cancellations_total",
    "executor_timeouts_total",
    "executor_oom_total",
    "resource_peak_memory_bytes",
)
ALLOWED = {"executor", "isolation", "platform", "phase", "kind", "reason", "outcome", "resource", "le"}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"forgeyard_{name}" and labels.items() <= sample.labels.items()
    )


def told(*events: object) -> Metrics:
    """Metrics after `events`."""
    metrics = Metrics()
    for event in events:
        metrics.saw(event, TIMES)  # type: ignore[arg-type]  # events
    return metrics


def test_every_metric_of_the_architecture_is_there() -> None:
    """All ten of section 258, grouped as section 259 has it, from one job's end."""
    metrics = told(ended(result()))
    types = {family.name: family.type for family in metrics.registry.collect()}
    for name in SEED:
        assert f"forgeyard_{name.removesuffix('_total')}" in types
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert samples
    for sample in samples:
        assert {"executor", "isolation", "platform"} <= sample.labels.keys()
        assert (sample.labels["executor"], sample.labels["isolation"]) == ("runc", "container")
        assert sample.labels["platform"].startswith("linux/")


def test_durations_are_those_of_the_attempt() -> None:
    """Queue, preparation and run from when it became what; the spawn from the phases; memory as measured."""
    metrics = told(ended(result()))
    assert value(metrics, "executor_queue_duration_seconds_sum") == 2.0
    assert value(metrics, "sandbox_prepare_duration_seconds_sum") == 2.0
    assert value(metrics, "executor_spawn_duration_seconds_sum") == 0.25
    assert value(metrics, "executor_runtime_duration_seconds_sum") == 12.0
    assert value(metrics, "resource_peak_memory_bytes_sum") == 100 << 20
    assert value(metrics, "sandbox_phase_duration_seconds_sum", phase="pull") == 1.0


def test_an_adopted_attempt_has_no_durations_of_before() -> None:
    """What was before the server was started is not made up."""
    metrics = Metrics()
    metrics.saw(ended(result()), {EventKind.ENDED: TIMES[EventKind.ENDED]})
    assert value(metrics, "sandbox_prepare_duration_seconds_count") == 0
    assert value(metrics, "executor_runtime_duration_seconds_count") == 1


@pytest.mark.parametrize(
    ("changes", "name", "labels"),
    [
        ({"outcome": Outcome.TIMED_OUT}, "executor_timeouts_total", {}),
        ({"outcome": Outcome.OUT_OF_MEMORY}, "executor_oom_total", {}),
        ({"outcome": Outcome.SANDBOX_VIOLATION}, "sandbox_violations_total", {}),
        (
            {"outcome": Outcome.CANCELLED, "cancellation": CancellationReason.LEASE_EXPIRED},
            "executor_cancellations_total",
            {"reason": "lease_expired"},
        ),
        ({"notes": ("cleanup: a", "a note", "cleanup: b")}, "sandbox_cleanup_failures_total", {}),
        ({}, "executor_attempts_total", {"outcome": "succeeded"}),
    ],
)
def test_outcomes_are_counted(changes: dict[str, object], name: str, labels: dict[str, str]) -> None:
    """Each in its own metric, and a plain success in none of those."""
    expected = 2 if "notes" in changes else 1
    assert value(told(ended(result(**changes))), name, **labels) == expected
    if name != "executor_attempts_total":
        assert value(told(ended(result())), name) == 0


@pytest.mark.parametrize(
    ("error", "name", "labels"),
    [
        (
            SandboxError(SandboxErrorKind.MOUNT_FAILED, "mount", "no"),
            "sandbox_start_failures_total",
            {"kind": "mount_failed"},
        ),
        (
            ExecutorError.prepare(SandboxError(SandboxErrorKind.SECURITY_VIOLATION, "gate", "no")),
            "sandbox_violations_total",
            {},
        ),
        (ExecutorError(ExecutorErrorKind.LOST, "lost", "no"), "sandbox_start_failures_total", {"kind": "lost"}),
        (InvalidRequest("image", "x", "no"), "sandbox_start_failures_total", {"kind": "invalid_request"}),
        (ExecutorError(ExecutorErrorKind.CANCELLED, "cancelled", "no"), "executor_cancellations_total", {}),
    ],
)
def test_errors_are_counted_by_kind(error: Exception, name: str, labels: dict[str, str]) -> None:
    """With the isolation unknown: nothing ran behind any."""
    metrics = told(ended(None, error))  # type: ignore[arg-type]  # one of ours
    assert value(metrics, name, isolation="unknown", executor="runc", **labels) == 1


def test_no_label_has_a_value_of_the_callers() -> None:
    """Neither attempts nor sandboxes nor tenants nor jobs; phases that nobody knows are one."""
    metrics = told(ended(result(startup={"evil-1": 1.0, "evil-2": 1.0})), ended(None, InvalidRequest("a", "b", "c")))
    metrics.registry.register(StateMetrics(lambda: state()))
    for family in metrics.registry.collect():
        for sample in family.samples:
            assert sample.labels.keys() <= ALLOWED
            assert not {"attempt-1", "01SANDBOX", "tenant-x", "build", "evil-1"} & set(sample.labels.values())
    assert value(metrics, "sandbox_phase_duration_seconds_count", phase="other") == 2


def state() -> ServerState:
    """A server that is at something."""
    pool = {"keepers": 1, "size": 4, "ready": 2, "hits": 9, "misses": 1, "refused": 0}
    used, room = ResourceReservation(1.5, 7, None, 9), capacity(slots=4, cpus=2.0, memory=100)
    return ServerState(3, 2, True, used, room, {"runc": pool, "crun": {"keepers": 2}}, 5)


def test_the_server_itself() -> None:
    """Queue, what is promised of what there is, keepers, drain and lost audit lines, as they are when one asks."""
    metrics = Metrics()
    metrics.registry.register(StateMetrics(state))
    assert value(metrics, "queue_length") == 2
    assert value(metrics, "admission_used", resource="slots") == 3
    assert value(metrics, "admission_limit", resource="cpus") == 2.0
    assert value(metrics, "admission_used", resource="memory_bytes") == 7
    assert value(metrics, "admission_limit", resource="disk_bytes") == 0  # none: it has no bound
    assert value(metrics, "keepers", executor="runc") == 1
    assert value(metrics, "keepers", executor="crun") == 2
    assert value(metrics, "network_pool_takes_total", executor="runc", kind="hit") == 9
    assert value(metrics, "network_pool_takes_total", executor="runc", kind="miss") == 1
    assert (value(metrics, "network_pool_size"), value(metrics, "network_pool_ready")) == (4, 2)
    assert value(metrics, "draining") == 1
    assert value(metrics, "audit_lost_total") == 5


async def asked(where: str, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[int, str, bytes]:
    """Status, head and body of an answer."""
    if where.startswith("/"):
        reader, writer = await asyncio.open_unix_connection(where)
    else:
        host, _, port = where.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        answer = await reader.read()
    except ConnectionError:  # hung up on before it was read
        answer = b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head.decode(), body


@pytest.mark.parametrize("where", ["unix", "127.0.0.1:0", "[::1]:0"])
def test_metrics_are_served(where: str, tmp_path: Path) -> None:
    """As Prometheus' text, at a socket for its owner alone or at the loopback; nothing else is there."""

    async def body() -> None:
        path = str(tmp_path / "m" / "metrics.sock") if where == "unix" else where
        metrics = told(ended(result()))
        async with metrics_served(path, metrics.registry) as address:
            if where == "unix":
                assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
            status, head, text = await asked(address)
            assert (status, "text/plain; version=" in head) == (200, True)
            names = {family.name for family in text_string_to_metric_families(text.decode())}
            assert "forgeyard_executor_runtime_duration_seconds" in names
            assert (await asked(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 404
            assert (await asked(address, b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"))[0] == 405
            assert (await asked(address, b"nonsense\r\n\r\n"))[0] == 400
            assert (await asked(address, b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n"))[0] in (
                400,
                431,
            )
        assert where != "unix" or not Path(path).exists()

    within(body())


def test_who_does_not_ask_holds_up_nobody(tmp_path: Path) -> None:
    """Idle connections have a bound, beyond which one is closed at once; their end lets others in."""

    async def body() -> None:
        path = str(tmp_path / "metrics.sock")
        async with metrics_served(path, Metrics().registry):
            idle = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS)]
            assert await asked(path) == (0, "", b"")
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            while (await asked(path))[0] != 200:
                await asyncio.sleep(0.01)

    within(body())


def test_a_socket_that_is_served_is_not_taken(tmp_path: Path) -> None:
    """A second server is refused with a cure; what a dead one left is replaced."""

    async def body() -> None:
        path = tmp_path / "metrics.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with metrics_served(str(path), Metrics().registry):
            with pytest.raises(ExecutorError) as caught:
                async with metrics_served(str(path), Metrics().registry):
                    pass
            assert caught.value.reason == "metrics_socket"
            assert "serve.metrics" in str(caught.value)
            assert (await asked(str(path)))[0] == 200

    within(body())


def test_a_port_that_is_taken_is_refused() -> None:
    """In one line, with the cure."""

    async def body() -> None:
        async with metrics_served("127.0.0.1:0", Metrics().registry) as address:
            with pytest.raises(ExecutorError) as caught:
                async with metrics_served(address, Metrics().registry):
                    pass
            assert caught.value.reason == "metrics_socket"

    within(body())


def test_a_server_counts_what_it_runs(tmp_path: Path) -> None:
    """From the table's own events: a job that succeeds, one that fails, one that waits."""

    async def body() -> None:
        executor = FakeExecutor(
            lambda job: FakeRun(holds=job.name == "holds", exit_code=3 if job.name == "fails" else 0)
        )
        path = str(tmp_path / "metrics.sock")
        async with table_over(tmp_path, executor) as table:
            admission = table._admission  # the server has it at hand, a test of a table alone has not
            async with observed(ServeConfig(metrics=path), table, admission, None):
                for name in ("works", "fails"):
                    await prepare(table, ALICE, Wanted(name, replace(JOB, name=name), start=True))
                    await table.wait(ALICE, name)
                text = ""
                while 'forgeyard_executor_attempts_total{executor="fake",isolation="none",outcome="failed"' not in text:
                    text = (await asked(path))[2].decode()
                assert 'outcome="succeeded",platform="linux' in text
                assert "forgeyard_queue_length 0.0" in text
                assert 'forgeyard_admission_limit{resource="slots"} 100.0' in text

    within(body())
