"""Collects what a job promised from /work/output, after its tree is dead. The files are the job's work: hostile."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from forgeyard_host.collect import copy_tree_beneath
from forgeyard_host.files import open_beneath
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.job import Output
from forgeyard_model.result import CollectedOutput

_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)


def check_destination(path: str | None) -> None:
    """Refuse an output directory that would mix a job's files with others.

    :raises InvalidRequest: when it exists and is not an empty directory.
    """
    if path is None:
        return
    try:
        entries = list(Path(path).iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidRequest("output", path, f"is no directory that can be used ({error.strerror})") from error
    if entries:
        raise InvalidRequest("output", path, "is not empty: name an absent or empty directory")


def collect(source: Path, declared: tuple[Output, ...], destination: str | None) -> tuple[CollectedOutput, ...]:
    """Copy the declared outputs, or all there is when none is declared, into `destination`.

    Without a destination only their presence is looked at. Symbolic links that lead out of the tree, devices,
    sockets and FIFOs are left out and named.

    :raises ExecutorError: IO_FAILED, when the destination can't be written.
    """
    if not declared and destination is None:
        return ()
    directory = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    target = None if destination is None else _Destination(destination)
    try:
        if declared:
            covered = _covered(declared)
            return tuple(_collect_one(directory, output, None if output in covered else target) for output in declared)
        names = sorted(os.listdir(directory))  # noqa: PTH208  by descriptor
        return tuple(_collect_one(directory, Output(name, optional=True), target) for name in names)
    except OSError as error:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "collect_outputs",
            "the outputs can't be written",
            details=str(error),
            resolution="free space in the output directory's filesystem",
        ) from error
    finally:
        os.close(directory)
        if target is not None:
            target.close()


class _Destination:
    """Where outputs go, made when the first one comes. Held by descriptor: whoever swaps a part of its path for a
    symlink after the request was checked gets a refusal, not the job's files somewhere else.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def opened(self) -> Path:
        """A path of the directory that nobody can redirect.

        :raises OSError: ELOOP, when a part of its path is a symlink by now.
        """
        if self._fd < 0:
            self._fd = _make_directories(self._path)
        return Path(f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _make_directories(path: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY
    fd = os.open("/", flags | os.O_CLOEXEC)
    for part in path.strip("/").split("/"):
        try:
            try:
                below = open_beneath(fd, part, flags)
            except FileNotFoundError:
                os.mkdir(part, dir_fd=fd)
                below = open_beneath(fd, part, flags)
        finally:
            os.close(fd)
        fd = below
    return fd


def _covered(declared: tuple[Output, ...]) -> set[Output]:
    """Outputs that come along with another one: `reports/junit.xml` beside `reports` is only looked for."""
    paths = {_normal(output.path) for output in declared}
    return {
        output
        for output in declared
        if any(str(parent) in paths for parent in PurePosixPath(_normal(output.path)).parents)
    }


def _normal(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _collect_one(directory: int, output: Output, destination: _Destination | None) -> CollectedOutput:
    path = _normal(output.path)
    missing = CollectedOutput(output.path, missing=True, optional=output.optional)
    try:
        # ELOOP: a symbolic link on the way, which nothing of ours follows.
        os.close(open_beneath(directory, path, os.O_PATH))
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return replace(missing, skipped=(f"{path}: a symlink is not followed",) if error.errno == errno.ELOOP else ())
    if destination is None:
        return replace(missing, missing=False)
    target = destination.opened() / path
    target.parent.mkdir(parents=True, exist_ok=True)
    report = copy_tree_beneath(directory, path, str(target))
    nothing = not (report.files or report.directories or report.symlinks)
    return CollectedOutput(
        output.path, report.files, report.bytes, missing=nothing, optional=output.optional, skipped=report.skipped
    )
