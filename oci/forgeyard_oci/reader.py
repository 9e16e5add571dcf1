"""Reads what comes from outside in a process that can do nothing else; see docs/images.md, "How images are read".

Its answers are not trusted: they are bounded, read strictly, and can at most misrepresent the image they are about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, Self

from forgeyard_host.confine import detached_copy
from forgeyard_host.files import open_beneath
from forgeyard_model.errors import ForgeyardError
from forgeyard_oci.image_errors import host_failure, refused
from forgeyard_oci.image_manifest import MAX_MANIFEST, ConfigFile, Index, Manifest, parse_json, parse_manifest
from forgeyard_oci.reader_channel import MAX_DESCRIPTORS, Channel, ChannelEndedError, ChannelError, Message
from forgeyard_oci.reader_errors import lost, out_of_memory, unpack_error
from forgeyard_oci.unpack import UnpackReport, mark_opaque
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import DIR_FLAGS, is_opaque

_IDLE: Final = 120.0
_STARTING: Final = 30.0
_FLAGS: Final = ("-I", "-X", "utf8")
_MODULE: Final = "forgeyard_oci.reader_worker"
# One arena: each further one takes 64 MiB of the bounded address space.
_ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "1", "LC_ALL": "C.UTF-8"}
_MOST_SKIPPED: Final = 100
_LONGEST_NAME: Final = 4096


class ImageReader:
    """One process that reads documents and unpacks layers, started at first use (or by `start`).

    When it dies or hangs, the call that met this fails with a typed error, and the next call starts another one.
    Calls from several threads wait for each other; `close` ends a call that runs.

    :param memory: bytes of address space of the process.
    :param idle: seconds without progress after which it counts as hung.
    """

    def __init__(self, *, limits: UnpackLimits, memory: int = 1 << 30, idle: float = _IDLE) -> None:
        self._limits, self._memory, self._idle = limits, memory, idle
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ready = False
        self._lowers: dict[str, int] = {}

    @property
    def pid(self) -> int | None:
        """Of the process, None when there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process without waiting for it, for instance while the network is waited for.

        :raises ExecutorError: IO_FAILED, when no process can be started.
        """
        with self._lock:
            self._start()

    def document(self, data: bytes, declared: str, digest: str) -> Index | Manifest:
        """Read an index or a manifest, as `parse_manifest` does.

        :raises SandboxError: for one that can't be read; image_reader_… when the process failed.
        :raises ExecutorError: UNSUPPORTED, for other kinds of manifest.
        """
        return parse_manifest(self._plain(data, f"manifest {digest}"), declared, digest)

    def config(self, data: bytes, digest: str) -> ConfigFile:
        """Read an image's config.

        :raises SandboxError: for one that can't be read; image_reader_… when the process failed.
        """
        return parse_json(ConfigFile, self._plain(data, f"config {digest}"), f"config {digest}")

    def unpack(
        self,
        blob_fd: int,
        *,
        media_type: str,
        digest: str,
        size: int,
        diff_id: str,
        tree: Path,
        lowers: Sequence[str],
        records: Path,
        check: Callable[[], None] = lambda: None,
    ) -> UnpackReport:
        """Unpack a layer into the empty directory `tree`, and write the tree's records to the new file `records`.

        Blocking. On any error both are rubbish, and the caller removes them.

        :param blob_fd: a regular file, read from where it stands; stays the caller's.
        :param lowers: trees of the layers below, topmost first.
        :param check: called several times a second; what it raises ends the unpacking.
        :raises SandboxError: an entry that breaks a rule (named), a wrong digest; image_reader_… when the process died.
        :raises ExecutorError: IO_FAILED when the host can't write; UNSUPPORTED for a media type that is no layer.
        """
        request = {
            **{"do": "unpack", "media_type": media_type, "digest": digest, "size": size, "diff_id": diff_id},
            **{"shown": str(tree), "limits": asdict(self._limits)},
        }
        with self._lock, contextlib.ExitStack() as stack:
            try:
                root = os.open(tree, DIR_FLAGS)
                stack.callback(os.close, root)
                written = os.open(records, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                stack.callback(os.close, written)
            except OSError as error:
                raise host_failure(error, "unpacking an image", str(tree)) from error
            channel = self._running(check)
            with self._whole():
                request["lowers"] = self._hand_over(channel, lowers)
                copy = detached_copy(root, str(tree), read_only=False)
                stack.callback(os.close, copy)
                source = _read_only(blob_fd, digest)
                stack.callback(os.close, source)
                channel.send(request, descriptors=(source, copy, written))
                conversation = _Conversation(self._limits, root, lowers, self._lowers)
                while (answer := channel.receive(check, self._idle)).body.get("done") is not True:
                    conversation.take(channel, self._no_error(answer))
                return _report(answer.body.get("report"))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        self._ready = False
        self._lowers = {}
        if process is not None:
            process.kill()
            process.wait()
        if channel is not None:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plain(self, data: bytes, what: str) -> bytes:
        if len(data) > MAX_MANIFEST:
            raise refused("manifest_too_large", f"{what} has {len(data)} bytes", details="the limit is 4 MiB")
        with self._lock:
            channel = self._running(lambda: None)
            with self._whole():
                channel.send({"do": "document", "what": what}, data)
                return self._no_error(channel.receive(lambda: None, self._idle)).payload

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            sizes = (str(theirs.fileno()), str(self._memory), str(self._limits.expanded))
            try:
                self._process = subprocess.Popen(
                    (sys.executable, *_FLAGS, "-m", _MODULE, *sizes),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_ENVIRONMENT,
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                raise host_failure(error, "starting the process that reads images", sys.executable) from error
        ours.settimeout(self._idle)
        self._channel = Channel(ours)

    def _running(self, check: Callable[[], None]) -> Channel:
        """The channel to a process that is confined."""
        self._start()
        channel = self._channel
        if channel is None:
            raise self._died("it was closed", ended=True)
        if not self._ready:
            with self._whole():
                answer = self._no_error(channel.receive(check, _STARTING))
                if answer.body.get("ready") is not True:
                    raise ChannelError("it did not start")
                self._ready = True
        return channel

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """End the process when a call does not come to its end: what it would answer next is anyone's guess."""
        try:
            yield
        except ChannelError as error:
            raise self._died(str(error), ended=isinstance(error, ChannelEndedError)) from error
        except TimeoutError as error:
            self.close()
            raise lost("image_reader_hung", f"reading the image made no progress for {self._idle:.0f} s") from error
        except _Answered as answered:
            raise answered.error from None
        except BaseException:
            self.close()
            raise

    def _no_error(self, answer: Message) -> Message:
        if answer.body.get("memory") is True:
            self.close()  # much of its memory may be gone for good
            raise _Answered(out_of_memory(self._memory))
        if "error" in answer.body:
            error = unpack_error(answer.body["error"]) if isinstance(answer.body["error"], Mapping) else None
            if error is None:
                raise ChannelError("it sent something else")
            raise _Answered(error)
        return answer

    def _died(self, details: str, *, ended: bool) -> ForgeyardError:
        process = self._process
        if process is not None and ended:
            # A moment, so that its own way of ending is the one that shows.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        self.close()
        code = process.returncode if process is not None and ended else None
        if code is not None and code < 0 and -code != signal.SIGKILL:
            details = f"killed by {signal.Signals(-code).name}"
        return lost("image_reader_died", "the process that reads the image died", details=details)

    def _hand_over(self, channel: Channel, lowers: Sequence[str]) -> list[int]:
        """Give the process the lower trees that it does not hold yet, read-only; their numbers."""
        missing = [lower for lower in dict.fromkeys(lowers) if lower not in self._lowers]
        for start in range(0, len(missing), MAX_DESCRIPTORS):
            with contextlib.ExitStack() as stack:
                numbers, copies = [], []
                for lower in missing[start : start + MAX_DESCRIPTORS]:
                    copies.append(_lower(lower, stack))
                    self._lowers[lower] = len(self._lowers)
                    numbers.append(self._lowers[lower])
                channel.send({"do": "lowers", "numbers": numbers}, descriptors=copies)
        return [self._lowers[lower] for lower in lowers]


