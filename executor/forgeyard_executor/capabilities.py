"""What this executor can do here: known from probes, kept for a while, and a reason to refuse when it goes away.

A job never waits for probes. Before the first ones are done, and beside them, each job rests on what its own
preparation and the gate verify; the probes make a refusal early, and say what is missing and what to do about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.policy import NetworkMode, SourceMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.requirements import needs_user_namespace

if TYPE_CHECKING:
    from forgeyard_networks.manager import NetworkCapabilities

DEFAULTS: Final = ExecutorConfig()

log: Final = logging.getLogger("forgeyard.executor")

TTL: Final = 45.0
"""Seconds that a result is good for: with the probing itself well below the minute in which a loss must be noticed."""

SETTLED: Final = 5.0
"""Seconds an executor has to be open before it probes unasked: one that runs a single job never pays for it."""

PROBE_NAME: Final = "forgeyard-probe"
"""Name of the job that looks at its own sandbox."""

DOUBT_PAUSE: Final = 2.0
"""Seconds between two probings that failed attempts have asked for."""

ALWAYS: Final = frozenset(
    {
        Feature.USER_NAMESPACE,
        Feature.MOUNT_NAMESPACE,
        Feature.PID_NAMESPACE,
        Feature.CGROUP_NAMESPACE,
        Feature.SECCOMP,
        Feature.NO_NEW_PRIVS,
        Feature.CAPABILITY_DROP,
        Feature.KILL_TREE,
        Feature.READ_ONLY_BIND,
        Feature.TMPFS,
        Feature.IDMAPPED_MOUNT,
    }
)
"""What every sandbox is made of."""

LIMITS: Final = frozenset(
    {Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.PIDS_LIMIT, Feature.CPU_LIMIT, Feature.OOM_EVIDENCE}
)
NETWORK: Final = frozenset({Feature.NETWORK_NAMESPACE, Feature.NETWORK_DENY})
STANDARD_CI: Final = ALWAYS | LIMITS | NETWORK | {Feature.OVERLAY}
"""What a job of the profile standard-ci needs, with a source and without a disk limit."""


class CapabilityCache:
    """The latest result of `probe`, and the one task that may be getting the next."""

    def __init__(self, probe: Callable[[], Awaitable[ExecutorCapabilities]], *, ttl: float = TTL) -> None:
        self._probe = probe
        self._ttl = ttl
        self._opened = time.monotonic()
        self._asked = -DOUBT_PAUSE
        self._found: ExecutorCapabilities | None = None
        self._at = 0.0
        self._task: asyncio.Task[ExecutorCapabilities] | None = None
        self._news = asyncio.Condition()

    async def get(self, *, renew: bool = False) -> ExecutorCapabilities:
        """A result that is not older than the TTL, or is `renew`-ed; waits for the probes when there is none.

        :raises ForgeyardError: when probing itself is not possible.
        """
        if renew or self._found is None or self._age() > self._ttl:
            return await asyncio.shield(self._refresh())
        return self._found

    async def changes(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """A result, and each one that differs from the one before: looked for by the TTL, and when somebody doubts.

        :raises ForgeyardError: when probing itself is not possible.
        """
        seen = await self.get()
        yield seen
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl), self._news:
                    await self._news.wait()
            found = await self.get()
            if _differ(found, seen):
                seen = found
                yield seen

    def known(self) -> ExecutorCapabilities | None:
        """A result that is still good, at once; None otherwise. An old one is renewed in the background."""
        if self._found is not None and self._age() <= self._ttl:
            return self._found
        if self._settled():
            self._refresh()
        return None

    def doubt(self) -> None:
        """An attempt failed or was refused, so that something may have changed: probe again in the background."""
        if self._settled() and time.monotonic() - max(self._asked, self._at) >= DOUBT_PAUSE:
            self._asked = time.monotonic()
            self._refresh()

    async def close(self) -> None:
        """Wait for the probes that run: they clean up after themselves."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _settled(self) -> bool:
        return self._found is not None or time.monotonic() - self._opened >= SETTLED

    def _age(self) -> float:
        return time.monotonic() - self._at

    def _refresh(self) -> asyncio.Task[ExecutorCapabilities]:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._renew(), name="forgeyard probes")
            self._task.add_done_callback(_note_failure)
        return self._task

    async def _renew(self) -> ExecutorCapabilities:
        self._found = found = await self._probe()
        self._at = time.monotonic()
        async with self._news:
            self._news.notify_all()
        return found


