"""A minimal real sandbox for tests of the shim: runc, a user namespace, the host's /usr read-only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from forgeyard_model.errors import ExecutorError
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.build import build
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.protocol import Exited, NoExec, StepCommand

UID_BASE = 1_700_000_000
JOB_UID = 1000
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
NAMESPACES = ("pid", "ipc", "uts", "mount", "network", "user", "cgroup")


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def config(rootfs: Path, control: Path, argv: tuple[str, ...], memory: int | None) -> dict[str, Any]:
    """config.json of the sandbox."""
    mapping = [{"containerID": 0, "hostID": UID_BASE, "size": 65536}]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": JOB_UID, "gid": JOB_UID},
            "args": list(argv),
            "env": ["SHIM_ENV=only-for-the-shim"],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs), "readonly": True},
        "hostname": "shim-test",
        "mounts": [
            _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755", "size=64k"),
            _mount("/tmp", "tmpfs", "tmpfs", "nosuid", "nodev", "mode=1777"),
            _mount("/usr", "bind", "/usr", "rbind", "ro"),
            _mount("/.forgeyard", "bind", str(control), "bind", "ro"),
        ],
        "linux": {
            "namespaces": [{"type": name} for name in NAMESPACES],
            "uidMappings": mapping,
            "gidMappings": mapping,
            "resources": {"memory": {"limit": memory}} if memory else {},
        },
    }


class Sandbox:
    """One container with the shim as PID 1, and what came out of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.control = directory / "ctl"
        self.out = bytearray()
        self.err = bytearray()
        self.step_id = 0
        self.runc: subprocess.Popen[bytes]
        self.channel: ShimChannel

    def lay_out(self, argv: tuple[str, ...], memory: int | None = None) -> None:
        """Make the directories and config.json."""
        rootfs = self.directory / "rootfs"
        for path in (self.directory, self.control, rootfs):
            path.mkdir(exist_ok=True)
            path.chmod(0o711)
        rootfs.chmod(0o755)
        for name in ("proc", "dev", "tmp", "usr", ".forgeyard"):
            (rootfs / name).mkdir()
        (rootfs / "tmp").chmod(0o1777)
        for name in LINKS:
            if Path("/", name).is_symlink():
                (rootfs / name).symlink_to(f"usr/{name}")
        text = json.dumps(config(rootfs, self.control, argv, memory))
        (self.directory / "config.json").write_text(text)

    def run(self, **streams: Any) -> None:
        """Start runc in the foreground; it ends when the shim does."""
        name = f"shim-test-{uuid.uuid4().hex[:12]}"
        self.runc = subprocess.Popen(
            ["runc", "--root", str(self.directory / "runc"), "run", "-b", str(self.directory), name], **streams
        )

    async def start(self, *, probes: bool = False) -> None:
        """Open the channel and bring the shim up to its open gate."""
        build()
        self.channel = ShimChannel.create(
            self.control, shim=shim_binary(), uid=UID_BASE + JOB_UID, gid=UID_BASE + JOB_UID, probes=probes
        )
        self.run(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            await self.channel.hello(timeout=60)
        except ExecutorError as error:
            self.runc.kill()
            said = self.runc.communicate()[0]
            raise AssertionError(f"the sandbox did not start: {said!r}") from error
        self.channel.unlink()
        loop = asyncio.get_running_loop()
        self.fds = self.channel.take_output()
        for fd, kept in zip(self.fds, (self.out, self.err), strict=True):
            loop.add_reader(fd, self.drain, fd, kept)
        self.channel.release()

    @staticmethod
    def drain(fd: int, kept: bytearray) -> None:
        """Take what a pipe holds."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 1 << 18):
                kept += data

    def command(self, *argv: str, **more: Any) -> StepCommand:
        """A step with the next id."""
        self.step_id += 1
        return StepCommand(self.step_id, argv, **{"env": ENV, "cwd": "/tmp", **more})

    async def step(self, *argv: str, **more: Any) -> Exited | NoExec:
        """Run a step; its output up to its end is in `out` and `err` afterwards."""
        end = await self.channel.run_step(self.command(*argv, **more))
        for fd, kept in zip(self.fds, (self.out, self.err), strict=True):
            self.drain(fd, kept)
        return end

    async def sh(self, script: str, **more: Any) -> Exited:
        """Run a shell script as a step that must get a process."""
        end = await self.step("/bin/sh", "-c", script, **more)
        assert isinstance(end, Exited), end
        return end

    async def python(self, source: str, **more: Any) -> Exited:
        """Run Python source as a step."""
        end = await self.step("/usr/bin/python3", "-c", source, **more)
        assert isinstance(end, Exited), end
        return end

    def take_out(self) -> bytes:
        """Standard output since the last call."""
        taken = bytes(self.out)
        self.out.clear()
        return taken

    def init_pid(self) -> int:
        """The shim's pid as the host has it: the child of this sandbox's runc."""
        children = Path(f"/proc/{self.runc.pid}/task").glob("*/children")
        return int(next(text for file in children if (text := file.read_text().strip())).split()[0])

    def signal_init(self, signum: int) -> None:
        """Signal PID 1 from outside its namespace."""
        os.kill(self.init_pid(), signum)

    async def wait_runc(self) -> int:
        """Exit code of runc, once the container is gone."""
        return await asyncio.to_thread(self.runc.wait, 20)

    def dispose(self) -> None:
        """End the container and remove everything."""
        if hasattr(self, "channel"):
            for fd in getattr(self, "fds", ()):
                asyncio.get_running_loop().remove_reader(fd)
                os.close(fd)
            self.channel.close()
        if hasattr(self, "runc"):
            try:
                self.runc.wait(10)
            except subprocess.TimeoutExpired:
                self.runc.kill()
                self.runc.wait()
            if self.runc.stdout:
                self.runc.stdout.close()
        shutil.rmtree(self.directory)


@contextlib.asynccontextmanager
async def sandbox(memory: int | None = None, *, probes: bool = False) -> AsyncIterator[Sandbox]:
    """A running sandbox whose gate is open."""
    made = Sandbox(Path(tempfile.mkdtemp(prefix="fy-shim-", dir="/var/tmp")))
    try:
        made.lay_out(ShimChannel.argv, memory)
        await made.start(probes=probes)
        yield made
    finally:
        made.dispose()
