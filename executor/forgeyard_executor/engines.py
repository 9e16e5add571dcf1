"""Which engines a state directory ever had containers at, and the sweep of each of them.

What a dead executor left at a daemon says nothing in the state directory, and the next executor may use another one. So
the address of a daemon is written down before the first container is made there, and stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from forgeyard_executor.refusals import state_io
from forgeyard_executor.state import StatePaths
from forgeyard_host.ledger import ExecutorLock, find_record, owner_alive
from forgeyard_model.errors import ForgeyardError
from forgeyard_oci.durable import write_whole
from forgeyard_runtimes.contract import ContainerRuntime, SweepReport
from forgeyard_runtimes.find import RuntimeSettings, open_runtime, state_name

log: Final = logging.getLogger("forgeyard.executor")


@dataclass(frozen=True, slots=True)
class Engine:
    """An adapter by its name, and the address of its daemon."""

    runtime: str
    address: str


@dataclass(frozen=True, slots=True)
class EngineSweep:
    """What was done at one engine.

    :param error: why it could not be asked; nothing is known then of what is left there.
    """

    engine: Engine
    report: SweepReport = field(default_factory=SweepReport)
    error: str = ""

    def after(self, removed: tuple[str, ...]) -> EngineSweep:
        """With what an earlier one `removed`."""
        return replace(self, report=replace(self.report, removed=(*removed, *self.report.removed)))

    @property
    def problems(self) -> tuple[str, ...]:
        """What is left, and why: a line each."""
        lines = [f"{what} is left: {why}" for what, why in self.report.failed]
        return tuple(f"{self.engine.runtime}: {line}" for line in (*lines, self.error) if line)


@dataclass(frozen=True, slots=True)
class Engines:
    """What was done at each engine that was asked, and what of the record can't be read: a line each."""

    sweeps: tuple[EngineSweep, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[str, ...]:
        """Everything that went wrong: a line each."""
        return (*self.unreadable, *(line for each in self.sweeps for line in each.problems))


@dataclass(frozen=True, slots=True)
class Remembered:
    """The engines on record, and what of the record can't be read: a line each."""

    engines: tuple[Engine, ...]
    errors: tuple[str, ...]


def engine_of(runtime: ContainerRuntime) -> Engine | None:
    """Where a runtime's containers are kept; None when that is the state directory itself."""
    return Engine(runtime.name.partition(" ")[0], runtime.address) if runtime.address else None


def remember(paths: StatePaths, engine: Engine) -> None:
    """Put it on record, on the disk when this returns: containers may outlive a crash of the machine. Blocking.

    :raises ExecutorError: IO_FAILED.
    """
    path = _record(paths, engine)
    if path.exists():
        return
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, json.dumps({"runtime": engine.runtime, "address": engine.address}).encode(), sync=True)
        for directory in (path.parent, paths.root):
            _sync(directory)
    except OSError as error:
        raise state_io(error) from error


def remembered(paths: StatePaths) -> Remembered:
    """Every engine on record. Blocking."""
    engines, errors = [], []
    for path in sorted(paths.engines.glob("*.json")):
        try:
            data: Any = json.loads(path.read_bytes())
            engines.append(Engine(str(data["runtime"]), str(data["address"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            errors.append(f"{path} can't be read: {error!r} (remove it when no engine may have anything of ours)")
    return Remembered(tuple(engines), tuple(errors))


async def sweep_engines(own: ContainerRuntime, paths: StatePaths, *, everywhere: bool) -> Engines:
    """Remove what dead executors left at the engine of `own`, and `everywhere` at the others on record.

    One that does not answer is an error of the report.
    """
    mine = engine_of(own)
    record = await asyncio.to_thread(remembered, paths) if everywhere else Remembered((), ())
    alive = _alive_in(str(paths.root))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_sweep(mine, paths, alive, own))] if mine is not None else []
        tasks += [group.create_task(_sweep(each, paths, alive)) for each in record.engines if each != mine]
    return Engines(tuple(task.result() for task in tasks), record.errors)


async def _sweep(
    engine: Engine, paths: StatePaths, alive: Callable[[str], bool], own: ContainerRuntime | None = None
) -> EngineSweep:
    # No executor's id: of an engine that ours does not use nothing is kept for its next job.
    settings = RuntimeSettings(state=state_name(str(paths.root)), address=engine.address, images=str(paths.images))
    try:
        async with nullcontext(own) if own is not None else open_runtime(engine.runtime, settings) as runtime:
            report = await runtime.sweep(alive)
    except ForgeyardError as error:
        cure = "" if own is not None else f"; if that daemon is gone for good, remove {_record(paths, engine)}"
        return EngineSweep(engine, error=f"{engine.address}: {error}{cure}")
    for what in report.removed:
        log.info("removed %s at %s", what, engine.runtime)
    return EngineSweep(engine, report)


def _alive_in(state_root: str) -> Callable[[str], bool]:
    def alive(name: str) -> bool:
        """By a look at this moment: whatever is seen at an engine has its ledger by then."""
        if not name or "/" in name:
            return False
        record = find_record(state_root, name)
        return owner_alive(record) if record is not None else ExecutorLock.held(state_root, name)

    return alive


def _record(paths: StatePaths, engine: Engine) -> Path:
    digest = hashlib.sha256(engine.address.encode("utf-8", "surrogateescape")).hexdigest()
    return paths.engines / f"{engine.runtime}-{digest[:16]}.json"


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
