"""The private daemons that the tests start: they answer, survive a crash, and leave nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from daemon_remains import CGROUPS
from daemons import DAEMONS, Containerd, Daemon, DaemonError, Dockerd, PodmanService


@pytest.mark.kernel
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.daemon(name)) for name in DAEMONS])
def test_daemon_comes_back_and_leaves_nothing(name: str) -> None:
    """A daemon that was killed starts again on the same state, and its directory is gone at the end."""
    with DAEMONS[name]() as daemon:
        first = daemon.pid
        daemon.kill()
        assert not daemon.answers()
        daemon.start()
        assert daemon.answers()
        assert daemon.pid != first
        assert not [entry for entry in CGROUPS.glob(f"*/{daemon.directory.name}") if (entry / "tasks").read_text()]
    assert not daemon.directory.exists()
    assert not list(CGROUPS.glob(f"*/{daemon.directory.name}"))
    assert not [pid for pid in _pids() if daemon.directory.name in _command(pid)]


@pytest.mark.kernel
@pytest.mark.daemon("containerd")
def test_daemon_of_the_run(containerd: Containerd) -> None:
    """The containerd of the run answers its own command line."""
    done = subprocess.run(containerd.ctr("version"), capture_output=True, text=True, check=True)
    assert "Server" in done.stdout


@pytest.mark.kernel
@pytest.mark.daemon("dockerd")
def test_dockerd_of_the_run(dockerd: Dockerd) -> None:
    """The dockerd of the run answers, uses cgroupfs and has no bridge."""
    command = dockerd.docker("info", "--format", "{{.CgroupDriver}}")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "cgroupfs"
    command = dockerd.docker("network", "ls", "--format", "{{.Driver}}")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["host", "null"]


@pytest.mark.kernel
@pytest.mark.daemon("podman")
def test_podman_of_the_run(podman_service: PodmanService) -> None:
    """The podman of the run keeps its containers, locks and events to itself."""
    command = podman_service.podman("info", "--format", "{{.Store.GraphRoot}} {{.Host.EventLogger}}")
    done = subprocess.run(command, env=podman_service.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{podman_service.directory}/root", "file"]


@pytest.mark.kernel
@pytest.mark.daemon("containerd")
def test_daemon_that_cannot_start() -> None:
    """A daemon that ends instead of answering says why, and its directory is gone."""
    daemon = Containerd()
    daemon.config.write_text("version = nonsense")
    with pytest.raises(DaemonError, match="did not start"), daemon:
        pass
    assert not daemon.directory.exists()


def test_daemons_have_directories_of_their_own() -> None:
    """Two daemons of a kind share nothing, the name of the default control group least of all."""
    first, second = Dockerd(), Dockerd()
    try:
        assert first.parent != second.parent
        assert first.socket != second.socket
        assert isinstance(first.containerd, Daemon)
    finally:
        first.close()
        second.close()


def _pids() -> list[str]:
    return [entry for entry in os.listdir("/proc") if entry.isdigit()]


def _command(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""
