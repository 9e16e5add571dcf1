"""The whole life of one container with our shim in it: launch, gate, steps, end of the tree, evidence."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from forgeyard_host.cgroups import AppliedLimits, AttemptCgroup
from forgeyard_host.processes import ProcessFacts, process_facts, wait_ended
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.live import LiveUsage
from forgeyard_model.plan import Bundle, ContainerPlan, NetworkAttachment, Placement, RootfsPlan
from forgeyard_model.result import Evidence, ResourceUsage
from forgeyard_process_shim.channel import ShimChannel, ShimDied
from forgeyard_process_shim.protocol import BackgroundExited, Exited, NoExec, Started, StepCommand
from forgeyard_runtimes.contract import ContainerRef, ContainerRuntime, Stdio
from forgeyard_runtimes.counted import Counted, not_below
from forgeyard_runtimes.gate import verify_applied
from forgeyard_runtimes.gate_limits import verify_limits, verify_membership
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.spool import Spool

audit: Final = logging.getLogger("forgeyard.audit")

HELLO_DEADLINE: Final = 30.0
KILL_DEADLINE: Final = 10.0
"""Seconds for a killed tree to be gone. A process in uninterruptible sleep can hold it up longer: an error then."""

LEAF: Final = "job"
"""The job's own group below its attempt's; each service has one beside it."""


@dataclass(frozen=True, slots=True)
class ContainerParts:
    """What a container is made of; its owner made them and gives them back.

    :param leaf: its group below `cgroup`.
    :param plumb: puts the network of the process with that pid into place, before anything runs there.
    """

    runtime: ContainerRuntime
    ref: ContainerRef
    plan: ContainerPlan
    placement: Placement
    channel: ShimChannel
    spool: Spool
    cgroup: AttemptCgroup
    own_namespaces: Mapping[str, int]
    leaf: str = LEAF
    plumb: Callable[[int], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class AtGate:
    """What a runtime made of a bundle, while PID 1 waits at its gate.

    :param leaf: the control group that should hold it. limits: of that group.
    :param spec: what the runtime says that it applied. mountinfo: what the kernel says of PID 1's mounts.
    """

    facts: ProcessFacts
    leaf: str
    limits: AppliedLimits
    spec: Mapping[str, Any]
    mountinfo: str


class JobContainer:
    """One container. `launch` once, then steps, then `kill`; evidence stays readable until removal."""

    def __init__(self, parts: ContainerParts) -> None:
        self._parts = parts
        self._pidfd = -1
        # One watcher: the event loop takes a single reader per descriptor.
        self._death: asyncio.Future[None] | None = None
        self._starting: asyncio.Future[int] | None = None
        self._counted = Counted(parts.cgroup, parts.leaf)
        self.pid = 0
        self.stricter: tuple[str, ...] = ()
        """Where its runtime is stricter than its bundle, and did not declare that it always is: ``field: what``."""

    async def launch(
        self,
        bundle: Bundle,
        rootfs: RootfsPlan,
        network: NetworkAttachment,
        *,
        phase: Callable[[str, float], None],
    ) -> None:
        """Start PID 1, check at the gate what was applied, and let it go.

        :param phase: told the name and seconds of each part as it ends.
        :raises ForgeyardError: the container may exist then; call `kill`.
        """
        parts = self._parts
        clock = time.monotonic()
        await self._reach_gate(bundle, rootfs, network)
        phase("start", time.monotonic() - clock)
        clock = time.monotonic()
        try:
            await self._audited(self._verify)
            if not parts.runtime.literal:
                await self._audited(partial(self._read_back, bundle))
            if parts.plumb is not None:
                await parts.plumb(self.pid)
        except BaseException:
            await self._abandon_start()
            raise
        parts.spool.attach(*parts.channel.take_output())
        parts.channel.release()
        phase("gate", time.monotonic() - clock)

    async def inspect(self, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment) -> AtGate:
        """In the place of `launch`: start PID 1 up to its gate, and say what was applied. The gate stays shut.

        :raises ForgeyardError: it could not be started or looked at. Call `kill` in any case.
        """
        parts = self._parts
        await self._reach_gate(bundle, rootfs, network)
        try:
            facts = await self._identified()
            spec, mounts = await asyncio.to_thread(self._look)
            leaf = self._counted.leaf
            return AtGate(facts, parts.cgroup.leaf(leaf), parts.cgroup.applied(leaf), spec, mounts)
        except (FileNotFoundError, ProcessLookupError) as error:
            await self._abandon_start()
            raise _pid1_gone() from error
        except BaseException:
            await self._abandon_start()
            raise

    async def run_step(self, command: StepCommand) -> Exited | NoExec:
        """Run one step to its end.

        :raises ShimDied: PID 1 is gone; nothing of the container runs any more.
        """
        return await self._parts.channel.run_step(command)

    async def start_background(self, command: StepCommand) -> Started | NoExec | BackgroundExited:
        """Start a step that lives on beside the next ones.

        :raises ShimDied: as with `run_step`.
        """
        return await self._parts.channel.start_background(command)

    def signal_step(self, signum: int) -> None:
        """Signal the process group of the running step; none running is no error."""
        self._parts.channel.signal(signum)

    def kill_step(self) -> None:
        """SIGKILL the running step and what it started; the sandbox lives on."""
        self._parts.channel.kill_step()

    async def kill(self) -> None:
        """SIGKILL PID 1 and with it all of its pid namespace. Safe at any time, also before or after the end.

        The kernel lets PID 1's end be seen only when the last process of the namespace is gone. That no other
        process is in the container's cgroup shows when that is removed: only an empty one can be.

        :raises SandboxError: CLEANUP_FAILED, when something survives KILL_DEADLINE.
        :raises ForgeyardError: what the runtime said of a start that it could not complete.
        """
        parts = self._parts
        starting, self._starting = self._starting, None
        if self._pidfd >= 0:
            if not parts.runtime.literal:
                # An engine takes the group away as soon as it sees PID 1 dead.
                self._counted.remember()
            await parts.runtime.kill(parts.ref, self._pidfd)
            if not await self._dead_within(KILL_DEADLINE):
                raise _survives(parts.ref)
        await parts.spool.close_input()
        parts.channel.close()
        self._let_go()
        if starting is not None:
            await _ended(starting)

    @property
    def death(self) -> asyncio.Future[None]:
        """Done once PID 1 is dead, whoever ended it. To be looked at, never cancelled.

        :raises ExecutorError: before the launch.
        """
        if self._death is None:
            raise _pid1_gone()
        return self._death

    async def _dead_within(self, seconds: float) -> bool:
        if self._death is not None:
            await asyncio.wait((self._death,), timeout=seconds)
        return self._death is None or self._death.done()

    def _let_go(self) -> None:
        if self._pidfd < 0:
            return
        if self._death is not None:
            self._death.cancel()
        os.close(self._pidfd)
        self._pidfd = -1

    def evidence(self) -> Evidence:
        """What the kernel counted for this container, from its cgroup."""
        return self._counted.evidence()

    def live(self) -> LiveUsage:
        """What it uses now, but for its disk."""
        return self._counted.live()

    def usage(self) -> ResourceUsage:
        """What it used, as far as the kernel tells."""
        return self._counted.usage()

    async def loss(self) -> ForgeyardError | None:
        """Once PID 1 died unasked: whether its engine took it along.

        :raises ForgeyardError: the engine does not say.
        """
        return await self._parts.runtime.loss(self._parts.ref)

    async def _runtime_pid(self) -> int:
        if self._starting is None:
            raise _pid1_gone()
        return await asyncio.shield(self._starting)

    async def _abandon_start(self) -> None:
        """After a failed launch: end the runtime's command. Its own error, if it had one, is the launch's."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await shielded(asyncio.wait((starting,)))
            if not starting.cancelled():
                starting.exception()

    async def _meet_shim(self) -> None:
        """Wait for the shim's first word, which may come before the runtime's command has ended.

        The runtime's failure, PID 1's death or its silence is a failed start.
        """
        starting = self._starting
        if starting is None:
            raise _pid1_gone()
        hello = asyncio.ensure_future(self._parts.channel.hello(timeout=HELLO_DEADLINE))
        try:
            await asyncio.wait((hello, starting), return_when=asyncio.FIRST_COMPLETED)
            if not hello.done():
                self._hold(starting.result())
                await asyncio.wait((hello, self.death), return_when=asyncio.FIRST_COMPLETED)
            if not hello.done():
                raise _no_hello("it died")
            hello.result()
        except ShimDied as error:
            raise _no_hello(str(error)) from error
        finally:
            hello.cancel()

    async def _reach_gate(self, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment) -> None:
        """Start PID 1, which then waits. Its channel can't be opened again after this."""
        parts = self._parts
        await parts.runtime.create(parts.ref, bundle, rootfs, network, Stdio())
        inherited = parts.placement.netns if parts.runtime.network_join == "inherited" else None
        self._starting = asyncio.ensure_future(parts.runtime.start(parts.ref, netns=inherited))
        try:
            await self._meet_shim()
            parts.channel.unlink()
        except BaseException:
            await self._abandon_start()
            raise

    async def _verify(self) -> None:
        """Be sure that PID 1 is what the plan says."""
        parts, facts = self._parts, await self._identified()
        verify_applied(facts, parts.plan, parts.placement, parts.own_namespaces)
        verify_membership(facts.cgroups, parts.cgroup.leaf(self._counted.leaf), parts.plan.limits)
        verify_limits(parts.cgroup.applied(self._counted.leaf), parts.plan.limits)

    async def _identified(self) -> ProcessFacts:
        """Hold PID 1 by pidfd, and be sure that it is the container's."""
        parts = self._parts
        if not parts.runtime.literal:
            pid = await self._runtime_pid()
            self._counted.lies_at(parts.runtime.cgroup(parts.ref))
            (parts.ref.directory / "pid").write_text(str(pid))  # where a literal runtime puts it, and others look
            if self._pidfd < 0:
                self._hold(pid)
        elif self._pidfd < 0:
            # Beside the end of the runtime's command, where its group already tells which process it is.
            members = parts.cgroup.processes(parts.leaf)
            self._hold(members[0] if len(members) == 1 else await self._runtime_pid())
        try:
            facts = process_facts(self.pid)
        except ProcessLookupError as error:
            raise _pid1_gone() from error
        # Read after the pidfd was taken: a later owner of the number would not be in the container's group.
        leaf = parts.cgroup.leaf(self._counted.leaf)
        if leaf not in facts.cgroups.values():
            if wait_ended(self._pidfd, 0):
                raise _pid1_gone()
            raise not_below(facts.cgroups.values(), leaf)
        return facts

    def _look(self) -> tuple[Mapping[str, Any], str]:
        """What the runtime says that it applied, and what the kernel says of PID 1's mounts. Blocking."""
        spec = self._parts.runtime.effective_spec(self._parts.ref)
        return spec, Path(f"/proc/{self.pid}/mountinfo").read_text(errors="surrogateescape")

    async def _read_back(self, bundle: Bundle) -> None:
        """Compare what an engine really runs with the bundle that it was given.

        :raises SandboxError: it is weaker; the container must then be destroyed unreleased.
        """
        # Imported here: a literal runtime needs none of it.
        from forgeyard_runtimes.comparison import undeclared, verify_effective

        runtime, ref = self._parts.runtime, self._parts.ref

        def compared() -> tuple[str, ...]:
            spec = runtime.effective_spec(ref)
            found = verify_effective(json.loads(bundle.config), spec, runtime.declared_weaker).stricter
            return undeclared(found, runtime.declared_stricter)

        self.stricter = await asyncio.to_thread(compared)

    async def _audited(self, look: Callable[[], Awaitable[None]]) -> None:
        """`look`, whose refusal to let the container go is an event for whoever watches over this host."""
        try:
            await look()
        except ForgeyardError as error:
            if isinstance(error, ExecutorError) and error.kind is ExecutorErrorKind.SPAWN_FAILED:
                raise  # it came to no container
            ref, runtime = self._parts.ref, self._parts.runtime
            audit.error("%s at %s: %s", ref.container_id, runtime.name, error, extra={"container": ref.container_id})
            raise

    def _hold(self, pid: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise _pid1_gone() from error
        self.pid = pid
        self._death = asyncio.ensure_future(self._parts.runtime.wait(self._pidfd))
        if not self._parts.runtime.literal:
            self._death.add_done_callback(self._remember_counts)

    def _remember_counts(self, death: asyncio.Future[None]) -> None:
        """At once: the engine, which has heard of it as well, takes the group away next."""
        if not death.cancelled():
            self._counted.remember()


async def _ended(starting: asyncio.Future[int]) -> None:
    """The runtime's command is over, or was cancelled with its launch; its failure is not hidden."""
    await asyncio.wait((starting,))
    if not starting.cancelled():
        starting.result()


def _pid1_gone() -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.SPAWN_FAILED, "pid1_gone", "the container ended before its first step could start"
    )


def _no_hello(details: str) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.SPAWN_FAILED, "shim_silent", "PID 1 of the sandbox did not report", details=details
    )


def _survives(ref: ContainerRef) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.CLEANUP_FAILED,
        "tree_survives",
        f"processes of {ref.container_id} survive SIGKILL",
        resolution="look for processes in uninterruptible sleep (state D); `forgeyard gc` tries again",
    )
