"""What a server tells its service manager, and what it takes out of its environment."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import pytest

from forgeyard_api.serve.service_manager import ServiceManager


def test_the_environment_is_left_without_it() -> None:
    """What a runtime inherits names no manager: runc would mount its socket into containers."""
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    assert ServiceManager.taken(environ) == ServiceManager("/x", 2.0)
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "2000000"},
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"},
    ],
)
def test_a_watchdog_that_is_not_ours(environ: dict[str, str]) -> None:
    """Of another process, of nobody, or not a number: there is none."""
    assert ServiceManager.taken(dict(environ)).watchdog == 0.0


@pytest.mark.parametrize("abstract", [False, True])
def test_messages(abstract: bool, tmp_path: Path) -> None:
    """As sd_notify(3) has them, at a path or an abstract address."""
    address = f"@forgeyard-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(60)
        told = ServiceManager(address)
        told.ready()
        assert manager.recv(100) == b"READY=1"
        told.reloading()
        first, second = manager.recv(100).splitlines()
        assert (first, second.partition(b"=")[0]) == (b"RELOADING=1", b"MONOTONIC_USEC")
        told.stopping(1.5)
        assert manager.recv(100) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000"
        told.status("draining")
        assert manager.recv(100) == b"STATUS=draining"


def test_a_manager_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Is said in the log, and is no reason to end; without one there is nothing to say."""
    with caplog.at_level(logging.WARNING, "forgeyard.serve"):
        ServiceManager(str(tmp_path / "none")).ready()
        ServiceManager().ready()
    assert len(caplog.records) == 1
    assert "READY=1" in caplog.text


def test_without_a_watchdog_nobody_beats() -> None:
    """It ends at once."""
    asyncio.run(asyncio.wait_for(ServiceManager("/x").beat(), 60))
