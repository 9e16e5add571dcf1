"""The ledger of an attempt: one JSON line before each act, so that whoever comes after a crash knows what to undo."""

# ruff: noqa: PTH208  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from forgeyard_host.locks import is_locked
from forgeyard_host.processes import boot_id, own_start_time
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.identity import SandboxId

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Intent:
    """Something that was about to be done. `kind`: directory, mounts, uid_range, cgroup, container, spool."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """A ledger as read back. `created`: seconds since the epoch. `owner` is "" when not even the header was written."""

    path: str
    state_dir: str
    sandbox: SandboxId
    owner: str
    pid: int
    start_time: int
    boot_id: str
    created: float
    version: int
    entries: tuple[Intent, ...]


class Ledger:
    """The open ledger of one attempt. Lines survive kill -9 of the writer, not a crash of the machine.

    After such a crash nothing it speaks of is left but files, which `gc` finds by their names: so no fsync.
    """

    def __init__(self, fd: int, path: str, state_dir: str, sandbox: SandboxId, header: dict[str, Any]) -> None:
        self._fd = fd
        self.path = path
        self._state_dir = state_dir
        self._sandbox = sandbox
        self._header = header
        self._entries: list[Intent] = []

    @classmethod
    def open(cls, state_dir: str, sandbox: SandboxId, owner: str) -> Self:
        """A new ledger below `state_dir`; `owner` is the id of the executor.

        :raises FileExistsError: when the attempt has one already.
        """
        header = {
            "version": VERSION,
            "sandbox": sandbox.value,
            "owner": owner,
            "pid": os.getpid(),
            "start_time": own_start_time(),
            "boot_id": boot_id(),
            "created": time.time(),
        }
        directory = f"{state_dir}/ledger"
        path = f"{directory}/{sandbox}.jsonl"
        try:
            fd = _create(directory, path, _line(header))
        except FileNotFoundError:
            Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = _create(directory, path, _line(header))
        return cls(fd, path, state_dir, sandbox, header)

    def intend(self, kind: str, **data: Any) -> None:
        """Write down what is about to be done. `data` must be what JSON can hold.

        :raises OSError: ENOSPC and the like; the act must not follow then.
        """
        os.write(self._fd, _line({"kind": kind, **data}))
        self._entries.append(Intent(kind, data))

    def entries(self) -> tuple[Intent, ...]:
        """In the order they were written."""
        return tuple(self._entries)

    def record(self) -> LedgerRecord:
        """This ledger as `scan` would read it."""
        return _record(self.path, self._state_dir, self._sandbox, self._header, tuple(self._entries))

    def close_and_remove(self) -> None:
        """Forget it: everything is undone. A second call is fine."""
        self.close()
        Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and leave it for a later recovery. A second call is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _create(directory: str, path: str, header: bytes) -> int:
    """The file appears under its name with its header in it, so that nobody ever reads an attempt without an owner."""
    fd = _open_unnamed(directory, path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, header)
        _name(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_unnamed(directory: str, path: str, flags: int) -> int:
    """A new file to be named `path` by `_name`; it has the name at once where the filesystem can't do otherwise."""
    try:
        return os.open(directory, flags | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _name(fd: int, path: str) -> None:
    if os.fstat(fd).st_nlink == 0:
        # Given some dir_fd (an absolute path ignores it) os.link uses linkat, without it link(2), which cannot do this.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def scan(state_dir: str) -> list[LedgerRecord]:
    """Every ledger below `state_dir`, oldest first. Files with other names and torn lines are passed over."""
    try:
        names = sorted(os.listdir(f"{state_dir}/ledger"))
    except FileNotFoundError:
        return []
    return [record for name in names if (record := _read(state_dir, name)) is not None]


def find_record(state_dir: str, sandbox: str) -> LedgerRecord | None:
    """The ledger of the attempt `sandbox`; None when it has none, or that is no attempt's id."""
    return _read(state_dir, f"{sandbox}.jsonl")


def _read(state_dir: str, name: str) -> LedgerRecord | None:
    stem, dot, suffix = name.partition(".")
    path = f"{state_dir}/ledger/{name}"
    if dot + suffix != ".jsonl":
        return None
    try:
        sandbox = SandboxId.parse(stem)
        text = Path(path).read_bytes()
    except (InvalidRequest, FileNotFoundError, IsADirectoryError):
        return None
    lines = [parsed for line in text.split(b"\n") if (parsed := _parse(line)) is not None]
    header = lines[0] if lines and lines[0].get("sandbox") == sandbox.value else {}
    entries = (Intent(str(line.pop("kind")), line) for line in lines if "kind" in line)
    return _record(path, state_dir, sandbox, header, tuple(entries))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(line)
    except ValueError:  # the last line of a writer that was killed, or never ours
        return None
    return parsed if isinstance(parsed, dict) else None


def _record(
    path: str, state_dir: str, sandbox: SandboxId, header: dict[str, Any], entries: tuple[Intent, ...]
) -> LedgerRecord:
    return LedgerRecord(
        path=path,
        state_dir=state_dir,
        sandbox=sandbox,
        owner=str(header.get("owner", "")),
        pid=int(header.get("pid", 0)),
        start_time=int(header.get("start_time", 0)),
        boot_id=str(header.get("boot_id", "")),
        created=float(header.get("created", 0.0)),
        version=int(header.get("version", 0)),
        entries=entries,
    )


def owner_alive(record: LedgerRecord) -> bool:
    """Whether the executor that wrote `record` still runs. Its attempts are then its own business."""
    if not record.owner or record.boot_id != boot_id():
        return False
    return ExecutorLock.held(record.state_dir, record.owner)


class ExecutorLock:
    """An executor's sign of life: a lock on <state>/executors/<id>.lock, which the kernel drops with the process."""

    def __init__(self, state_dir: str, executor_id: str) -> None:
        """Take the lock.

        :raises ExecutorError: INTERNAL, reason executor_id_in_use, when another process has it.
        """
        if "/" in executor_id or executor_id in ("", ".", ".."):
            raise InvalidRequest("executor id", executor_id, "use a plain name without slashes")
        self.executor_id = executor_id
        self._path = f"{state_dir}/executors/{executor_id}.lock"
        directory = Path(self._path).parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.held(state_dir, executor_id):
            Path(self._path).unlink(missing_ok=True)
        # Named only once it is locked: whoever sweeps the locks of the dead never meets one that is being taken.
        fd = -1
        try:
            self._fd = fd = _open_unnamed(str(directory), self._path, os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _name(fd, self._path)
        except FileExistsError as error:
            if fd >= 0:
                os.close(fd)
            raise ExecutorError(
                ExecutorErrorKind.INTERNAL, "executor_id_in_use", f"executor {executor_id} runs already"
            ) from error

    @staticmethod
    def held(state_dir: str, executor_id: str) -> bool:
        """Whether a living process has the lock of `executor_id`."""
        return is_locked(f"{state_dir}/executors/{executor_id}.lock")

    @staticmethod
    def sweep(state_dir: str) -> None:
        """Remove the lock files of dead executors; call it when nothing of theirs is left to undo."""
        for path in Path(state_dir, "executors").glob("*.lock"):
            if not is_locked(path):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give it up and remove the file. A second call is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            Path(self._path).unlink(missing_ok=True)
            os.close(fd)