def _differ(one: ExecutorCapabilities, other: ExecutorCapabilities) -> bool:
    """Whether more than the moment of the probes has changed."""
    return replace(one, probed_at=None) != replace(other, probed_at=None)


def _note_failure(task: asyncio.Task[ExecutorCapabilities]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("probing what this host can do failed: %s", error)


def needed(request: ExecutionRequest, config: ExecutorConfig = DEFAULTS) -> Iterator[Feature]:
    """The features that a sandbox for `request` is made of under `config`."""
    limits = request.limits
    spared = frozenset() if needs_user_namespace(request, config) else frozenset({Feature.USER_NAMESPACE})
    yield from sorted(ALWAYS - spared)
    if request.network.mode is not NetworkMode.HOST:
        yield Feature.NETWORK_NAMESPACE
    if request.network.mode is NetworkMode.DENY:
        yield Feature.NETWORK_DENY
    if limits.memory is not None:
        yield from (Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.OOM_EVIDENCE)
    if limits.pids is not None:
        yield Feature.PIDS_LIMIT
    if limits.cpus is not None:
        yield Feature.CPU_LIMIT
    if limits.disk is not None:
        yield Feature.DISK_LIMIT
    cow = request.workspace.source is not None and request.sandbox.filesystem.source_mode is SourceMode.COW
    if cow or request.spec.image is not None:
        yield Feature.OVERLAY


def refuse_missing(
    request: ExecutionRequest, capabilities: ExecutorCapabilities | None, config: ExecutorConfig = DEFAULTS
) -> None:
    """Refuse `request` when a probe saw that something it needs does not work.

    :param capabilities: None: nothing is known at the moment, and the gate decides alone.
    :raises SandboxError: UNSUPPORTED_ISOLATION or RESOURCE_LIMIT_FAILED, with the probe's own words and cure.
    """
    if capabilities is None:
        return
    wanted = frozenset(needed(request, config))
    for probe in capabilities.probes:
        if probe.feature in wanted and probe.seen and not probe.works:
            raise _missing(probe)


def conclusive(capabilities: ExecutorCapabilities | None) -> ExecutorCapabilities | None:
    """`capabilities`, if every probe could be carried out.

    One that could not be (its sandbox did not start, for a moment's want of something) claims nothing, but is no
    reason to refuse jobs: they rest on the gate, as before the first probe.
    """
    if capabilities is None or not all(probe.seen for probe in capabilities.probes):
        return None
    return capabilities


def with_networks(found: ExecutorCapabilities, networks: NetworkCapabilities) -> ExecutorCapabilities:
    """`found`, with what networks of jobs' own this host can make."""
    works = {NetworkMode.RESTRICTED, NetworkMode.ALLOW} <= networks.modes
    probe = Probe(Feature.NETWORK_EGRESS, works, networks.backend, networks.problem, networks.cure)
    modes = found.network_modes | (networks.modes - {NetworkMode.DENY, NetworkMode.HOST})
    return replace(found, network_modes=modes, probes=(*found.probes, probe))


def _missing(probe: Probe) -> SandboxError:
    limit = probe.feature in LIMITS or probe.feature is Feature.DISK_LIMIT
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED if limit else SandboxErrorKind.UNSUPPORTED_ISOLATION,
        f"no_{probe.feature.value}",
        f"this host does not provide {probe.feature.value}, which the job needs",
        details=probe.details,
        resolution=probe.cure,
    )


def reason_of(error: ForgeyardError) -> str:
    """The reason word of an error, that of the sandbox's own where there is one."""
    sandbox = getattr(error, "sandbox", None)
    return str(getattr(sandbox or error, "reason", ""))
