"""What goes wrong between an executor and a daemon: a small disk below it, and a socket that somebody cuts."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

_PATIENCE = 10
"""Seconds for somebody who has connected to say something."""
Cut = Literal["clean", "reset", "unanswered"]
"""Clean: what was asked is read, and then the stream ends. Reset: it is never read, which is ECONNRESET. Unanswered:
the daemon is asked, and its answer is dropped."""


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A directory for a daemon on a disk of its own, that can be filled. Close the daemon first."""
    disk = Path(tempfile.mkdtemp(prefix="fy-disk-", dir="/var/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=711", "fy-disk", disk], check=True)
    try:
        # Its name is what a daemon's leftovers are found by, and no other's.
        own = Path(tempfile.mkdtemp(prefix="fy-", dir=disk))
        yield own
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
        disk.rmdir()


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[None]:
    """The disk of `directory` without a byte to spare."""
    ballast = directory.parent / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        for piece in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), b"\0" * piece)
    try:
        assert shutil.disk_usage(directory).free < 1 << 12
        yield
    finally:
        ballast.unlink()


class CutSocket:
    """Stands before a daemon's socket and passes everything on, until it is told to cut. Close it at the end."""

    def __init__(self, target: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fy-cut-", dir="/var/tmp"))
        self.path = self.directory / "cut.sock"
        self._target = target
        self._how: Cut | None = None
        self._cuts = 0
        self._guard = threading.Condition()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._spawn(self._accept)

    @property
    def address(self) -> str:
        """``unix:///…``."""
        return f"unix://{self.path}"

    def cut(self, how: Cut) -> None:
        """End all connections, and from now on every new one once something was asked on it."""
        with self._guard:
            self._how = how
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Pass on again what comes from now on."""
        with self._guard:
            self._how = None

    def wait_cut(self, seconds: float = 30) -> None:
        """Until a connection was made and cut since `cut`."""
        with self._guard:
            assert self._guard.wait_for(lambda: self._cuts > 0, seconds)

    def close(self) -> None:
        """End everything."""
        self.cut("clean")
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        shutil.rmtree(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]  # a bound method
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as daemon:
            with self._guard:
                if (how := self._how) is None:
                    self._open |= {client, daemon}
            if how == "unanswered":
                self._drop_answer(client, daemon)
            elif how is not None:
                select.select([client], [], [], _PATIENCE)
                if how == "clean":
                    client.recv(1 << 16)
            if how is not None:
                self._note_cut()
                return
            with contextlib.suppress(OSError):
                daemon.connect(str(self._target))
                self._pass_on(client, daemon)
            with self._guard:
                self._open -= {client, daemon}

    def _drop_answer(self, client: socket.socket, daemon: socket.socket) -> None:
        with contextlib.suppress(OSError):
            daemon.connect(str(self._target))
            while True:
                readable, _, _ = select.select([client, daemon], [], [], _PATIENCE)
                if client not in readable or daemon in readable:
                    return
                if not (data := client.recv(1 << 16)):
                    return
                daemon.sendall(data)

    def _note_cut(self) -> None:
        with self._guard:
            self._cuts += 1
            self._guard.notify_all()

    def _pass_on(self, client: socket.socket, daemon: socket.socket) -> None:
        to = {client: daemon, daemon: client}
        while to:
            readable, _, _ = select.select(list(to), [], [])
            for each in readable:
                data = each.recv(1 << 16)
                if data:
                    to[each].sendall(data)
                    continue
                # A half that ended may still be answered.
                to.pop(each).shutdown(socket.SHUT_WR)