class _Answered(Exception):  # noqa: N818  it carries an error, and is none
    """The process said in good order why it can't: it lives on."""

    def __init__(self, error: ForgeyardError) -> None:
        self.error = error


class _Conversation:
    """What a process may ask for while it unpacks one layer."""

    def __init__(self, limits: UnpackLimits, root: int, lowers: Sequence[str], numbers: Mapping[str, int]) -> None:
        self._left = limits.entries + 1
        self._root = root
        self._lowers = {numbers[lower]: lower for lower in lowers}

    def take(self, channel: Channel, message: Message) -> None:
        """Do what an intermediate message asks for.

        :raises ChannelError: when it is nothing that may be asked.
        """
        body = message.body
        if "opaque" in body:
            self._mark(body["opaque"])
        elif "ask" in body:
            channel.send({"opaque": self._is_opaque(body["ask"], body.get("path"))})
        elif body != {"beat": True}:
            raise ChannelError("it sent something else")

    def _mark(self, paths: object) -> None:
        if not isinstance(paths, list):
            raise ChannelError("it sent something else")
        self._left -= len(paths)
        if self._left < 0:
            raise ChannelError("it asks too much")
        for path in paths:
            with self._beneath(path) as checked:
                mark_opaque(self._root, checked)

    def _is_opaque(self, number: object, path: object) -> bool:
        lower = self._lowers.get(number) if isinstance(number, int) else None
        if lower is None:
            raise ChannelError("it sent something else")
        with self._beneath(path) as checked:
            tree = os.open(lower, DIR_FLAGS)
            try:
                fd = open_beneath(tree, checked, DIR_FLAGS)
                try:
                    return is_opaque(fd)
                finally:
                    os.close(fd)
            finally:
                os.close(tree)

    @staticmethod
    @contextlib.contextmanager
    def _beneath(path: object) -> Iterator[str]:
        if not isinstance(path, str) or "\0" in path:
            raise ChannelError("it sent something else")
        try:
            yield path
        except (OSError, UnicodeError) as error:
            raise ChannelError("it names a directory that is not there") from error


