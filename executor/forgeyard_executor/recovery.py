"""What dead executors left in a state directory: found by ledger, undone, reported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgeyard_executor.engines import Engines, EngineSweep, sweep_engines
from forgeyard_executor.networks import Networks
from forgeyard_executor.services import HostServices
from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.files import remove_tree
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock, LedgerRecord, owner_alive, scan
from forgeyard_host.locks import is_locked
from forgeyard_host.mounts import FILES
from forgeyard_host.recovery import undo
from forgeyard_model.errors import ForgeyardError


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Sandboxes removed, attempts of live executors that were left alone, and what could not be undone.

    :param errors: a line each, those of `engines` included.
    :param running: names of those that were left alone, their services' included.
    :param engines: what was removed, kept and not removed at each engine that was asked.
    """

    removed: tuple[str, ...]
    alive: int
    errors: tuple[str, ...]
    running: tuple[str, ...] = ()
    engines: tuple[EngineSweep, ...] = ()

    @property
    def swept(self) -> tuple[str, ...]:
        """What was removed at engines, each as ``kind name``."""
        return tuple(what for each in self.engines for what in each.report.removed)

    def then(self, later: RecoveryReport) -> RecoveryReport:
        """Both as one: what was removed by either, and what the later one found besides."""
        before = {each.engine: each.report.removed for each in self.engines}
        engines = tuple(each.after(before.get(each.engine, ())) for each in later.engines)
        return replace(later, removed=(*self.removed, *later.removed), engines=engines)


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


async def recover_all(services: HostServices, networks: Networks, *, everywhere: bool) -> RecoveryReport:
    """Undo what dead executors left: at engines, in the state directory, on networks.

    :param everywhere: ask every engine on record; else the others only if somebody died, for they may be slow or gone.
    """
    paths = services.paths
    everywhere = everywhere or await services.in_pool(lambda: owes_engines(paths))
    engines = await sweep_engines(services.runtime, paths, everywhere=everywhere)
    report = await services.in_pool(lambda: recover(paths, services.host, services.cgroups, engines))
    errors = await networks.recover(report.running)
    return replace(report, errors=(*report.errors, *errors))


def owes_engines(paths: StatePaths) -> bool:
    """Whether there are engines on record, and an executor died or left something undone. Blocking."""
    if not any(paths.engines.glob("*.json")):  # by far the most: nothing is to be looked through then
        return False
    root = str(paths.root)
    locks = Path(root, "executors").glob("*.lock")
    return any(not is_locked(lock) for lock in locks) or any(not owner_alive(record) for record in scan(root))


def recover(paths: StatePaths, host: Host, cgroups: CgroupHost, engines: Engines) -> RecoveryReport:
    """Undo every attempt whose executor is dead. Idempotent; goes on past errors. Blocking.

    :param engines: what came of them. Containers go first: an engine must not bring up what ledgers then take away.
    """
    removed: list[str] = []
    errors = list(engines.errors)
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
        # Until then the locks of the dead say that there is something to do, at every engine on record.
        ExecutorLock.sweep(str(paths.root))
    return RecoveryReport(tuple(removed), alive, tuple(errors), tuple(running), engines.sweeps)


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
