"""docker and podman as the network benchmark uses them: private daemons, and the same two jobs with each."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/images"), str(ROOT / "tests/support")]

from daemons import Dockerd, PodmanService, installed  # noqa: E402  # it lies with the tests
from image_catalog import image  # noqa: E402  # as above

READY = 60.0
"""Seconds that a Redis may take."""
PING = r"printf 'PING\r\n' | nc -w 5 {} 6379 | grep -q PONG"
RUNC = """#!/bin/sh
previous= file=
for word; do
    case $previous in
        --bundle) file=$word/config.json ;;
        --process) file=$word ;;
    esac
    previous=$word
done
[ -z "$file" ] || sed -i 's/:1048576/:{nofile}/g; s/:4194304/:{nproc}/g' "$file"
exec runc "$@"
"""


class Peer:
    """A daemon's command line, and the same two jobs with it."""

    name: str

    def __init__(self, command: Callable[..., list[str]], environment: dict[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._serial = 0

    def load(self, archives: Sequence[Path]) -> None:
        """Take images from archives."""
        for archive in archives:
            words = self._command("load", "-i", str(archive))
            subprocess.run(
                words, env=self._environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def fresh(self) -> str:
        """A name that nothing has yet."""
        self._serial += 1
        return f"fybench{os.getpid()}-{self._serial}"

    async def do(self, *words: str, may_fail: bool = False) -> bool:
        """Run a command; whether it succeeded."""
        process = await asyncio.create_subprocess_exec(
            *self._command(*words),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0 and not may_fail:
            raise SystemExit(f"{self.name} {' '.join(words)} failed:\n{output.decode(errors='replace')[-2000:]}")
        return process.returncode == 0

    async def ready(self, container: str) -> None:
        """Until the container's Redis answers."""
        async with asyncio.timeout(READY):
            while not await self.do("exec", container, "redis-cli", "ping", may_fail=True):
                pass


class Docker(Peer):
    """docker with a network for each job."""

    name = "docker"

    async def network(self) -> None:
        """`docker run` on its own network."""
        name = self.fresh()
        await self.do("network", "create", name)
        await self.do("run", "--rm", "--network", name, "busybox", "true")
        await self.do("network", "rm", name)

    async def service(self) -> None:
        """What compose does for one service and one run."""
        name = self.fresh()
        await self.do("network", "create", name)
        await self.do("run", "-d", "--name", name, "--network", name, "--network-alias", "redis", "redis")
        await self.ready(name)
        await self.do("run", "--rm", "--network", name, "busybox", "sh", "-c", PING.format("redis"))
        await self.do("rm", "-f", "-v", name)
        await self.do("network", "rm", name)


class Podman(Peer):
    """podman with a pod for each job."""

    name = "podman"

    async def network(self) -> None:
        """A run in a pod of its own."""
        name = self.fresh()
        await self.do("pod", "create", "--name", name)
        await self.do("run", "--rm", "--pod", name, "busybox", "true")
        await self.do("pod", "rm", "-f", name)

    async def service(self) -> None:
        """A pod with a Redis, and a run in it."""
        name = self.fresh()
        await self.do("pod", "create", "--name", name)
        await self.do("run", "-d", "--name", f"{name}-redis", "--pod", name, "redis")
        await self.ready(f"{name}-redis")
        await self.do("run", "--rm", "--pod", name, "busybox", "sh", "-c", PING.format("127.0.0.1"))
        await self.do("pod", "rm", "-f", name)


def bounded_runtime(directory: Path) -> Path:
    """runc, for podman: a pod's own container asks for limits that this process can't give. Takes 2 ms more."""
    nofile, nproc = (resource.getrlimit(which)[1] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    path = directory / "runc"
    path.write_text(RUNC.format(nofile=nofile, nproc=nproc))
    path.chmod(0o755)
    return path


# The layout of busybox has several images, that of redis has one, without a name.
LAYOUT_TAGS = {"busybox": ":latest", "redis": ""}


def archives(directory: Path, names: Sequence[str] = tuple(LAYOUT_TAGS)) -> list[Path]:
    """The images as docker and podman load them."""
    found = []
    for name in names:
        target = directory / f"{name}.tar"
        source = f"oci:{image(name)[0]}{LAYOUT_TAGS[name]}"
        subprocess.run(["skopeo", "copy", "-q", source, f"docker-archive:{target}:{name}:latest"], check=True)
        found.append(target)
    return found


def peers(stack: ExitStack, directory: Path, without: Sequence[str]) -> list[Docker | Podman]:
    """Those that are installed and wanted, with the images loaded."""
    made: list[Docker | Podman] = []
    if "docker" not in without and installed("dockerd"):
        # As it comes: with its rules in the firewall, which here is the namespace's.
        options = ("--iptables=true", "--ip-forward=true", "--ip-masq=true")
        dockerd = stack.enter_context(Dockerd(options=options))
        made.append(Docker(dockerd.docker, dockerd.environment()))
    if "podman" not in without and installed("podman"):
        podman = stack.enter_context(PodmanService())
        made.append(Podman(partial(podman.podman, "--runtime", str(bounded_runtime(directory))), podman.environment()))
    for name in {"docker", "podman"} - {peer.name for peer in made}:
        print(f"without {name}: it is not installed, or was left out", flush=True)
    files = archives(directory) if made else []
    for peer in made:
        peer.load(files)
    return made
