"""Probing: limits and mounts from the host's side, everything else from inside a real sandbox, all at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from forgeyard_executor.capabilities import LIMITS, PROBE_NAME, reason_of
from forgeyard_executor.member import attempt_group
from forgeyard_executor.services import HostServices
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.failures import describe
from forgeyard_host.files import remove_tree
from forgeyard_host.ledger import Ledger
from forgeyard_host.probes_cgroups import limit_probes
from forgeyard_host.probes_files import file_probes
from forgeyard_host.processes import own_start_time
from forgeyard_host.recovery import undo
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe, ResourceControls
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, SandboxError
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Job, Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.result import ExecutionResult, Outcome
from forgeyard_networks import probe as network_probe
from forgeyard_runtimes import probe as sandbox_probe

MEMORY: Final = 64 << 20
_DEADLINE: Final = 10.0

_PROCESS: Final = frozenset({Feature.KILL_TREE, Feature.NO_NEW_PRIVS, Feature.CAPABILITY_DROP})
_NAMESPACE: Final = _PROCESS | {
    *(Feature.USER_NAMESPACE, Feature.MOUNT_NAMESPACE, Feature.PID_NAMESPACE, Feature.NETWORK_NAMESPACE),
    *(Feature.CGROUP_NAMESPACE, Feature.SECCOMP, Feature.READ_ONLY_BIND, Feature.TMPFS, Feature.IDMAPPED_MOUNT),
}
_LEVELS: Final = {
    IsolationLevel.PROCESS: _PROCESS,
    IsolationLevel.NAMESPACE: _NAMESPACE,
    IsolationLevel.CONTAINER: _NAMESPACE | {Feature.OVERLAY},
}


@dataclass(frozen=True, slots=True)
class SandboxSight:
    """What a probe's sandbox reported by name, and how many processes its first step left. `error`: none came to be."""

    seen: Mapping[str, str] = field(default_factory=dict)
    leftovers: int = 0
    error: ForgeyardError | None = None


RunJob = Callable[[Job], Awaitable[tuple[ExecutionResult, bytes]]]
"""Runs a job to its end, without asking what the probes say; its result and what it wrote to stdout."""


def probe_job() -> Job:
    """The job that looks at its own sandbox: the defaults of the profile, in little."""
    script = sandbox_probe.PREAMBLE + sandbox_probe.LOOK + network_probe.LOOK + sandbox_probe.LEAVE_BEHIND
    again = sandbox_probe.PREAMBLE + sandbox_probe.LOOK_AGAIN
    return Job(
        rootfs="host",
        name=PROBE_NAME,
        steps=(Step("/bin/sh", "-c", script, name="look"), Step("/bin/sh", "-c", again, name="look-again")),
        limits=ResourceLimits(cpus=1.0, memory=MEMORY, pids=64, nofile=256, wall_time=_DEADLINE),
        output_cap=1 << 16,
    )


async def look_inside(run: RunJob) -> SandboxSight:
    """Run the probe's job and read its report."""
    try:
        result, out = await run(probe_job())
    except ForgeyardError as error:
        return SandboxSight(error=error)
    seen = sandbox_probe.parse_report(out.decode("utf-8", "replace"))
    if result.outcome is not Outcome.SUCCEEDED or "after" not in seen:
        return SandboxSight(seen, error=ForgeyardError("the probe's own job failed", details=result.message))
    return SandboxSight(seen, result.steps[0].leftovers)


async def probe_host(services: HostServices, run: RunJob) -> ExecutorCapabilities:
    """All probes, and the claims that follow from them; below a second. Nothing is left behind.

    :raises ForgeyardError: when they can't be carried out, or can't be cleaned up after.
    """
    cgroups = _detect()
    inside = asyncio.ensure_future(look_inside(run))
    limits = asyncio.ensure_future(asyncio.to_thread(_limits, services, cgroups))
    mounts = asyncio.ensure_future(asyncio.to_thread(_mounts, services))
    # To the end of all, whatever one of them meets: each cleans up after itself.
    await asyncio.wait((inside, limits, mounts))
    try:
        probes = (*_from_inside(services, inside.result()), *limits.result(), *mounts.result())
    except OSError as error:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "probes",
            "what this host can do could not be probed",
            details=describe(error),
            resolution="make room in the state directory, or raise the limit on open files",
        ) from error
    return claims(services.runtime.capabilities(), probes, cgroups)


