"""A server put together: executors or keepers, the table of attempts, and the sockets in front of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc

from forgeyard_api.client.calls import OPTIONS
from forgeyard_api.keeper.pool import Keepers
from forgeyard_api.keeper.process import Wish, end_all, living
from forgeyard_api.observe import audit, logs
from forgeyard_api.observe.audit_writer import AuditWriter, auditing
from forgeyard_api.observe.observed import observed
from forgeyard_api.serve.admission import Admission
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.capability_news import tell_of_changes
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.images_service import ImagesService
from forgeyard_api.serve.lifecycle import Lifecycle
from forgeyard_api.serve.peers import Allowed, Peers
from forgeyard_api.serve.rows import Rows
from forgeyard_api.serve.service import CallerOf, ExecutorService, handlers
from forgeyard_api.serve.service_manager import ServiceManager
from forgeyard_api.serve.settings import capacity_of
from forgeyard_api.serve.store import AttemptStore
from forgeyard_executor import Executor
from forgeyard_executor.config_apply import configured_job
from forgeyard_executor.images import Images
from forgeyard_executor.interface import JobExecutor
from forgeyard_executor.state import StatePaths
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.config_serve import ADOPT, ServeConfig, TlsConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.request import PreparedWorkspace, request_from_job

log: Final = logging.getLogger("forgeyard.serve")

STORE: Final = "attempts.db"


@dataclass(frozen=True, slots=True)
class Server:
    """What serves, and what of it a new configuration changes."""

    table: AttemptTable
    admission: Admission
    checks: Checks
    peers: Peers
    images: Images
    cri_peers: Peers | None = None

    def reconfigure(self, config: ServeConfig) -> None:
        """Who may connect, what there is, and whose paths are whose. Connections and attempts stay."""
        self.peers.allowed = _allowed(config)
        if self.cri_peers is not None:
            operators = frozenset(config.operators)
            self.cri_peers.allowed = Allowed(operators, operators)
        self.admission.resize(capacity_of(config))
        self.checks.become(config)


def serve_until_told(
    config: ExecutorConfig, load: Callable[[], ExecutorConfig], config_file: Path | None = None
) -> None:
    """Serve until a signal says otherwise; see `Lifecycle`.

    :param load: reads the configuration again.
    :param config_file: where keepers read the system's, when that is not the usual place.
    :raises ForgeyardError: what this host lacks, with the cure.
    """
    logs.set_up()
    manager = ServiceManager.taken(os.environ)

    async def main() -> None:
        async with serving(config, config_file) as server:

            def reload() -> None:
                server.reconfigure(load().serve)
                audit.record(audit.Event.RELOADED, "the configuration was read again")

            await Lifecycle(server.table, reload, config.serve.drain, manager).run()

    asyncio.run(main())


@asynccontextmanager
async def serving(config: ExecutorConfig, config_file: Path | None = None) -> AsyncIterator[Server]:
    """Serve for the block. At its end nothing listens any more; what keepers run goes on.

    :param config_file: where keepers read the system's configuration, when that is not the usual place.
    :raises ForgeyardError: what this host lacks, with the cure.
    """
    settings, state_dir = config.serve, Path(config.state_dir)
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(auditing(settings.audit))
        audit.record(audit.Event.SERVER_STARTED, f"forgeyard {version('forgeyard-executor')} starts")
        peers = await stack.enter_async_context(Peers.open(Path(settings.socket), _allowed(settings)))
        store = await AttemptStore.open(state_dir / STORE)
        stack.push_async_callback(store.close)
        if store.set_aside:
            log.error("the attempts on disk were damaged: they are in %s, and the server begins anew", store.set_aside)
        admission = Admission(capacity_of(settings))
        table = await _opened(stack, config, Wish.of(config, config_file), store, admission, writer=writer)
        cri_peers = await _cri(stack, table, config)
        images = Images(StatePaths.at(config.state_dir), config)
        stack.callback(images.close)
        server = Server(table, admission, Checks.configured(settings), peers, images, cri_peers)
        await stack.enter_async_context(_listening(server))
        if settings.tls is not None:
            await stack.enter_async_context(_listening_with_tls(server, settings.tls))
        for runtime in table.executors:
            stack.push_async_callback(_ended, asyncio.ensure_future(tell_of_changes(table, runtime)))
        yield server


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


async def _cri(stack: AsyncExitStack, table: AttemptTable, config: ExecutorConfig) -> Peers | None:
    """The socket for `crictl`, where one is configured."""
    if not config.serve.cri_socket:
        return None
    from forgeyard_api.cri.server import cri_served

    return await stack.enter_async_context(cri_served(table, config))


def _allowed(config: ServeConfig) -> Allowed:
    return Allowed(frozenset(config.allowed_uids), frozenset(config.operators))


async def _opened(
    stack: AsyncExitStack,
    config: ExecutorConfig,
    wish: Wish,
    store: AttemptStore,
    admission: Admission,
    *,
    writer: AuditWriter | None,
) -> AttemptTable:
    """The table, with every attempt of an earlier server taken up, and whoever looks at it."""
    settings = config.serve
    runtimes = settings.runtimes or (config.runtime,)

    def reserve(job: Job) -> ResourceReservation:
        return reservation(job, config)

    def table(executors: Mapping[str, JobExecutor], retired: Mapping[str, JobExecutor]) -> AttemptTable:
        rows = Rows(store, reserve)
        made = AttemptTable(rows, executors, admission, reserve, result_ttl=settings.result_ttl, retired=retired)
        stack.push_async_callback(made.close)
        return made

    async def watched(made: AttemptTable) -> AttemptTable:
        keepers = partial(living, wish.run_dir, wish.state_dir)
        await stack.enter_async_context(observed(settings, made, admission, writer, keepers))
        return made

    if settings.on_restart == ADOPT:
        keepers = await stack.enter_async_context(Keepers.open(wish, config, runtimes))
        made = await watched(table(keepers.executors(), keepers.retired()))
        await made.open()
        await keepers.end_strays(made.names)
        return made
    await end_all(wish)
    executors = {
        runtime: await stack.enter_async_context(Executor.open(runtime=runtime, config=config, keep_failed=True))
        for runtime in runtimes
    }
    made = await watched(table(executors, {}))
    await made.open()
    return made


def reservation(job: Job, config: ExecutorConfig) -> ResourceReservation:
    """What `job` sets aside while it runs, with its services.

    :raises InvalidRequest: for what its profile does not allow.
    """
    request = request_from_job(
        configured_job(job, config).job,
        context=AttemptContext("reservation"),
        workspace=PreparedWorkspace(),
        caches_anywhere=config.caches.every_profile,
    )
    return request.resources


@asynccontextmanager
async def _listening(server: Server) -> AsyncIterator[None]:
    grpc_server = grpc.aio.server(options=OPTIONS)
    grpc_server.add_generic_rpc_handlers(_handlers(server, server.peers.caller_of))
    grpc_server.add_insecure_port(server.peers.target)
    await grpc_server.start()
    try:
        yield
    finally:
        await grpc_server.stop(grace=1.0)


@asynccontextmanager
async def _listening_with_tls(server: Server, config: TlsConfig) -> AsyncIterator[None]:
    """A server of its own: which socket a call came by is what says who made it."""
    from forgeyard_api.serve.tls import Certificates

    certificates = Certificates(config)
    grpc_server = grpc.aio.server(options=OPTIONS)
    grpc_server.add_generic_rpc_handlers(_handlers(server, certificates.caller_of))
    try:
        grpc_server.add_secure_port(config.address, certificates.credentials())
    except RuntimeError as error:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "tls_address",
            f"can't listen at {config.address}",
            details=str(error),
            resolution="name another address in serve.tls, or stop who listens there",
        ) from error
    await grpc_server.start()
    try:
        yield
    finally:
        await grpc_server.stop(grace=1.0)


def _handlers(server: Server, caller_of: CallerOf) -> tuple[grpc.GenericRpcHandler, ...]:
    service = ExecutorService(server.table, server.checks, version("forgeyard-executor"))
    images = ImagesService(server.images, server.checks)
    return handlers("Executor", service, caller_of), handlers("Images", images, caller_of)
