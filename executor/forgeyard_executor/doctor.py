"""What `runner sandbox doctor` and `test` report: does this host do what jobs need, and does a sandbox hold?"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forgeyard_executor.capabilities import STANDARD_CI
from forgeyard_executor.capabilities_probe import MEMORY, SandboxSight
from forgeyard_executor.executor import Executor
from forgeyard_host.probes_conditions import HostCondition, Status, host_conditions, judge
from forgeyard_host.probes_exposed import exposed_files
from forgeyard_host.processes import process_facts
from forgeyard_model.capabilities import ExecutorCapabilities, Feature
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ForgeyardError
from forgeyard_networks.probe import denied
from forgeyard_process_shim.binary import shim_binary
from forgeyard_process_shim.hostroot_layout import read_layout
from forgeyard_runtimes.probe import filtered, mapped, namespaces, refused, unprivileged


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found. `capabilities`: None when no executor could be opened, which is a condition then."""

    capabilities: ExecutorCapabilities | None
    conditions: tuple[HostCondition, ...]

    @property
    def missing(self) -> tuple[Feature, ...]:
        """What a job of the profile standard-ci needs and this host was not seen to provide."""
        found = self.capabilities
        return tuple(sorted(feature for feature in STANDARD_CI if found is None or not found.has(feature)))

    @property
    def healthy(self) -> bool:
        """Whether jobs of the profile standard-ci can run here. Warnings do not count."""
        return not self.missing and all(item.status is not Status.PROBLEM for item in self.conditions)


@dataclass(frozen=True, slots=True)
class IsolationCheck:
    """One thing that a sandbox has to keep a job from. `seen`: what the job met."""

    name: str
    held: bool
    seen: str


async def examine(config: ExecutorConfig) -> DoctorReport:
    """Look at the host and probe every feature; a few seconds, most of them for the files below /usr.

    Never raises for what is wrong with the host: that is what it reports.
    """
    exposed = asyncio.ensure_future(asyncio.to_thread(_exposed))
    conditions = [*host_conditions(config.state_dir), _shim(), _compiler()]
    found = None
    try:
        async with Executor.open(config=config) as executor:
            found = await executor.capabilities(renew=True)
        conditions.append(judge("executor", f"ready, with {found.runtime}"))
    except ForgeyardError as error:
        cure = error.resolution or "see the details"
        conditions.append(judge("executor", f"{error.brief} {error.details}".strip(), problem=cure))
    return DoctorReport(found, (*conditions, *await exposed))


async def check_isolation_of(config: ExecutorConfig) -> tuple[IsolationCheck, ...]:
    """Run a job that tries, harmlessly, what a sandbox has to prevent.

    :raises ForgeyardError: when there is no sandbox to try it in.
    """
    async with Executor.open(config=config) as executor:
        sight = await executor.inspect_sandbox()
    if sight.error is not None:
        raise sight.error
    return isolation_checks(sight, process_facts(os.getpid()).namespaces)


def isolation_checks(sight: SandboxSight, own_namespaces: Mapping[str, int]) -> tuple[IsolationCheck, ...]:
    """What the report of a sandbox says about its walls."""
    seen = sight.seen
    inside = namespaces(seen)
    shared = [name for name in _OWN if inside.get(name) in (None, own_namespaces.get(name))]
    read_only = "Read-only file system"
    return (
        _check(seen, "the host's /etc/shadow is out of sight", refused(seen, "shadow"), "shadow"),
        _check(seen, "the network is denied", denied(seen), "connect"),
        _check(seen, "the root is read-only", refused(seen, "root", read_only), "root"),
        _check(seen, "the host's /usr is read-only", refused(seen, "usr", read_only), "usr"),
        _check(seen, "no capability is held", unprivileged(seen), "chown"),
        IsolationCheck("no privilege can be gained", seen.get("NoNewPrivs") == "1", "no_new_privs"),
        _check(seen, "system calls are filtered", filtered(seen), "unshare"),
        _check(seen, "mounting is refused", refused(seen, "mount"), "mount"),
        _check(seen, "making a device is refused", refused(seen, "mknod"), "mknod"),
        IsolationCheck(
            "other processes are out of sight",
            seen.get("processes") == "2",
            f"{seen.get('processes', 'no')} processes, PID 1 included",
        ),
        IsolationCheck("every namespace is its own", not shared, f"shared: {', '.join(shared) or 'none'}"),
        IsolationCheck("ids are mapped", mapped(seen), f"root is uid {_second(seen.get('uid_map', ''))} outside"),
        IsolationCheck(
            "the job sees its own memory limit",
            seen.get("memory") == str(MEMORY),
            f"{seen.get('memory', 'no')} bytes of {MEMORY}",
        ),
        IsolationCheck(
            "nothing outlives its step",
            sight.leftovers >= 2 and seen.get("after") == "2",
            f"{sight.leftovers} processes that ignored TERM or left their session were ended",
        ),
    )


_OWN = ("pid", "mnt", "net", "user", "ipc", "uts", "cgroup")


def _check(seen: Mapping[str, str], name: str, held: bool, key: str) -> IsolationCheck:
    return IsolationCheck(name, held, seen.get(key, "not tried"))


def _second(text: str) -> str:
    words = text.split()
    return words[1] if len(words) > 1 else "unknown"


def _exposed() -> tuple[HostCondition, ...]:
    return exposed_files(shows=read_layout(Path("/"), local=False, opt=False).shows)


def _compiler() -> HostCondition:
    """Jobs bring the compilers they use; ours only builds the shim, from a source tree."""
    found = next((path for name in ("musl-gcc", "gcc", "cc") if (path := shutil.which(name))), None)
    if found is not None:
        return judge("compiler", found)
    warning = "only needed to build the shim from source: apt-get install musl-tools; a wheel brings it built"
    return judge("compiler", "none in PATH", warning=warning)


def _shim() -> HostCondition:
    try:
        return judge("shim", str(shim_binary().name))
    except ForgeyardError as error:
        return judge("shim", error.brief, problem=f"{error.resolution} (needs cc and a static C library)")
