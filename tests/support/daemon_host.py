"""One of each daemon for a whole test run, started when the first test asks for it.

They are started and stopped in the process that controls the run. Workers of xdist ask it by a socket, so that a
run without such tests starts nothing, and the end of a worker ends no daemon.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from daemons import DAEMONS, START, Daemon, DaemonError

_ANSWER = 1 << 16


class DaemonHost:
    """Starts daemons on request. `address` is for `ask`, in this process or another."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fy-daemons-", dir="/var/tmp"))
        self.address = str(self._directory / "ask")
        self._started: dict[str, Daemon] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(self.address)
        self._server.listen(16)
        # A daemon dies with the thread that started it, so one thread starts all and lives as long as the run.
        self._thread = threading.Thread(target=self._serve, name="daemon-host", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every daemon, and what it left."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        shutil.rmtree(self._directory)

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    peer = self._server.accept()[0]
                except OSError:
                    # Shut down: the run is over.
                    return
                with peer, contextlib.suppress(OSError):
                    peer.send(self._answer(peer.recv(_ANSWER).decode(), stack).encode())

    def _answer(self, name: str, stack: contextlib.ExitStack) -> str:
        """The directory of the daemon called `name`, or what it said instead of starting, after a ``!``."""
        try:
            if name not in self._started:
                self._started[name] = stack.enter_context(DAEMONS[name]())
        except DaemonError as error:
            return f"!{error}"
        return str(self._started[name].directory)


def ask(address: str, name: str) -> Daemon:
    """The daemon of this run called `name`: its socket, configuration and command lines.

    It belongs to the run: use it, don't stop it.

    :raises DaemonError: it didn't start.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(3 * START)
        client.connect(address)
        client.send(name.encode())
        answer = client.recv(_ANSWER).decode()
    if not answer or answer.startswith("!"):
        raise DaemonError(answer[1:] or f"{name}: the run ends")
    return DAEMONS[name](Path(answer))
