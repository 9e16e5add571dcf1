"""Private container daemons: each with its own root, state and socket, and gone with all it made.

Nothing here looks at the machine's own daemons. A daemon dies with the thread that started it; what it leaves behind
(shims, mounts, groups) is found by the name of its directory, which no other has.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from daemon_remains import CGROUPS, end_processes, mounts_below, remove_groups

START = 30.0
"""Seconds that a daemon may take to answer, on a machine that is busy with tests."""
STOP = 15.0
"""Seconds that it may take to end after SIGTERM; then it is killed."""
SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"
# What a daemon allows: this machine's hard limit is below what podman asks for by itself.
NOFILE = 16384
OTHER_CONTAINERD = os.environ.get("FORGEYARD_TEST_CONTAINERD", "")
"""Directory with another containerd and its shim, which the tests then run against: 2.x, in the nightly script."""

_CONTAINERD = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = [{disabled}]
[grpc]
  address = "{socket}"
  uid = 0
  gid = 0
[debug]
  level = "info"
[plugins."io.containerd.internal.v1.opt"]
  path = "{opt}"
"""
_CONTAINERS = """\
[containers]
cgroups = "enabled"
cgroupns = "private"
default_sysctls = []
default_ulimits = ["nofile={nofile}:{nofile}"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
events_logfile_path = "{directory}/events"
lock_type = "file"
runtime = "runc"
static_dir = "{directory}/static"
tmp_dir = "{directory}/tmp"
volume_path = "{directory}/volumes"
[network]
network_backend = "cni"
network_config_dir = "{directory}/networks"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{directory}/root"
runroot = "{directory}/run"
"""


class DaemonError(Exception):
    """A daemon didn't start; the end of its log is in the text."""


class Daemon:
    """One private daemon. As a context manager, or `start` and `close`; `kill` and `start` again are for tests."""

    program: ClassVar[str]
    name: ClassVar[str]

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix=f"fy-{self.name}-", dir="/var/tmp"))
        # Roots of containers with a user namespace are below: others have to walk through.
        self.directory.chmod(0o711)
        self.log = self.directory / "log"
        self.socket = self.directory / f"{self.name}.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """``unix:///…``, as every client takes it."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Of the daemon's own process."""
        return self._running().pid

    def argv(self) -> list[str]:
        """The daemon's command line."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """The daemon's environment: little of ours, and nothing that points at the machine's own daemons."""
        return {"PATH": os.environ.get("PATH", "/usr/bin:/bin") + SBIN, "TMPDIR": str(self._made("scratch"))}

    def answers(self) -> bool:
        """Whether it serves requests."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            probe.connect(str(self.socket))
            return True
        return False

    def start(self) -> Self:
        """Start it, again if it was stopped or killed, and return once it answers.

        :raises DaemonError: with the end of its log.
        """
        self.socket.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.argv()],
                env=self.environment(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Not of a terminal's group: an interrupt ends the tests first, and they end the daemon.
                start_new_session=True,
            )
        deadline = time.monotonic() + START
        while not self.answers():
            if self._ended_within(0.02) or time.monotonic() > deadline:
                self.kill()
                raise DaemonError(f"{self.program} did not start:\n{self.tail()}")
        return self

    def stop(self) -> None:
        """SIGTERM, as an operator restarts it: containers may live on. Repeating it is no error."""
        if self._process is not None:
            self._process.terminate()
            if not self._ended_within(STOP):
                self.kill()
        self._process = None

    def kill(self) -> None:
        """SIGKILL: a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections, and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def tail(self, size: int = 2000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def close(self) -> None:
        """Stop it, end every process that it left, and remove its mounts, groups and files."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        self.stop()
        end_processes(self.directory)
        for target in reversed(mounts_below(self.directory)):
            subprocess.run(["umount", "-l", target], check=True)
        self.remove_groups()
        # Layers of images may hold files without a bit of permission; root doesn't mind.
        shutil.rmtree(self.directory)

    def remove_groups(self) -> None:
        """Remove the control groups that only this daemon can have made."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.program} does not run")
        return self._process

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _made(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return path


class Containerd(Daemon):
    """containerd without its CRI plug-in, unless that is asked for."""

    program = "containerd"
    name = "containerd"

    def __init__(self, directory: Path | None = None, *, cri: bool = False) -> None:
        super().__init__(directory)
        disabled = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs"]
        disabled += ["io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
        if not cri:
            disabled.append("io.containerd.grpc.v1.cri")
        self.config = self.directory / "config.toml"
        self.config.write_text(
            _CONTAINERD.format(
                root=self.directory / "root",
                state=self.directory / "state",
                socket=self.socket,
                opt=self.directory / "opt",
                disabled=", ".join(f'"{name}"' for name in disabled),
            )
        )

    def argv(self) -> list[str]:
        return [self.program, "--config", str(self.config)]

    def ctr(self, *arguments: str, namespace: str = "forgeyard") -> list[str]:
        """The command line of `ctr` at this daemon."""
        return ["ctr", "--address", str(self.socket), "--namespace", namespace, *arguments]


class TestedContainerd(Containerd):
    """The machine's, or the one that the environment names. dockerd stays on the machine's."""

    __test__ = False
    program = f"{OTHER_CONTAINERD}/containerd" if OTHER_CONTAINERD else "containerd"

    def environment(self) -> dict[str, str]:
        """With the shim of the same version in front."""
        base = super().environment()
        return {**base, "PATH": f"{OTHER_CONTAINERD}:{base['PATH']}"} if OTHER_CONTAINERD else base


class Dockerd(Daemon):
    """dockerd on a containerd of its own, without a bridge or a rule in any firewall.

    :param options: more of its command line, such as ``--live-restore``.
    """

    program = "dockerd"
    name = "dockerd"

    def __init__(self, directory: Path | None = None, *, options: tuple[str, ...] = ()) -> None:
        super().__init__(directory)
        self.containerd = Containerd(self._made("containerd"))
        self.options = options
        self.parent = f"/{self.directory.name}"

    def argv(self) -> list[str]:
        at = self.directory
        config = at / "daemon.json"
        config.write_text("{}")
        flags = ["--config-file", str(config), "--host", self.address, "--containerd", str(self.containerd.socket)]
        flags += ["--data-root", str(at / "data"), "--exec-root", str(at / "exec"), "--pidfile", str(at / "pid")]
        flags += ["--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", self.parent, "--group", "root"]
        flags += ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        flags += ["--userland-proxy=false", "--insecure-registry", "127.0.0.0/8"]
        return [self.program, *flags, *self.options]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "HOME": str(self._made("home")), "DOCKER_TMPDIR": str(self._made("scratch"))}

    def answers(self) -> bool:
        return http_ping(self.socket)

    def start(self) -> Self:
        if not self.containerd.answers():
            self.containerd.start()
        return super().start()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        self.stop()
        self.containerd.stop()
        super().close()

    def remove_groups(self) -> None:
        remove_groups(self.parent)

    def docker(self, *arguments: str) -> list[str]:
        """The command line of Debian's `docker` at this daemon: another one may come first in PATH."""
        return ["/usr/bin/docker", "--host", self.address, *arguments]


