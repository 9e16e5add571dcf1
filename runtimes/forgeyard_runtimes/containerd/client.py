"""Calls to one containerd: a channel per event loop, our namespace on every call, a deadline on every call."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from forgeyard_runtimes.containerd.calls import Call
from forgeyard_runtimes.containerd.errors import call_failed

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

QUERY_DEADLINE: Final = 20.0
"""Seconds for what only looks something up, or makes a record."""
START_DEADLINE: Final = 60.0
"""Seconds for what starts or ends processes."""

_LEAST: Final = 0.1

# What the daemon itself allows; gRPC's own default for answers is 4 MiB.
_MESSAGE: Final = 16 << 20
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MESSAGE),
    ("grpc.max_send_message_length", _MESSAGE),
    # A daemon that is restarted is back within a second or two, and gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # Else two adapters in one process, at daemons of different tests, could share a connection that is gone.
    ("grpc.use_local_subchannel_pool", 1),
)


class Client:
    """Calls in one containerd namespace. To be used from any event loop; `close` it in each that used it."""

    def __init__(self, socket: str, namespace: str) -> None:
        self.socket = socket
        self.namespace = namespace
        self._channels: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aio.Channel] = weakref.WeakKeyDictionary()
        self._guard = threading.Lock()

    async def call(
        self,
        call: Call[Q, A],
        question: Q,
        *,
        deadline: float = QUERY_DEADLINE,
        lease: str | None = None,
        patient: bool = False,
    ) -> A:
        """One question, one answer.

        :param deadline: seconds.
        :param lease: that keeps what the call makes from being collected.
        :param patient: while the daemon is away, wait for it as long as the deadline allows. Only for what may be
            asked twice.
        :raises DaemonError: it refused, is not there, or did not answer in time.
        """
        end = time.monotonic() + deadline
        while True:
            try:
                return await self._ask(call, question, max(end - time.monotonic(), _LEAST), lease, patient=patient)
            except aio.AioRpcError as error:
                # Waiting for a connection is gRPC's own; one that broke while we asked is not.
                if not (patient and error.code() is grpc.StatusCode.UNAVAILABLE) or time.monotonic() > end:
                    raise call_failed(call.shown, error.code().name, error.details() or "", deadline) from error
            await asyncio.sleep(_LEAST)

    async def _ask(self, call: Call[Q, A], question: Q, seconds: float, lease: str | None, *, patient: bool) -> A:
        stub = self._channel().unary_unary(
            call.path, request_serializer=call.question.SerializeToString, response_deserializer=call.answer.FromString
        )
        answer: A = await stub(
            question, timeout=seconds, metadata=self._metadata(lease), wait_for_ready=patient or None
        )
        return answer

    async def stream(self, call: Call[Q, A], question: Q, *, deadline: float | None = None) -> AsyncIterator[A]:
        """One question, many answers.

        :param deadline: seconds for all of them; None has no end.
        :raises DaemonError: also when a stream without end ends.
        """
        stub = self._channel().unary_stream(
            call.path, request_serializer=call.question.SerializeToString, response_deserializer=call.answer.FromString
        )
        stream = stub(question, timeout=deadline, metadata=self._metadata(None))
        try:
            async for answer in stream:
                yield answer
        except aio.AioRpcError as error:
            raise call_failed(call.shown, error.code().name, error.details() or "", deadline or 0) from error
        finally:
            stream.cancel()

    async def exchange(
        self, call: Call[Q, A], questions: AsyncIterator[Q], *, deadline: float, lease: str | None
    ) -> tuple[A, ...]:
        """Many questions, and all answers to them.

        :raises DaemonError: as `call` does.
        """
        stub = self._channel().stream_stream(
            call.path, request_serializer=call.question.SerializeToString, response_deserializer=call.answer.FromString
        )
        stream = stub(questions, timeout=deadline, metadata=self._metadata(lease))
        try:
            return tuple([answer async for answer in stream])
        except aio.AioRpcError as error:
            raise call_failed(call.shown, error.code().name, error.details() or "", deadline) from error
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Let go of the connection of the running loop. A later call makes a new one."""
        with self._guard:
            channel = self._channels.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            await channel.close()

    def _channel(self) -> aio.Channel:
        loop = asyncio.get_running_loop()
        with self._guard:
            channel = self._channels.get(loop)
            if channel is None:
                channel = aio.insecure_channel(f"unix:{self.socket}", options=_OPTIONS)
                self._channels[loop] = channel
            return channel

    def _metadata(self, lease: str | None) -> tuple[tuple[str, str], ...]:
        own = (("containerd-namespace", self.namespace),)
        return own if lease is None else (*own, ("containerd-lease", lease))