def claims(
    claimed: ExecutorCapabilities, probes: tuple[Probe, ...], cgroups: CgroupHost | None
) -> ExecutorCapabilities:
    """Of what the runtime's adapter can set up, that which the probes saw work."""
    works = frozenset(probe.feature for probe in probes if probe.works)
    # A runtime without user namespaces claims none, and its levels are taken for a level lower already.
    spared = frozenset() if claimed.user_namespace else frozenset({Feature.USER_NAMESPACE})
    levels = (level for level in claimed.isolation_levels if _LEVELS.get(level, frozenset(Feature)) <= works | spared)
    denied = frozenset() if Feature.NETWORK_DENY in works else frozenset({NetworkMode.DENY})
    return replace(
        claimed,
        isolation_levels=frozenset(levels),
        network_modes=claimed.network_modes - denied,
        resource_controls=ResourceControls(
            cpu=Feature.CPU_LIMIT in works,
            memory={Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT} <= works,
            pids=Feature.PIDS_LIMIT in works,
            disk=Feature.DISK_LIMIT in works,
        ),
        user_namespace=Feature.USER_NAMESPACE in works,
        seccomp=Feature.SECCOMP in works,
        cgroup="" if cgroups is None else cgroups.mode.value,
        controllers=() if cgroups is None else tuple(sorted(cgroups.controllers)),
        probes=probes,
        probed_at=datetime.now(UTC),
    )


def _from_inside(services: HostServices, sight: SandboxSight) -> tuple[Probe, ...]:
    runtime = services.runtime.name
    if sight.error is None:
        found = sandbox_probe.sandbox_probes(sight.seen, services.own_namespaces, runtime, leftovers=sight.leftovers)
        return (*found, *network_probe.deny_probes(sight.seen))
    error = sight.error
    features = sandbox_probe.FEATURES + network_probe.FEATURES
    brief = f"{error.brief}: {error.details}" if error.details else error.brief
    return sandbox_probe.failed_sandbox(reason_of(error), brief, error.resolution, features)


def _detect() -> CgroupHost | None:
    """The hierarchies as they are now: the executor's own view dates from when it was opened."""
    try:
        return CgroupHost.detect()
    except SandboxError:
        return None


def _limits(services: HostServices, cgroups: CgroupHost | None) -> tuple[Probe, ...]:
    if cgroups is None:
        cure = "mount cgroup2 at /sys/fs/cgroup"
        return tuple(Probe(feature, works=False, details="no cgroups", cure=cure) for feature in sorted(LIMITS))
    probes = _limits_once(services, cgroups)
    # On a machine that is busy enough a limit may be met late: only what fails twice is missing.
    return probes if all(probe.works for probe in probes) else _limits_once(services, cgroups)


def _limits_once(services: HostServices, cgroups: CgroupHost) -> tuple[Probe, ...]:
    """With a ledger, as an attempt has one: should we be killed, the next executor ends what runs and removes it."""
    sandbox = SandboxId.mint()
    group = attempt_group(services.executor_id, sandbox)
    ledger = Ledger.open(str(services.paths.root), sandbox, services.executor_id)
    try:
        ledger.intend("attempt", attempt=PROBE_NAME, name=PROBE_NAME)
        ledger.intend("cgroup", path=group, leaves=[])
        return limit_probes(cgroups, group)
    finally:
        undo(ledger.record(), services.host, cgroups, orphans=False)
        ledger.close_and_remove()


def _mounts(services: HostServices) -> tuple[Probe, ...]:
    """In a directory named as spare ones are, so that it is swept away if we can't remove it ourselves."""
    directory = services.paths.root / "spare" / f"{os.getpid()}-{own_start_time()}-{SandboxId.mint()}"
    with ExitStack() as stack:
        directory.mkdir(mode=0o700, parents=True)
        stack.callback(_remove, directory)
        return file_probes(str(directory))


def _remove(directory: Path) -> None:
    remove_tree(str(directory))
    with suppress(OSError):  # other spare directories are in it
        directory.parent.rmdir()
