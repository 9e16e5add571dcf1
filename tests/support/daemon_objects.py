"""Everything that a private daemon has, to compare before and after: objects, processes, mounts, control groups."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from pathlib import Path

from daemon_remains import CGROUPS, mounts_below, processes_of
from daemons import Containerd, Daemon, Dockerd, PodmanService

_WAIT = 15.0
"""Seconds that a daemon's helpers may take to end after the container that they were for."""
_CONTAINERD = (
    ("containers", "ls", "-q"),
    ("tasks", "ls", "-q"),
    ("snapshots", "ls"),
    ("leases", "ls", "-q"),
    ("images", "ls", "-q"),
    ("content", "ls", "-q"),
)
_PODMAN = (
    ("ps", "--all", "--external", "--quiet"),
    ("pod", "ps", "--quiet"),
    ("images", "--all", "--quiet", "--no-trunc"),
    ("volume", "ls", "--quiet"),
    ("network", "ls", "--quiet"),
)
_DOCKER = (
    ("ps", "--all", "--quiet"),
    ("images", "--all", "--quiet", "--no-trunc"),
    ("volume", "ls", "--quiet"),
    ("network", "ls", "--quiet"),
)


def seen(daemon: Daemon) -> dict[str, Counter[str]]:
    """All of it, by what it is."""
    found = {" ".join(words): Counter(_say(daemon, argv).split()) for words, argv in _questions(daemon)}
    found["processes"] = Counter(filter(None, map(_program, processes_of(daemon.directory))))
    found["mounts"] = Counter(mounts_below(daemon.directory))
    found["namespaces held"] = Counter(_namespaces_held(daemon.pid))
    return found


def assert_as_before(daemon: Daemon, before: dict[str, Counter[str]]) -> None:
    """Nothing more than there was, once its helpers have ended."""
    deadline = time.monotonic() + _WAIT
    while extra := {what: more for what, now in seen(daemon).items() if (more := now - before[what])}:
        assert time.monotonic() < deadline, f"left at {daemon.name}: {extra}"
        # Nothing announces the end of a shim or a monitor.
        time.sleep(0.05)


def groups_of(names: set[str]) -> list[str]:
    """Control groups, in every hierarchy, that have one of `names` in their own."""
    return [
        f"{root}/{group}"
        for root, groups, _ in os.walk(CGROUPS)
        for group in groups
        if any(name in group for name in names)
    ]


def _questions(daemon: Daemon) -> list[tuple[tuple[str, ...], list[str]]]:
    if isinstance(daemon, Containerd):
        return [(words, daemon.ctr(*words)) for words in _CONTAINERD]
    if isinstance(daemon, PodmanService):
        return [(words, daemon.podman(*words)) for words in _PODMAN]
    assert isinstance(daemon, Dockerd)
    asked = [(words, daemon.docker(*words)) for words in _DOCKER]
    below = [(words, daemon.containerd.ctr(*words, namespace="moby")) for words in _CONTAINERD]
    return asked + below


def _say(daemon: Daemon, argv: list[str]) -> str:
    done = subprocess.run(
        argv,
        env=daemon.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout


def _program(pid: int) -> str:
    """Its name; empty for one that has ended, or that is only waiting for its parent to look."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    name, state = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2]
    return "" if state in "ZX" else name


def _namespaces_held(pid: int) -> list[str]:
    """By descriptor: kind of namespace, one for each."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # it is at work
        if target.partition(":[")[0] in ("net", "mnt", "user", "pid"):
            found.append(target.partition(":[")[0])
    return found
