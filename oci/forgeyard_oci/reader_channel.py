"""Messages between the executor and the process that reads images: JSON, a payload of bytes, descriptors one way.

A message is two 32-bit lengths, a JSON object and a payload. Both lengths are bounded before a byte is read for them.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MAX_JSON: Final = 1 << 20
MAX_PAYLOAD: Final = 32 << 20
"""Bytes. A document of 4 MiB whose every byte is written as an escape of six still fits."""
MAX_DESCRIPTORS: Final = 250
"""What one message carries; the kernel takes 253."""
_LENGTHS: Final = struct.Struct("!II")
_TICK: Final = 0.2


class ChannelError(Exception):
    """The other side is gone, or what it sent is no message."""


class ChannelEndedError(ChannelError):
    """The other side closed its end, most likely by dying."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Its descriptors are the receiver's to close."""

    body: Mapping[str, Any]
    payload: bytes = b""
    descriptors: tuple[int, ...] = field(default=())


class Channel:
    """One end of the pair of sockets.

    :param descriptors: how many a message may bring. With 0 the kernel closes whatever is sent.
    """

    def __init__(self, sock: socket.socket, *, descriptors: int = 0) -> None:
        self._sock, self._descriptors = sock, descriptors

    def send(self, body: Mapping[str, Any], payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send one message.

        :raises ChannelError: when nobody listens (any more).
        """
        text = json.dumps(body).encode("ascii")
        head = _LENGTHS.pack(len(text), len(payload)) + text
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            sent = self._sock.sendmsg([head], rights)
            if sent < len(head):
                self._sock.sendall(head[sent:])
            if payload:
                self._sock.sendall(payload)
        except OSError as error:
            raise ChannelEndedError("it does not listen") from error

    def receive(self, tick: Callable[[], None] = lambda: None, idle: float | None = None) -> Message:
        """Wait for one message.

        :param tick: called several times a second while waiting; may raise.
        :param idle: seconds without a byte before it counts as hung; None waits for ever.
        :raises ChannelError: the other side ended, or sent no message.
        :raises TimeoutError: it hung.
        """
        brought: list[int] = []
        try:
            length, more = _checked(*_LENGTHS.unpack(self._exactly(_LENGTHS.size, tick, idle, brought)))
            body = _object(self._exactly(length, tick, idle, brought))
            payload = self._exactly(more, tick, idle, brought)
        except BaseException:
            for fd in brought:
                os.close(fd)
            raise
        return Message(body, payload, tuple(brought))

    def close(self) -> None:
        """Close this end; the other side sees it."""
        self._sock.close()

    def _exactly(self, count: int, tick: Callable[[], None], idle: float | None, brought: list[int]) -> bytes:
        pieces = bytearray()
        while len(pieces) < count:
            self._wait(tick, idle)
            piece = self._some(count - len(pieces), brought)
            if not piece:
                raise ChannelEndedError("it ended")
            pieces += piece
        return bytes(pieces)

    def _some(self, most: int, brought: list[int]) -> bytes:
        most = min(most, 1 << 18)
        try:
            if not self._descriptors:
                return self._sock.recv(most)
            room = socket.CMSG_SPACE(self._descriptors * array.array("i").itemsize)
            piece, ancillary, _, _ = self._sock.recvmsg(most, room, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelEndedError("it ended") from error
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                brought.extend(numbers)
        return piece

    def _wait(self, tick: Callable[[], None], idle: float | None) -> None:
        if idle is None:
            return
        poller = select.poll()
        with contextlib.suppress(ValueError):  # closed by another thread: the read says so
            poller.register(self._sock, select.POLLIN)
        until = time.monotonic() + idle
        while not poller.poll(_TICK * 1000):
            tick()
            if time.monotonic() > until:
                raise TimeoutError("it hung")


def _checked(length: int, payload: int) -> tuple[int, int]:
    if length > MAX_JSON or payload > MAX_PAYLOAD:
        raise ChannelError("it sent too long a message")
    return length, payload


def _object(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChannelError("it sent something else") from error
    if not isinstance(body, dict):
        raise ChannelError("it sent something else")
    return body
