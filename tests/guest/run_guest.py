"""Run a command under cgroup v2, in a QEMU guest whose root is this host's tree with a layer of memory on top.

    python tests/guest/run_guest.py [--deadline SECONDS] -- COMMAND ARGUMENT...

Its output comes out here, stream by stream, and its exit status is this program's. 125: the guest could not be had,
or ended without a word; 124: the deadline passed. For trusted commands alone: the guest reads all that root can.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from guest_image import GuestKernel, GuestUnavailable, command_script, initrd
from guest_machine import Machine, machine

DEADLINE: Final = 170.0
_TIMED_OUT: Final = 124
_NO_GUEST: Final = 125
_COVERED: Final = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/tmp")
_ENVIRONMENT: Final = {"HOME": "/root", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "FORGEYARD_GUEST": "1"}


def run(argv: list[str], *, deadline: float = DEADLINE) -> int:
    """Boot, run `argv` in the current directory, and return what this program exits with.

    :raises GuestUnavailable: when this machine lacks something.
    """
    end = time.monotonic() + deadline
    here = Path.cwd()
    if any(here.is_relative_to(path) for path in _COVERED):
        raise GuestUnavailable(f"the guest has filesystems of its own at {', '.join(_COVERED)} (start from elsewhere)")
    kernel = GuestKernel.find()
    # Not below a directory that the daemon's view makes read-only: that view is the daemon's alone.
    with tempfile.TemporaryDirectory(prefix="fy-guest-", dir="/var/tmp") as name:
        directory = Path(name)
        image = directory / "initrd"
        image.write_bytes(initrd(kernel, command_script(argv, str(here), _ENVIRONMENT)))
        with machine(kernel.image, image, directory) as guest:
            return _follow(guest, end)


def _follow(guest: Machine, end: float) -> int:
    """Pass the output on until every port is closed, which is when QEMU has ended."""
    outputs = {"stdout": sys.stdout.fileno(), "stderr": sys.stderr.fileno()}
    status = b""
    with selectors.DefaultSelector() as selector:
        for name, port in guest.ports.items():
            selector.register(port, selectors.EVENT_READ, name)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                _say("the deadline has passed; the guest is killed", guest)
                return _TIMED_OUT
            for key, _ in selector.select(left):
                data = _receive(key.fileobj)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.data == "status":
                    status += data
                else:
                    _write(outputs[key.data], data)
    if not status.strip().isdigit():
        _say("the guest ended without a status", guest)
        return _NO_GUEST
    return int(status)


def _receive(port: object) -> bytes:
    assert isinstance(port, socket.socket)
    try:
        return port.recv(1 << 16)
    except ConnectionResetError:  # QEMU ended with bytes of ours unread
        return b""


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _say(what: str, guest: Machine) -> None:
    console = guest.console.read_text(errors="replace") if guest.console.exists() else ""
    print(f"run_guest: {what}", *console.splitlines()[-80:], sep="\nrun_guest: console: ", file=sys.stderr)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run a command under cgroup v2 in a QEMU guest.")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds, boot included")
    parser.add_argument("command", nargs="+", help="put -- in front of it")
    options = parser.parse_args()
    # The usual way out, so that the directory goes too; the processes would end in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(options.command, deadline=options.deadline)
    except GuestUnavailable as error:
        print(f"run_guest: {error}", file=sys.stderr)
        return _NO_GUEST


if __name__ == "__main__":
    raise SystemExit(main())
