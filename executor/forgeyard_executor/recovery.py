"""What dead executors left in a state directory: found by ledger, undone, reported."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.files import remove_tree
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock, LedgerRecord, owner_alive, scan
from forgeyard_host.mounts import FILES
from forgeyard_host.recovery import undo
from forgeyard_model.errors import ForgeyardError
from forgeyard_runtimes.contract import ContainerRuntime

log: Final = logging.getLogger("forgeyard.executor")


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Sandboxes removed, attempts of live executors that were left alone, and what could not be undone.

    :param running: names of those that were left alone, their services' included.
    :param swept: what was removed at the runtime itself, each as ``kind name``.
    """

    removed: tuple[str, ...]
    alive: int
    errors: tuple[str, ...]
    running: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """What was removed at the runtime, and what was not: a line each."""

    removed: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


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
    services: tuple[ServiceInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """A service of an attempt: its name, its sandbox, and the host pid of its first process."""

    name: str
    sandbox_id: str
    pid: int | None


async def sweep_runtime(runtime: ContainerRuntime, state_root: str) -> Swept:
    """Remove what dead executors left at the runtime itself. One that can't be asked is an error of the report."""

    def alive(name: str) -> bool:
        """By a look at this moment: whatever is seen at the runtime has its ledger by then."""
        if not name:
            return False
        if ExecutorLock.held(state_root, name):
            return True
        return any(record.sandbox.value == name and owner_alive(record) for record in scan(state_root))

    try:
        report = await runtime.sweep(alive)
    except ForgeyardError as error:
        return Swept(errors=(f"{runtime.name}: {error}",))
    for what in report.removed:
        log.info("removed %s at %s", what, runtime.name)
    return Swept(report.removed, tuple(f"{runtime.name}: {what}: {why}" for what, why in report.failed))


def recover(paths: StatePaths, host: Host, cgroups: CgroupHost) -> RecoveryReport:
    """Undo every attempt whose executor is dead. Idempotent; goes on past errors."""
    removed, errors = [], []
    running: list[str] = []
    alive = 0
    # Services first: a runtime that was about to start one could make its group anew below that of its job.
    for record in sorted(scan(str(paths.root)), key=lambda record: not _job_of(record)):
        job = _job_of(record)
        if owner_alive(record):
            alive += not job
            running.append(record.sandbox.value)
            continue
        try:
            undo(record, host, cgroups)
        except ForgeyardError as error:
            errors.append(f"{record.sandbox}: {error}")
            continue
        if job:
            cgroups.remove_empty(f"/forgeyard/{record.owner}/{job}")
        else:
            removed.append(record.sandbox.value)
        cgroups.remove_empty(f"/forgeyard/{record.owner}")
    _remove_spools(paths, errors)
    if not errors:
        ExecutorLock.sweep(str(paths.root))
    return RecoveryReport(tuple(removed), alive, tuple(errors), tuple(running))


def _about(record: LedgerRecord) -> dict[str, Any]:
    return next((entry.data for entry in record.entries if entry.kind == "attempt"), {})


def _job_of(record: LedgerRecord) -> str:
    """The attempt whose service `record` is; empty for an attempt itself."""
    return str(_about(record).get("of", ""))


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
    records = sorted(scan(str(paths.root)), key=lambda record: record.sandbox.value)
    jobs = {record.sandbox.value for record in records}
    services: dict[str, list[ServiceInfo]] = {}
    for record in records:
        # A service whose job is gone already stands for itself.
        if (job := _job_of(record)) in jobs:
            name = str(_about(record).get("name", ""))
            services.setdefault(job, []).append(ServiceInfo(name, record.sandbox.value, _pid(paths, record)))
    return tuple(
        replace(_info(paths, record), services=tuple(services.get(record.sandbox.value, ())))
        for record in records
        if _job_of(record) not in jobs
    )


def _pid(paths: StatePaths, record: LedgerRecord) -> int | None:
    try:
        return int((paths.attempt(record.sandbox) / "mnt" / FILES / "pid").read_text())
    except (OSError, ValueError):
        return None


def _info(paths: StatePaths, record: LedgerRecord) -> SandboxInfo:
    data, pid = _about(record), _pid(paths, record)
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
