"""The process that reads manifests, configs and layers: started by `ImageReader`, confined before the first byte.

``python -I -m forgeyard_oci.reader_worker FD MEMORY FILE_SIZE``. FD is its end of the pair of sockets. It ends when
the other end is closed. Imports stay few: they are the time it takes to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import zstandard  # noqa: F401  there is no file left to import from when a layer needs it

from forgeyard_host.confine import Capability, Confinement, confine
from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.image_errors import host_failure, refused
from forgeyard_oci.reader_channel import MAX_DESCRIPTORS, Channel, ChannelError, Message
from forgeyard_oci.reader_errors import pack_error
from forgeyard_oci.unpack import unpack_into
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import DIR_FLAGS, MergedTree
from forgeyard_oci.unpack_stream import LayerStream
from forgeyard_oci.unpack_tree import Parts

_BEAT: Final = 0.25
_PATHS: Final = 500
_DEEPEST: Final = 32
_MOST_VALUES: Final = 200_000
_KEPT: Final = frozenset(
    {
        *("schemaVersion", "mediaType", "artifactType", "manifests", "config", "layers", "subject"),
        *("architecture", "os", "variant", "rootfs"),
    }
)
"""Of a document's own fields; the others, such as a config's history, may be large and are of no use here."""


class Worker:
    """Answers one request after another."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lowers: dict[int, int] = {}
        self._opaque: dict[tuple[int, Parts], bool] = {}
        self._beaten = 0.0

    def serve(self) -> None:
        """Until the other end is closed."""
        while True:
            message = self._channel.receive()
            try:
                self._answer(message)
            except (SandboxError, ExecutorError) as error:
                self._channel.send({"error": pack_error(error)})
            except OSError as error:
                self._channel.send({"error": pack_error(host_failure(error, "reading an image", "its files"))})
            except MemoryError:
                self._channel.send({"memory": True})
            finally:
                if message.body.get("do") != "lowers":
                    for fd in message.descriptors:
                        os.close(fd)

    def _answer(self, message: Message) -> None:
        request = message.body
        if request["do"] == "document":
            self._channel.send({"done": True}, plain_document(message.payload, request["what"]))
        elif request["do"] == "lowers":
            self._lowers.update(zip(request["numbers"], message.descriptors, strict=True))
        else:
            self._unpack(request, *message.descriptors)

    def _unpack(self, request: Mapping[str, Any], blob: int, tree: int, records: int) -> None:
        limits = UnpackLimits(**request["limits"])
        layer = {name: request[name] for name in ("media_type", "digest", "size", "diff_id")}
        stream = LayerStream(blob, limits=limits, **layer)
        numbers = request["lowers"]
        lowers = MergedTree([self._lowers[number] for number in numbers], self._ask_for(numbers))
        # What came is a name for the mount; it has to be opened to be written to.
        root = os.open(".", DIR_FLAGS, dir_fd=tree)
        try:
            report, opaque = unpack_into(
                stream, root, request["shown"], lowers, limits, records=records, beat=self._beat
            )
        finally:
            os.close(root)
        for start in range(0, len(opaque), _PATHS):
            self._channel.send({"opaque": ["/".join(parts) for parts in opaque[start : start + _PATHS]]})
        self._channel.send({"done": True, "report": asdict(report)})

    def _ask_for(self, numbers: Sequence[int]) -> Any:
        """The mark of an opaque directory is the executor's to read, as it is to set."""

        def ask(tree: int, _fd: int, parts: Sequence[str]) -> bool:
            key = (numbers[tree], tuple(parts))
            if key not in self._opaque:
                self._channel.send({"ask": numbers[tree], "path": "/".join(parts)})
                self._opaque[key] = bool(self._channel.receive().body["opaque"])
            return self._opaque[key]

        return ask

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten > _BEAT:
            self._beaten = now
            self._channel.send({"beat": True})


def plain_document(data: bytes, what: str) -> bytes:
    """A JSON document written anew, so that what leaves this process is plain: ASCII, no key twice, not too deep.

    :raises SandboxError: bad_manifest, for what is no such document.
    """
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        kept = {key: document[key] for key in _KEPT & _object(document).keys()}
        _bounded(kept)
        return json.dumps(kept, sort_keys=True).encode("ascii")
    except (ValueError, RecursionError) as error:
        details = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise refused("bad_manifest", f"{what} can't be read", details=details) from error


def _object(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError("it is no object")  # noqa: TRY004  of JSON, not of Python
    return document


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _bounded(document: dict[str, Any]) -> None:
    left: list[tuple[object, int]] = [(document, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > _DEEPEST or count > _MOST_VALUES:
            raise ValueError("it is too deep" if depth > _DEEPEST else "it holds too many values")
        if isinstance(value, dict):
            left.extend((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list):
            left.extend((inner, depth + 1) for inner in value)


def main(arguments: Sequence[str]) -> None:
    """Confine this process, say so, and serve."""
    number, memory, file_size = (int(argument) for argument in arguments)
    # An interrupt at the terminal is for the executor, which then closes its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(1 << 20)
    os.umask(0)
    channel = Channel(socket.socket(fileno=number), descriptors=MAX_DESCRIPTORS)
    try:
        try:
            confine(Confinement(memory=memory, file_size=file_size, capabilities=tuple(Capability)))
        except SandboxError as error:
            channel.send({"error": pack_error(error)})
            return
        channel.send({"ready": True})
        Worker(channel).serve()
    except ChannelError:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
