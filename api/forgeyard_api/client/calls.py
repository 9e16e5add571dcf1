"""Calls to a server, each with a deadline, each error translated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from forgeyard_api.wire.errors import from_rpc
from forgeyard_api.wire.messages import Method, methods
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

MAX_MESSAGE: Final = 64 << 20
CALL_SECONDS: Final = 30.0
"""For calls that answer at once."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),  # two clients of one process have two connections
    ("grpc.enable_retries", 0),  # a repeated call is decided on here, where it is known which may be
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_PAUSE: Final = 0.1


class Calls:
    """One connection, and the calls over it.

    :param target: as gRPC has it, such as ``unix:/run/forgeyard/executor.sock``.
    :param reconnect: seconds for which a server that is away is asked again; every call is safe to repeat.
    """

    def __init__(self, channel: grpc.aio.Channel, target: str, *, reconnect: float) -> None:
        self.target = target
        self._channel = channel
        self._reconnect = reconnect
        found: dict[str, Mapping[str, Method]] = {
            service: {method.name: method for method in methods(service)} for service in ("Executor", "Images")
        }
        self._methods = found
        self._stubs: dict[str, Any] = {}

    async def call(self, name: str, request: Any, *, seconds: float = CALL_SECONDS, service: str = "Executor") -> Any:
        """The answer of a call.

        :raises ForgeyardError: the server's, or LOST when it stays away.
        """
        given_up = time.monotonic() + self._reconnect
        while True:
            try:
                return await self.once(name, request, seconds=seconds, service=service)
            except ExecutorError as error:
                if not away(error) or time.monotonic() >= given_up:
                    raise
            await asyncio.sleep(_PAUSE)

    async def once(self, name: str, request: Any, *, seconds: float, service: str = "Executor") -> Any:
        """As `call`, for what must not be asked twice."""
        try:
            return await self._stub(service, name)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.target) from error
        except asyncio.CancelledError as error:
            raise self._closed_under_us() or error from error

    async def stream(self, name: str, request: Any, *, service: str = "Executor") -> AsyncGenerator[Any, None]:
        """The answers of a call that goes on. Leaving the loop cancels it.

        :raises ForgeyardError: as `call`, without asking again: whoever reads knows where to go on.
        """
        call = self._stub(service, name)(request)
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.target) from error
        except asyncio.CancelledError as error:
            raise self._closed_under_us() or error from error
        finally:
            call.cancel()

    def _closed_under_us(self) -> ExecutorError | None:
        """gRPC cancels the calls of a channel that somebody closes: whoever waits for one gets an error.

        None: it is this very task that is cancelled.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return None
        return ExecutorError(
            ExecutorErrorKind.LOST, "server_unavailable", f"the connection to {self.target} was closed during a call"
        )

    async def close(self) -> None:
        """Break the connection."""
        await self._channel.close()

    def _stub(self, service: str, name: str) -> Any:
        method = self._methods[service][name]
        if method.path not in self._stubs:
            make = self._channel.unary_stream if method.streams else self._channel.unary_unary
            self._stubs[method.path] = make(
                method.path,
                request_serializer=method.question.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        return self._stubs[method.path]


@asynccontextmanager
async def connected(
    target: str, *, reconnect: float, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Calls]:
    """A connection, made when it is first needed, until the end of the block."""
    calls = Calls(channel_to(target, credentials), target, reconnect=reconnect)
    try:
        yield calls
    finally:
        await calls.close()


def channel_to(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A connection with our options."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)


def away(error: Exception) -> bool:
    """Whether it says only that the server could not be reached."""
    return isinstance(error, ExecutorError) and error.reason == "server_unavailable"
