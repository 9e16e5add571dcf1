"""Daemons whose OCI runtime can be told, before each container, in which of `weakenings` it does less than its bundle.

What is weakened next stands in a file beside the runtime, so that one daemon serves many tests.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from daemons import SBIN, Containerd, Dockerd, PodmanService

# Stands in for runc: edits config.json before the container is made, and runs the real one.
_PROGRAM: Final = """#!{python} -IS
import json, os, sys

sys.path.insert(0, {support!r})
from weakenings import WEAKENINGS

there, real = {directory!r}, {real!r}
words = sys.argv[1:]
with open(there + "/kind") as file:
    kind = file.read()
if kind and "--bundle" in words:
    path = words[words.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    WEAKENINGS[kind](spec)
    with open(path, "w") as file:
        json.dump(spec, file)
    with open(there + "/applied", "w") as file:
        file.write(kind)
os.execv(real, [real, *words])
"""


class WeakRuntime:
    """The program, in `directory`, which goes first in a PATH. It does as it is told until `leave_out`.

    :param real: what it runs; this machine's runc by default.
    """

    def __init__(self, directory: Path, real: str = "") -> None:
        self._directory = directory
        self.program = directory / "runc"
        self.leave_out("")
        real = real or shutil.which("runc", path=os.environ.get("PATH", "") + SBIN) or ""
        support = str(Path(__file__).parent)
        self.program.write_text(
            _PROGRAM.format(python=sys.executable, support=support, directory=str(directory), real=real)
        )
        self.program.chmod(0o755)

    def leave_out(self, what: str) -> None:
        """From the next container on: one of `weakenings.WEAKENINGS`, or nothing."""
        new = self._directory / "kind.new"
        new.write_text(what)
        new.replace(self._directory / "kind")

    @contextmanager
    def weakening(self, kind: str) -> Iterator[None]:
        """Containers that are made within the block are weakened, and one of them has to be made."""
        applied = self._directory / "applied"
        applied.unlink(missing_ok=True)
        self.leave_out(kind)
        try:
            yield
        finally:
            self.leave_out("")
        assert applied.read_text() == kind

    def first(self, environment: dict[str, str]) -> dict[str, str]:
        """`environment` with the program's directory first in PATH."""
        return {**environment, "PATH": f"{self.program.parent}:{environment.get('PATH', os.defpath)}"}


class WeakContainerd(Containerd):
    """containerd whose shims find the weak runtime."""

    weak: WeakRuntime

    def environment(self) -> dict[str, str]:
        """With the runtime first."""
        return self.weak.first(super().environment())


class WeakDockerd(Dockerd):
    """dockerd whose containerd's shims find the weak runtime."""

    def __init__(self, weak: WeakRuntime) -> None:
        super().__init__()
        self.containerd = WeakContainerd(self.containerd.directory)
        self.containerd.weak = weak


class WeakPodman(PodmanService):
    """Podman whose runc is the weak one."""

    def __init__(self, weak: WeakRuntime) -> None:
        super().__init__()
        runtimes = f'[engine.runtimes]\nrunc = ["{weak.program}"]\n'
        self.containers_conf.write_text(f"{self.containers_conf.read_text()}{runtimes}")


def weak_daemon(name: str, weak: WeakRuntime) -> Any:
    """A private daemon, not started, that the adapter `name` talks to."""
    if name == "docker":
        return WeakDockerd(weak)
    if name == "podman":
        return WeakPodman(weak)
    daemon = WeakContainerd()
    daemon.weak = weak
    return daemon