def _lower(path: str, stack: contextlib.ExitStack) -> int:
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise host_failure(error, "unpacking an image", path) from error
    try:
        copy = detached_copy(fd, path, read_only=True)
    finally:
        os.close(fd)
    stack.callback(os.close, copy)
    return copy


def _read_only(blob: int, digest: str) -> int:
    """The blob again, where it stands, by a mount on which not even its owner can be changed."""
    mount = detached_copy(blob, digest, read_only=True)
    try:
        fd = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise host_failure(error, "reading a layer", digest) from error
    finally:
        os.close(mount)
    os.lseek(fd, os.lseek(blob, 0, os.SEEK_CUR), os.SEEK_SET)
    return fd


def _report(answer: object) -> UnpackReport:
    """The report, when it is one.

    :raises ChannelError: for anything else.
    """
    known = {field.name: type(field.default) for field in fields(UnpackReport)}
    if not isinstance(answer, dict) or answer.keys() != known.keys():
        raise ChannelError("it sent no report")
    values: dict[str, Any] = {}
    for name, kind in known.items():
        value = answer[name]
        if kind is tuple:
            value = tuple(value) if isinstance(value, list) and len(value) <= _MOST_SKIPPED else None
            if value is None or not all(isinstance(word, str) and len(word) <= _LONGEST_NAME for word in value):
                raise ChannelError("it sent no report")
        elif type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ChannelError("it sent no report")
        values[name] = value
    return UnpackReport(**values)
