"""Reading and writing the small files of a control group. A missing file or controller is None, never 0."""

# ruff: noqa: PTH116  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

_UNLIMITED: Final = 1 << 62
"""v1 writes "no limit" as the largest multiple of a page below 2^63."""


def read(path: str) -> str | None:
    """The file's text; None when the file, its group or its controller is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := os.read(fd, 1 << 14):
                parts.append(part)
        finally:
            os.close(fd)
    except OSError:  # ENOENT, and ENODEV for a group removed meanwhile, ENOTSUP for a switched-off controller
        return None
    return b"".join(parts).decode(errors="replace")


def write(path: str, value: str) -> None:
    """Write `value` with a single call, as the kernel wants it."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def number(path: str) -> int | None:
    """A single number."""
    return _integer(read(path))


def limit(path: str) -> int | None:
    """A limit; None also for "max" and for v1's way to say so."""
    value = number(path)
    return None if value is None or value >= _UNLIMITED else value


def keyed(path: str) -> dict[str, int]:
    """Lines of "key value"; empty when the file is missing."""
    pairs = (line.split(None, 1) for line in (read(path) or "").splitlines())
    return {pair[0]: value for pair in pairs if len(pair) == 2 and (value := _integer(pair[1])) is not None}


def nested(path: str) -> dict[str, int]:
    """Lines of "device key=value ...", summed over the devices."""
    sums: dict[str, int] = {}
    for line in (read(path) or "").splitlines():
        for word in line.split():
            key, equals, text = word.partition("=")
            value = _integer(text)
            if equals and value is not None:
                sums[key] = sums.get(key, 0) + value
    return sums


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def groups_below(path: str) -> Iterator[str]:
    """The group at `path` and all nested in it, children before parents; nothing when it does not exist."""
    try:
        # A group's link count is 2 plus its children, which saves listing the dozens of files of the usual leaf.
        children = os.stat(path).st_nlink > 2
        entries = os.scandir(path) if children else None
    except FileNotFoundError:
        return
    if entries is not None:
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from groups_below(entry.path)
    yield path


def processes(path: str) -> list[int]:
    """Processes in this very group, as pids of ours."""
    return [int(line) for line in (read(f"{path}/cgroup.procs") or "").split() if line != "0"]
