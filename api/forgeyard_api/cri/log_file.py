"""Output of a container as a file in CRI's log format, rotated.

    <time, RFC 3339 with nanoseconds> <stdout|stderr> <F|P> <bytes>\\n

F ends a line of the output, P is a piece of one: its newline is the format's, not the output's. So a file says byte
for byte what was written. https://github.com/kubernetes/design-proposals-archive, node/kubelet-cri-logging.md
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from forgeyard_runtimes.spool_format import OutputChunk

PIECE: Final = 16 << 10
"""Bytes of one line of the file, as containerd has it: readers of the format expect no larger ones."""


class LineSplitter:
    """Makes lines of the file out of chunks. The start of a line waits for its end until `flush`."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[datetime, bytes]] = {}

    @property
    def waiting(self) -> bool:
        """Whether part of a line has not been given out."""
        return bool(self._begun)

    def lines(self, chunk: OutputChunk) -> bytes:
        """What `chunk` completes."""
        made = bytearray()
        if chunk.dropped_before:
            made += self.flush(chunk.stream)
            note = f"[{chunk.dropped_before} bytes of {chunk.stream} were not kept]"
            made += _line(chunk.time, "stderr", "F", note.encode())
        time, text = self._begun.pop(chunk.stream, (chunk.time, b""))
        *whole, rest = (text + chunk.data).split(b"\n")
        for line in whole:
            pieces = [line[at : at + PIECE] for at in range(0, len(line), PIECE)] or [b""]
            for piece in pieces[:-1]:
                made += _line(time, chunk.stream, "P", piece)
            made += _line(time, chunk.stream, "F", pieces[-1])
            time = chunk.time
        while len(rest) >= PIECE:
            made += _line(time, chunk.stream, "P", rest[:PIECE])
            rest = rest[PIECE:]
        if rest:
            self._begun[chunk.stream] = (time, rest)
        return bytes(made)

    def flush(self, stream: str = "") -> bytes:
        """What is begun of lines, of one stream or of both, as pieces."""
        wanted = [name for name in self._begun if stream in ("", name)]
        return b"".join(_line(time, name, "P", rest) for name in wanted for time, rest in (self._begun.pop(name),))


class LogFile:
    """A file that is moved aside when it is full: NAME, then NAME.1 and so on, the oldest last. Blocking.

    :param size: bytes after which it is. :param files: how many there are at the most.
    :raises OSError: by every method.
    """

    def __init__(self, path: Path, *, size: int, files: int) -> None:
        self.path = path
        self._size = size
        self._files = max(1, files)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = _fresh(path)
        self._written = 0

    def write(self, lines: bytes) -> None:
        """Append whole lines."""
        if self._written and self._written + len(lines) > self._size:
            self._rotate()
        # A write may stop half way, at a full disk for one.
        view = memoryview(lines)
        while view:
            view = view[os.write(self._file, view) :]
        self._written += len(lines)

    def close(self) -> None:
        """Repeating it is no error."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files - 1, 0, -1):
            newer = self._aside(number - 1)
            if newer.exists():
                newer.replace(self._aside(number))
        self._file = _fresh(self.path)
        self._written = 0

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def _fresh(path: Path) -> int:
    """A new, empty file, for root alone. What had the name is unlinked, not emptied: somebody may be reading it."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _line(time: datetime, stream: str, tag: str, text: bytes) -> bytes:
    # The clock of our spools has microseconds; the format's has nanoseconds.
    stamp = time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
    return f"{stamp} {stream} {tag} ".encode() + text + b"\n"
