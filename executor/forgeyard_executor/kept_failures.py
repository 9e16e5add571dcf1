"""Workspaces of failed attempts, kept for whoever wants to know why: <state>/kept/<sandbox>, root's alone, for a time.

    kept.json   whose it is, and until when
    result.json the result
    config.json of its bundle
    stdout, stderr, services/NAME.log
    layers/     what the job wrote, one directory for each writable place

Secrets are taken out before it gets its name; where one is found even then, nothing is kept.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from forgeyard_executor.scrubbing import SHORTEST, Scrubber
from forgeyard_host.collect import copy_tree_beneath
from forgeyard_host.files import remove_tree
from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.result import ExecutionResult
from forgeyard_model.result_json import result_json

PARTIAL: Final = ".partial"
_ABOUT: Final = "kept.json"


@dataclass(frozen=True, slots=True)
class KeptFailure:
    """One that is kept. `path`: its directory."""

    sandbox_id: str
    attempt_id: str
    name: str
    outcome: str
    until: datetime
    path: Path


@dataclass(frozen=True, slots=True)
class Workspace:
    """What there is to keep of an attempt.

    :param scratch: its writable layer. layers: relative path of each part, by the name it gets.
    :param secrets: names and values of what must not be kept.
    :param size: bytes that it takes, as far as is known.
    """

    sandbox: SandboxId
    scratch: str
    layers: tuple[tuple[str, str], ...]
    secrets: tuple[tuple[str, str], ...]
    size: int


class FailureKeeper:
    """Keeps the workspaces of failed attempts.

    :param directory: where; made when there is a first one.
    :param seconds: for how long.
    :param enough_room: whether so many bytes may be taken of the disk.
    """

    def __init__(self, directory: Path, seconds: float, enough_room: Callable[[int], bool]) -> None:
        self._directory = directory
        self._seconds = seconds
        self._enough_room = enough_room

    def begin(self, workspace: Workspace) -> Keeping:
        """Copy it while it is still there. Blocking; the attempt's processes are dead.

        :raises SandboxError: it can't be kept; nothing of it is.
        """
        short = sorted({name for name, value in workspace.secrets if len(value.strip().encode()) < SHORTEST})
        if short:
            raise _not_kept(f"the value of {', '.join(short)} is too short to be found among other bytes")
        if not self._enough_room(workspace.size):
            raise _not_kept("the disk has no room for it")
        values = [value for _, value in workspace.secrets]
        keeping = Keeping(self._directory, workspace.sandbox, Scrubber.of(values), self._seconds)
        keeping.past_errors(lambda: keeping.copy(workspace))
        return keeping


class Keeping:
    """One attempt's workspace on its way to being kept."""

    def __init__(self, directory: Path, sandbox: SandboxId, scrubber: Scrubber, seconds: float) -> None:
        self.path = directory / sandbox.value
        self.partial = directory / f".{sandbox}{PARTIAL}"
        self._scrubber = scrubber
        self._until = datetime.now(UTC) + timedelta(seconds=seconds)
        self._skipped: list[str] = []

    @property
    def note(self) -> str:
        """For the result."""
        return f"the workspace is kept in {self.path} until {self._until.isoformat(timespec='seconds')}"

    def copy(self, workspace: Workspace) -> None:
        """The writable layers.

        :raises OSError: what can't be read or written.
        """
        self.partial.parent.mkdir(mode=0o700, exist_ok=True)
        self.partial.parent.chmod(0o700)
        remove_tree(str(self.partial))
        (self.partial / "layers").mkdir(mode=0o700, parents=True)
        self.partial.chmod(0o700)
        scratch = os.open(workspace.scratch, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name, relative in workspace.layers:
                with suppress(FileNotFoundError):
                    report = copy_tree_beneath(scratch, relative, str(self.partial / "layers" / name))
                    self._skipped.extend(report.skipped)
        finally:
            os.close(scratch)

    def finish(self, result: ExecutionResult) -> None:
        """Take the secrets out, look whether they are gone, and give it its name. Blocking.

        :raises SandboxError: it can't be kept; nothing of it is.
        """
        self.past_errors(lambda: self._finish(result))

    def past_errors(self, act: Callable[[], None]) -> None:
        """Whatever goes wrong in `act`, nothing is left of it.

        :raises SandboxError: something did.
        """
        try:
            act()
        except BaseException as error:
            _destroy(self.partial)
            if isinstance(error, OSError):
                raise _not_kept(f"{error.strerror or error}: {error.filename or self.partial}") from error
            raise

    def _finish(self, result: ExecutionResult) -> None:
        (self.partial / "result.json").write_bytes(result_json(result))
        left_out = [*self._skipped, *self._scrubber.clean_tree(self.partial)]
        about = {
            "sandbox_id": result.sandbox_id,
            "attempt_id": result.attempt_id,
            "name": result.name,
            "outcome": result.outcome.value,
            "until": self._until.isoformat(),
            "left_out": left_out,
        }
        # What people called it may hold a secret as well, and JSON stays JSON when letters become asterisks.
        (self.partial / _ABOUT).write_bytes(self._scrubber.clean(json.dumps(about).encode()))
        found = self._scrubber.found_in(self.partial)
        if found is not None:
            raise _not_kept("a secret was still found in it after all were taken out")
        remove_tree(str(self.path))
        self.partial.rename(self.path)


def _destroy(path: Path) -> None:
    try:
        remove_tree(str(path))
    except* OSError as group:
        raise SandboxError(
            SandboxErrorKind.CLEANUP_FAILED,
            "kept_in_part",
            f"{path}, a part of a failed attempt's workspace, can't be removed",
            details="; ".join(str(error) for error in group.exceptions),
            resolution="remove it: it may hold secrets",
        ) from group


def _not_kept(why: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.INTERNAL, "not_kept", "the workspace of the failed attempt is not kept", details=why
    )


def list_kept(directory: Path) -> tuple[KeptFailure, ...]:
    """Those that are kept, the first to go first. One whose description can't be read is past its time."""
    found = [_read(path) for path in _directories(directory) if not path.name.endswith(PARTIAL)]
    return tuple(sorted(found, key=lambda kept: (kept.until, kept.sandbox_id)))


def _read(path: Path) -> KeptFailure:
    try:
        about = json.loads((path / _ABOUT).read_bytes())
        until = datetime.fromisoformat(about["until"])
        return KeptFailure(path.name, about["attempt_id"], about["name"], about["outcome"], until, path)
    except (OSError, ValueError, KeyError, TypeError):
        return KeptFailure(path.name, "", "", "unreadable", datetime.fromtimestamp(0, UTC), path)


def remove_kept(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Remove those whose sandbox or attempt is called so; the sandboxes' names.

    :raises InvalidRequest: no such one; nothing is removed then.
    """
    there = list_kept(directory)
    chosen: dict[str, KeptFailure] = {}
    for name in names:
        matching = [kept for kept in there if name in (kept.sandbox_id, kept.attempt_id)]
        if not matching:
            raise InvalidRequest("NAME", name, "nothing of that name is kept: `forgeyard kept ls` lists what is")
        chosen |= {kept.sandbox_id: kept for kept in matching}
    return _removed(chosen.values())


def sweep_kept(directory: Path, running: Callable[[str], bool]) -> tuple[str, ...]:
    """Remove what is past its time, and what was left half made by an executor that died.

    :param running: whether the attempt of a sandbox is still being looked after.
    """
    now = datetime.now(UTC)
    for path in _directories(directory):
        if path.name.endswith(PARTIAL) and not running(path.name.removeprefix(".").removesuffix(PARTIAL)):
            remove_tree(str(path))
    return _removed([kept for kept in list_kept(directory) if kept.until <= now])


def remove_oldest(directory: Path, size: int) -> None:
    """For a disk that runs full: the first to go first, until about `size` bytes are free."""
    if not directory.is_dir():
        return
    wanted = shutil.disk_usage(directory).free + size
    for kept in list_kept(directory):
        if shutil.disk_usage(directory).free >= wanted:
            return
        _removed([kept])


def _removed(chosen: Iterable[KeptFailure]) -> tuple[str, ...]:
    gone = []
    for kept in chosen:
        remove_tree(str(kept.path))
        gone.append(kept.sandbox_id)
    return tuple(gone)


def _directories(directory: Path) -> Sequence[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ()
        raise
