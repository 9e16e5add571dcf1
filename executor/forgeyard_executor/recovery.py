"""What dead executors left in a state directory: found by ledger, undone, reported."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.files import remove_tree
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock, LedgerRecord, owner_alive, scan
from forgeyard_host.mounts import FILES
from forgeyard_host.recovery import undo
from forgeyard_model.errors import ForgeyardError


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Sandboxes removed, attempts of live executors that were left alone, and what could not be undone."""

    removed: tuple[str, ...]
    alive: int
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """One attempt, as `forgeyard ps` lists it. state: running, preparing, or orphaned (its executor is dead)."""

    sandbox_id: str
    attempt_id: str
    name: str
    state: str
    started_at: datetime
    pid: int | None
    owner: str


def recover(paths: StatePaths, host: Host, cgroups: CgroupHost) -> RecoveryReport:
    """Undo every attempt whose executor is dead. Idempotent; goes on past errors."""
    removed, errors, alive = [], [], 0
    for record in scan(str(paths.root)):
        if owner_alive(record):
            alive += 1
            continue
        try:
            undo(record, host, cgroups)
        except ForgeyardError as error:
            errors.append(f"{record.sandbox}: {error}")
        else:
            removed.append(record.sandbox.value)
            cgroups.remove_empty(f"/forgeyard/{record.owner}")
    _remove_spools(paths, errors)
    if not errors:
        ExecutorLock.sweep(str(paths.root))
    return RecoveryReport(tuple(removed), alive, tuple(errors))


def _remove_spools(paths: StatePaths, errors: list[str]) -> None:
    """Output whose readers died with their executor."""
    for directory in paths.spools.iterdir():
        if ExecutorLock.held(str(paths.root), directory.name):
            continue
        try:
            remove_tree(str(directory))
        except* OSError as group:
            errors.extend(str(error) for error in group.exceptions)


def list_sandboxes(state_dir: str | Path) -> tuple[SandboxInfo, ...]:
    """The attempts a state directory knows of, oldest first. Needs no open executor."""
    paths = StatePaths(Path(state_dir))
    return tuple(
        _info(paths, record) for record in sorted(scan(str(paths.root)), key=lambda record: record.sandbox.value)
    )


def _info(paths: StatePaths, record: LedgerRecord) -> SandboxInfo:
    directory = paths.attempt(record.sandbox)
    data = next((entry.data for entry in record.entries if entry.kind == "attempt"), {})
    try:
        pid = int((directory / "mnt" / FILES / "pid").read_text())
    except (OSError, ValueError):
        pid = None
    state = "orphaned" if not owner_alive(record) else ("running" if pid is not None else "preparing")
    return SandboxInfo(
        sandbox_id=record.sandbox.value,
        attempt_id=str(data.get("attempt", "")),
        name=str(data.get("name", "")),
        state=state,
        started_at=datetime.fromtimestamp(record.created, UTC),
        pid=pid,
        owner=record.owner,
    )
