"""A pretended sandbox: all that an execution asks of an attempt, and nothing on the host.

What orders steps, stops them and judges how they ended is the real :class:`forgeyard_executor.Execution`. Only what it
would have done on the host is left out.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forgeyard_executor.planning import Planned
from forgeyard_executor.steps import ResolvedStep
from forgeyard_executor.testing.fake_container import FakeContainer
from forgeyard_executor.testing.fake_files import collect_fake
from forgeyard_executor.testing.fake_output import FakeOutput
from forgeyard_executor.testing.fake_run import FakeRun, FakeStep
from forgeyard_executor.testing.fake_services import FakeLauncher
from forgeyard_model.cache import CacheReport
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job, Step
from forgeyard_model.plan import ContainerPlan, RootfsPlan
from forgeyard_model.request import ExecutionRequest, impurities
from forgeyard_model.result import (
    CollectedOutput,
    Evidence,
    ExecutionOutcome,
    MemoryEvidence,
    PidsEvidence,
    Provenance,
    ResourceUsage,
    StepResult,
)
from forgeyard_services.supervisor import ServiceFailure, ServiceSet

RUNTIME: Final = "fake 1.0"


@dataclass(frozen=True, slots=True)
class FakePrepared:
    """A prepared attempt of which nothing is made."""

    sandbox_id: SandboxId
    context: AttemptContext
    job: Job
    behaviour: FakeRun
    request: ExecutionRequest
    rootfs: RootfsPlan
    planned: Planned
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> ContainerPlan:
        """What would run."""
        return self.planned.plan

    @property
    def bundle_digest(self) -> str:
        """The same for the same job."""
        return "sha256:" + hashlib.sha256(repr(self.job).encode()).hexdigest()


class FakeSandbox:
    """One attempt's.

    :ivar steps_run: every step that was run, in order.
    :ivar at_end: called when the job comes to the end that its `FakeRun` asks for.
    """

    network = None

    def __init__(self, prepared: FakePrepared) -> None:
        behaviour, services = prepared.behaviour, prepared.request.spec.services
        self.prepared = prepared
        self.request = prepared.request
        self.sandbox = prepared.sandbox_id
        self.rootfs = prepared.rootfs
        self.planned = prepared.planned
        self.phases: dict[str, float] = {}
        self.container = FakeContainer()
        self.spool = FakeOutput()
        self.steps_run: list[Step] = []
        self.at_end: Callable[[ExecutionOutcome], None] = lambda outcome: None
        self.reached = False
        self.launcher = FakeLauncher(services, behaviour)
        self.services = self.launcher.containers
        self.supervisor = ServiceSet(services, self.launcher) if services else None
        self.services_up: asyncio.Task[ServiceFailure | None] | None = None
        if self.supervisor is not None:
            bringing_up = self.supervisor.start(timeout=self.request.timeouts.services)
            self.services_up = asyncio.ensure_future(bringing_up)
        self._spoken = bool(behaviour.services)
        if not self._spoken:
            self._speak()

    @property
    def steps(self) -> FakeSandbox:
        """Who runs steps in it."""
        return self

    async def run(self, index: int, resolved: ResolvedStep) -> StepResult:
        """Run one step as its script says.

        :raises ShimDied: it was killed.
        """
        if self._spoken:
            self._speak()
        step, behaviour = resolved.step, self.prepared.behaviour
        planned = len(self.request.spec.steps)
        script = behaviour.step(step, last=index == planned - 1)
        if index >= planned and step.name not in behaviour.steps:  # one that was sent later: it never holds
            script = FakeStep(exit_code=behaviour.exit_code)
        self.steps_run.append(step)
        self.spool.write("stdout", script.output)
        self.spool.write("stderr", script.error_output)
        result = await self.container.run(step, script)
        if index == planned - 1 and behaviour.outcome is not None:
            await self._come_to(behaviour.outcome)
        return result

    async def _come_to(self, outcome: ExecutionOutcome) -> None:
        self.reached = True
        self.at_end(outcome)
        if outcome in _FROM_OUTSIDE:
            await asyncio.sleep(0)  # what stops it is seen before the steps' own end

    def _speak(self) -> None:
        self._spoken = False
        self.spool.write("stdout", self.prepared.behaviour.output)
        self.spool.write("stderr", self.prepared.behaviour.error_output)

    async def stop_services(self) -> None:
        """Kill them, whatever they were at. Repeating it is no error."""
        if self.supervisor is None or self.services_up is None:
            return
        if not self.services_up.done():
            self.services_up.cancel()
        await asyncio.wait((self.services_up,))
        await self.supervisor.stop()

    async def read_evidence(self) -> tuple[Evidence, ResourceUsage]:
        """What the kernel would have counted for a job that comes to its outcome."""
        limits = self.request.limits
        outcome = self.prepared.behaviour.outcome if self.reached else None
        if outcome is ExecutionOutcome.OUT_OF_MEMORY:
            return Evidence(memory=MemoryEvidence(limits.memory, limits.memory, 1)), ResourceUsage()
        if outcome is ExecutionOutcome.RESOURCE_EXCEEDED:
            return Evidence(pids=PidsEvidence(limits.pids, limits.pids, 1)), ResourceUsage()
        return Evidence(), ResourceUsage()

    async def collect_outputs(self) -> tuple[CollectedOutput, ...]:
        """What the job left."""
        destination = self.request.workspace.output
        return collect_fake(self.prepared.behaviour.files, self.request.spec.outputs, destination)

    async def save_caches(self, *, keep: bool) -> tuple[CacheReport, ...]:
        """It has none."""
        return ()

    async def clean_up(self) -> tuple[str, ...]:
        """End what is written, so that readers come to their end."""
        await self.stop_services()
        self.spool.close()
        for container in self.services:
            container.member.spool.close()
        return ()

    def provenance(self) -> Provenance:
        """What it was, and that nothing ran."""
        request, digest = self.request, self.prepared.bundle_digest
        return Provenance(
            profile=request.profile,
            isolation=self.planned.isolation,
            user_namespace=False,
            network=request.network.mode,
            seccomp="none",
            runtime=RUNTIME,
            rootfs=self.rootfs.identity,
            plan_digest=digest,
            bundle_digest=digest,
            impure=("nothing ran", *impurities(request)),
        )


_FROM_OUTSIDE: Final = frozenset(
    {ExecutionOutcome.TIMED_OUT, ExecutionOutcome.CANCELLED, ExecutionOutcome.INFRASTRUCTURE_FAILURE}
)