class PodmanService(Daemon):
    """Podman's service on a socket, with storage, locks, events and networks of its own."""

    program = "podman"
    name = "podman"

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        self._had_parent = (CGROUPS / "memory/libpod_parent").exists()
        self.containers_conf = self.directory / "containers.conf"
        self.containers_conf.write_text(_CONTAINERS.format(directory=self.directory, nofile=NOFILE))
        self.storage_conf = self.directory / "storage.conf"
        self.storage_conf.write_text(_STORAGE.format(directory=self.directory))
        self.registries_conf = self.directory / "registries.conf"
        self.registries_conf.write_text('unqualified-search-registries = []\n[[registry]]\nlocation = "localhost"\n')
        for name in ("networks", "static", "tmp", "volumes"):
            self._made(name)

    def argv(self) -> list[str]:
        return self.podman("system", "service", "--time", "0", self.address)

    def podman(self, *arguments: str) -> list[str]:
        """The command line of `podman` on the same storage; run it with `environment`."""
        at = self.directory
        flags = ["--root", str(at / "root"), "--runroot", str(at / "run"), "--tmpdir", str(at / "tmp")]
        flags += ["--cgroup-manager", "cgroupfs", "--network-config-dir", str(at / "networks")]
        return [self.program, *flags, *arguments]

    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "HOME": str(self._made("home")),
            "XDG_RUNTIME_DIR": str(self._made("runtime")),
            "CONTAINERS_CONF": str(self.containers_conf),
            "CONTAINERS_STORAGE_CONF": str(self.storage_conf),
            "CONTAINERS_REGISTRIES_CONF": str(self.registries_conf),
        }

    def answers(self) -> bool:
        return http_ping(self.socket)

    def remove_groups(self) -> None:
        # Podman has one name for the parent of what names no other; one that was there before is somebody else's.
        if not self._had_parent:
            remove_groups("/libpod_parent")


DAEMONS: dict[str, type[Daemon]] = {kind.name: kind for kind in (TestedContainerd, Dockerd, PodmanService)}


def installed(name: str) -> bool:
    """Whether the daemon called `name` can be started on this machine."""
    needs = {"containerd": ["containerd"], "dockerd": ["dockerd", "containerd"], "podman": ["podman", "conmon"]}
    return all(shutil.which(program, path=os.environ.get("PATH", "") + SBIN) for program in needs[name])


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=1)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def http_ping(path: Path) -> bool:
    """Whether the engine at a socket answers ``GET /_ping``."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/_ping")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        if connection.sock is not None:
            connection.sock.close()
