"""The endpoint that `crictl` connects to: a socket of its own, for operators alone."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import grpc

from forgeyard_api.cri.exec_sync import ExecSync
from forgeyard_api.cri.image_service import ImageService
from forgeyard_api.cri.logs import Logs, LogSettings
from forgeyard_api.cri.messages import PACKAGE, methods
from forgeyard_api.cri.pods import Pods
from forgeyard_api.cri.runtime_service import RuntimeService
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.peers import Allowed, Peers
from forgeyard_api.serve.service import CallerOf, Handler, snake
from forgeyard_api.wire.errors import code_of
from forgeyard_api.wire.messages import Method
from forgeyard_executor.images import Images
from forgeyard_executor.state import StatePaths
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.config_serve import ServeConfig
from forgeyard_model.errors import ForgeyardError, InvalidRequest

log: Final = logging.getLogger("forgeyard.serve")

LOGS: Final = "cri-logs"
"""Below the state directory."""

_STREAMS: Final = frozenset({"Exec", "Attach", "PortForward"})
_CHANGES: Final = frozenset(
    {
        "RunPodSandbox",
        "RemovePodSandbox",
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "UpdateContainerResources",
        "UpdatePodSandboxResources",
        "UpdateRuntimeConfig",
        "CheckpointContainer",
        "PullImage",
        "RemoveImage",
    }
)


@asynccontextmanager
async def cri_served(table: AttemptTable, config: ExecutorConfig) -> AsyncIterator[Peers]:
    """Serve the Container Runtime Interface at the configured `cri_socket` for the block.

    :returns: who may connect, which a new configuration may change.
    :raises ForgeyardError: the socket or the logs can't be made.
    """
    settings, paths = config.serve, StatePaths.at(config.state_dir)
    async with AsyncExitStack() as stack:
        peers = await stack.enter_async_context(Peers.open(Path(settings.cri_socket), operators_of(settings)))
        pods, runner = Pods(table), ExecSync(table)
        stack.push_async_callback(pods.close)
        stack.push_async_callback(runner.close)
        keep = LogSettings(paths.root / LOGS, settings.cri_log_size, settings.cri_log_files)
        logs = await stack.enter_async_context(Logs.open(table, pods, keep))
        images = Images(paths, config)
        stack.callback(images.close)
        image_service = ImageService(images, paths.images)
        stack.push_async_callback(image_service.close)
        runtime_service = RuntimeService(
            table, pods, logs, runner, version("forgeyard-executor"), writes=settings.cri_writes
        )
        services = {"RuntimeService": runtime_service, "ImageService": image_service}
        await stack.enter_async_context(_listening(peers, services))
        yield peers


def operators_of(settings: ServeConfig) -> Allowed:
    """Who may connect: operators, who see everything."""
    operators = frozenset(settings.operators)
    return Allowed(operators, operators)


@asynccontextmanager
async def _listening(peers: Peers, services: dict[str, Any]) -> AsyncIterator[None]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (*(_handlers(name, target, peers.caller_of) for name, target in services.items()), _Refusals())
    )
    server.add_insecure_port(peers.target)
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=1.0)


def _handlers(service: str, target: object, caller_of: CallerOf) -> grpc.GenericRpcHandler:
    """The calls that `target` has methods for, in snake case."""
    found = {
        method.name: grpc.unary_unary_rpc_method_handler(
            _answered(method, getattr(target, snake(method.name)), caller_of),
            request_deserializer=method.question.FromString,
            response_serializer=method.answer.SerializeToString,
        )
        for method in methods(service)
    }
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", found)


def _answered(method: Method, act: Handler, caller_of: CallerOf) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await act(request, caller_of(context))
        except ForgeyardError as error:
            await context.abort(_code(error), str(error))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the command did not end in time; it goes on in its sandbox"
            )
        except Exception as error:
            log.exception("%s failed", method.path)
            words = f"{method.name} failed inside the server: {type(error).__name__}: {error}"
            await context.abort(grpc.StatusCode.INTERNAL, words)

    return call


def _code(error: ForgeyardError) -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, InvalidRequest) else code_of(error)


class _Refusals(grpc.GenericRpcHandler):
    """A clear word for each call that we do not answer."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """A handler that refuses; None for what is not of this interface."""
        service, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if not service.startswith(f"{PACKAGE}."):
            return None

        async def refuse(_: bytes, context: Any) -> bytes:
            await context.abort(*refusal(name))
            raise AssertionError("abort has raised")

        return grpc.unary_unary_rpc_method_handler(refuse)


def refusal(name: str) -> tuple[grpc.StatusCode, str]:
    """What a call is told that we do not answer, by its name."""
    if name in _STREAMS:
        return grpc.StatusCode.UNIMPLEMENTED, f"{name} is not offered: use exec --sync"
    if name in _CHANGES:
        return (
            grpc.StatusCode.PERMISSION_DENIED,
            f"{name} is refused: this endpoint shows attempts; the executor's own API makes and removes them",
        )
    return grpc.StatusCode.UNIMPLEMENTED, f"{name} is not offered: this endpoint shows attempts and images"
