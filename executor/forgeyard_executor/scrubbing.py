"""Takes secrets out of a tree of files, and looks whether they are gone.

What is looked for are a value's bytes, as they are and as JSON has them. A job that encoded or encrypted a secret has
made other bytes of it, which nobody can find: that is why what is kept has an owner and an end as well.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from forgeyard_host.files import remove_tree

SHORTEST: Final = 4
"""Bytes of a value that can be told from any other bytes."""
_CHUNK: Final = 1 << 20
_MASK: Final = b"*"


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Finds values. `pattern` None: there are none."""

    pattern: re.Pattern[bytes] | None
    longest: int

    @classmethod
    def of(cls, values: Sequence[str]) -> Self:
        """For `values`, none of which is shorter than SHORTEST."""
        forms = {form for value in values for form in _forms(value)}
        ordered = sorted(forms, key=len, reverse=True)
        pattern = re.compile(b"|".join(map(re.escape, ordered)), re.DOTALL) if ordered else None
        return cls(pattern, max(map(len, ordered), default=0))

    def clean(self, data: bytes) -> bytes:
        """`data` with each value masked, as long as it was."""
        return data if self.pattern is None else self.pattern.sub(_masked, data)

    def clean_tree(self, top: Path) -> tuple[str, ...]:
        """Mask the values in all files below `top`; entries whose name or target holds one are removed.

        :returns: where something was removed, one line each, without the name.
        :raises OSError: what can't be read or written.
        """
        removed = []
        for directory, path in _entries(top):
            if self._named(path):
                remove_tree(str(path))
                removed.append(f"{directory.relative_to(top)}: an entry whose name holds a secret")
            elif path.is_file() and not path.is_symlink():
                self._clean_file(path)
        return tuple(removed)

    def found_in(self, top: Path) -> Path | None:
        """The first place below `top` where a value still is.

        :raises OSError: what can't be read.
        """
        for _, path in _entries(top):
            if self._named(path) or (path.is_file() and not path.is_symlink() and self._in_file(path)):
                return path
        return None

    def _named(self, path: Path) -> bool:
        if self.pattern is None:
            return False
        target = os.fsencode(path.readlink()) if path.is_symlink() else b""
        return bool(self.pattern.search(os.fsencode(path.name)) or self.pattern.search(target))

    def _clean_file(self, path: Path) -> None:
        if self.pattern is None:
            return
        mode = path.stat().st_mode
        with path.open("r+b", buffering=0) as file:
            for offset, data in self._windows(file.fileno()):
                clean = self.clean(data)
                if clean != data:
                    os.pwrite(file.fileno(), clean, offset)
        path.chmod(mode & 0o777)  # a write may take bits away

    def _in_file(self, path: Path) -> bool:
        if self.pattern is None:
            return False
        with path.open("rb", buffering=0) as file:
            return any(self.pattern.search(data) for _, data in self._windows(file.fileno()))

    def _windows(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """Pieces with their offsets, which overlap by as much as a value may have; holes are passed over."""
        for start, end in _data_ranges(fd):
            offset = start
            while offset < end:
                # Read anew, what was masked in the window before included.
                yield offset, os.pread(fd, min(_CHUNK + self.longest, end - offset), offset)
                offset += _CHUNK


def _forms(value: str) -> Iterator[bytes]:
    for text in (value, value.strip()):
        if len(text.encode(errors="surrogateescape")) >= SHORTEST:
            yield text.encode(errors="surrogateescape")
            yield json.dumps(text)[1:-1].encode()
            yield json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="surrogateescape")


def _masked(found: re.Match[bytes]) -> bytes:
    return _MASK * len(found.group())


def _entries(top: Path) -> Iterator[tuple[Path, Path]]:
    """Every entry below `top` with its directory; a directory before what is in it. No link is followed."""
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        for path in sorted(directory.iterdir()):
            yield directory, path
            if path.is_dir() and not path.is_symlink():
                waiting.append(path)


def _data_ranges(fd: int) -> Iterator[tuple[int, int]]:
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole is left
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at
