"""The files of a channel: FIFOs, the init and step files in an attempt's control directory.

The directory is bound read-only at /.forgeyard. It is root's with mode 0711: a job can open what it knows the name of
and list nothing.
"""

# Plain os calls: these run for every job, and pathlib costs more than the calls themselves.
# ruff: noqa: PTH101, PTH108

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

OUTPUT_PIPE: Final = 256 << 10
"""Bytes a job can be ahead of the spool, per stream."""

# Modes are for the job's uid, as which the init opens its ends: each can be opened in one direction alone.
_FIFOS: Final = {"control": 0o400, "report": 0o200, "stdout": 0o600, "stderr": 0o600}
_PROBE: Final = {"probe": 0o200}
INIT: Final = "init"
RESERVED: Final = frozenset({*_FIFOS, *_PROBE, INIT})


@dataclass(slots=True)
class HostEnds:
    """Descriptors of the executor's ends, all non-blocking and close-on-exec. `probe`: -1 without one."""

    control: int
    report: int
    stdout: int
    stderr: int
    probe: int = -1


def io_error(error: OSError, doing: str) -> ExecutorError:
    """Translate `error` met while `doing` something to a channel."""
    return ExecutorError(ExecutorErrorKind.IO_FAILED, "shim_channel", f"could not {doing}", details=str(error))


def make_fifos(directory: Path, uid: int, gid: int, *, probes: bool = False) -> None:
    """Make the FIFOs, owned by the job's host uid and gid; with `probes` also the one for what probes write.

    :raises OSError: as mkfifo and chown give it.
    """
    for name, mode in (_FIFOS | _PROBE if probes else _FIFOS).items():
        path = f"{directory}/{name}"
        os.mkfifo(path, 0)
        os.chmod(path, mode)
        os.chown(path, uid, gid)


def place_init(directory: Path, shim: Path) -> None:
    """Put the shim there as `init`: a hard link, so that all jobs share its pages, or a copy across file systems.

    :raises OSError: as link and the copy give it.
    """
    target = directory / INIT
    if shim.stat().st_mode & 0o777 == 0o555:
        try:
            target.hardlink_to(shim)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM):
                raise
        else:
            return
    shutil.copyfile(shim, target)
    target.chmod(0o555)


def open_host_ends(directory: Path, *, probes: bool = False) -> HostEnds:
    """Open our ends before the init opens its own.

    :raises OSError: as open gives it; nothing stays open.
    """
    opened: list[int] = []
    try:
        # Read and write, so that the init's own open finds both a writer and, for ours, a reader.
        opened.append(os.open(f"{directory}/control", os.O_RDWR | os.O_NONBLOCK))
        reading = (f"{directory}/{name}" for name in ("report", "stdout", "stderr", *(_PROBE if probes else ())))
        opened.extend(os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in reading)
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    for fd in opened[2:4]:
        with suppress(PermissionError):  # past the user's share of pipe memory the default size serves
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, OUTPUT_PIPE)
    return HostEnds(*opened)


def remove_fifos(directory: Path) -> None:
    """Take the names away: what is open stays usable, nobody else can open it. Idempotent."""
    for name in (*_FIFOS, *_PROBE):
        with suppress(FileNotFoundError):
            os.unlink(f"{directory}/{name}")


def write_file(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """A new file, complete before the job may read it.

    :raises ExecutorError: IO_FAILED, reason ``shim_channel``.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    except OSError as error:
        raise io_error(error, f"write {path.name} for the job") from error
