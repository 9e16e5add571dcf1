"""What a daemon's directory still has on the machine when its daemon is gone: processes, mounts, control groups."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
END = 15.0
"""Seconds that killed processes may take to be gone."""


def end_processes(directory: Path) -> None:
    """Kill every process that belongs to a daemon's directory, and wait until it is gone."""
    deadline = time.monotonic() + END
    while found := list(processes_of(directory)):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {directory} survive SIGKILL: {found}")
        # They are nobody's children here; nothing announces their end.
        time.sleep(0.02)


def processes_of(directory: Path) -> Iterator[int]:
    """Shims, monitors and helpers by their command line; containers by their mounts."""
    mark = str(directory).encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            proc = Path("/proc", entry)
            if mark in proc.joinpath("cmdline").read_bytes() or _contained_by(proc, mark.rpartition(b"/")[2]):
                yield int(entry)


def _contained_by(proc: Path, name: bytes) -> bool:
    """Whether a process lives on mounts made of the directory's files, as only its containers do."""
    if os.readlink(proc / "ns/mnt") == os.readlink("/proc/self/ns/mnt"):
        return False
    # The root's line says where its files are: a bind's root, or an overlay's upper directory.
    root = [line for line in proc.joinpath("mountinfo").read_bytes().splitlines() if line.split()[4] == b"/"]
    return any(name in line for line in root)


def mounts_below(path: Path) -> list[str]:
    """Mount points below `path`, outermost first."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    points = (line.split()[4].replace("\\040", " ") for line in lines)
    return [point for point in points if point.startswith(f"{path}/")]


def remove_groups(parent: str) -> None:
    """Remove a control group and those below it in every hierarchy; one that has processes is left alone."""
    for hierarchy in (CGROUPS, *filter(Path.is_dir, CGROUPS.iterdir())):
        top = hierarchy / parent.strip("/")
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
