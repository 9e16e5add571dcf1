"""Each daemon's own command line, doing what a job does: in one `run --rm`, and step by step."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from network_peers import Peer, image

# isort: split
from daemons import Containerd, Daemon, Dockerd, PodmanService  # found by what network_peers did to sys.path

IMAGE = "busybox"
# PID 1 ends without a pause once the other process has: the pipe is closed by its exit, not before. Within awk because
# ctr takes every word that begins with a dash for its own.
HOLD = """BEGIN { system("mkfifo /tmp/end; cat /tmp/end") }"""
END = "until [ -p /tmp/end ]; do :; done; exec 3>/tmp/end; true"


def busybox() -> str:
    """The image as our jobs name it."""
    path, digest = image(IMAGE)
    return f"oci:{path}@{digest}"


class Cli(Peer):
    """A command line that has docker's words. Without a network, as the job is.

    podman by itself asks for more files and processes than a host's hard limits may allow, and then does not start.
    """

    def __init__(self, name: str, daemon: Dockerd | PodmanService) -> None:
        super().__init__(daemon.docker if isinstance(daemon, Dockerd) else daemon.podman, daemon.environment())
        self.name = name
        limits = ("nofile=4096:4096", "nproc=4096:4096") if name == "podman" else ()
        self._options = ["--network", "none", *(word for limit in limits for word in ("--ulimit", limit))]

    async def run(self) -> None:
        """One foreground `run --rm`."""
        await self.do("run", "--rm", *self._options, IMAGE, "true")

    async def steps(self) -> None:
        """`create`, `start`, `exec`, `wait`, `rm`."""
        name = self.fresh()
        await self.do("create", "--name", name, *self._options, IMAGE, "awk", HOLD)
        await self.do("start", name)
        await self.do("exec", name, "sh", "-c", END)
        await self.do("wait", name)
        await self.do("rm", name)


class Ctr(Peer):
    """ctr, with the filter that docker and podman have by themselves."""

    name = "ctr"
    reference = f"docker.io/library/{IMAGE}:latest"

    def __init__(self, daemon: Containerd) -> None:
        super().__init__(lambda *words: daemon.ctr(*words, namespace="bench"), daemon.environment())

    async def run(self) -> None:
        """One foreground `run --rm`."""
        await self.do("run", "--rm", "--seccomp", self.reference, self.fresh(), "true")

    async def steps(self) -> None:
        """The same, in ctr's words: its `attach` is what waits."""
        name = self.fresh()
        await self.do("containers", "create", "--seccomp", self.reference, name, "awk", HOLD)
        await self.do("tasks", "start", "--detach", "--null-io", name)
        await self.do("tasks", "exec", "--exec-id", "step", name, "sh", "-c", END)
        await self.do("tasks", "attach", name)
        await self.do("containers", "rm", name)

    def load(self, archives: Sequence[Path]) -> None:
        """Import images from archives."""
        for archive in archives:
            subprocess.run(self._command("images", "import", str(archive)), check=True, stdout=subprocess.DEVNULL)


def peer_of(daemon: Daemon) -> Cli | Ctr:
    """The command line at `daemon`."""
    if isinstance(daemon, Containerd):
        return Ctr(daemon)
    assert isinstance(daemon, Dockerd | PodmanService)
    return Cli("docker" if isinstance(daemon, Dockerd) else "podman", daemon)
