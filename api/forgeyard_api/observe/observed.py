"""Everything that looks at a server, put together as the configuration has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from forgeyard_api.observe.audit_writer import AuditWriter
from forgeyard_api.observe.follow import Auditor, EventLog, Watcher, followed
from forgeyard_api.serve.admission import Admission
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.config_serve import ServeConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

if TYPE_CHECKING:
    from forgeyard_api.observe.metrics import ServerState

KeepersOf = Callable[[], Mapping[str, Mapping[str, int]]]
"""What keepers count, by runtime; see `ServerState`."""


@asynccontextmanager
async def observed(
    settings: ServeConfig,
    table: AttemptTable,
    admission: Admission,
    writer: AuditWriter | None,
    keepers: KeepersOf = dict,
) -> AsyncIterator[None]:
    """Count, trace and record what becomes of the attempts of `table`. Enter it before the table is opened.

    :raises ExecutorError: a package that the configuration needs is missing; /metrics can't be served.
    """
    watchers: list[Watcher] = [EventLog(), Auditor()]

    def state() -> ServerState:
        from forgeyard_api.observe.metrics import ServerState

        running, queued = table.counts
        lost = 0 if writer is None else writer.lost
        return ServerState(running, queued, table.draining, admission.used(), admission.capacity, keepers(), lost)

    async with AsyncExitStack() as stack:
        if settings.tracing:
            from forgeyard_api.observe.tracing import traced

            watchers.append(stack.enter_context(traced(settings.tracing, version("forgeyard-executor"))))
        if settings.metrics:
            watchers.append(await _metrics(stack, settings.metrics, state))
        await stack.enter_async_context(followed(table.events_hub, watchers))
        yield


async def _metrics(stack: AsyncExitStack, where: str, state: Callable[[], ServerState]) -> Watcher:
    try:
        from forgeyard_api.observe.metrics import Metrics, StateMetrics
        from forgeyard_api.observe.metrics_socket import metrics_served
    except ModuleNotFoundError as error:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "not_installed",
            f"serve.metrics needs the package {error.name}",
            resolution='pip install "forgeyard-executor[serve]", or leave serve.metrics out',
        ) from error
    metrics = Metrics()
    metrics.registry.register(StateMetrics(state))
    await stack.enter_async_context(metrics_served(where, metrics.registry))
    return metrics
