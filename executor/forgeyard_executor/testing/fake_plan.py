"""A job made into a plan as the executor does it, with the same refusals; of an image nothing is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from forgeyard_executor.outputs import check_destination
from forgeyard_executor.planning import plan_request, process_mode_user
from forgeyard_executor.sources import canonical_request
from forgeyard_executor.testing.fake_run import FakeRun
from forgeyard_executor.testing.fake_sandbox import FakePrepared
from forgeyard_model.capabilities import ExecutorCapabilities, ExecutorKind, Feature, Probe
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job
from forgeyard_model.plan import JobUser, RootfsPlan
from forgeyard_model.policy import IsolationLevel
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job

_OPEN_FILES: Final = 1 << 20
_IDENTITY: Final = "sha256:" + "0" * 64


def plan_fake(context: AttemptContext, job: Job, behaviour: FakeRun, workspace: PreparedWorkspace) -> FakePrepared:
    """Expand `job` by its profile, check it and resolve its steps.

    :raises ForgeyardError: as the executor refuses the same job on a host that can do everything.
    """
    request = request_from_job(job, context=context, workspace=workspace)
    request = canonical_request(request, Path("/nonexistent/forgeyard"))
    check_destination(request.workspace.output)
    rootfs = _rootfs(request)
    planned = plan_request(
        request,
        rootfs,
        isolation=IsolationLevel.NONE,
        nofile_ceiling=_OPEN_FILES,
        networked=bool(request.spec.services),
    )
    return FakePrepared(SandboxId.mint(), context, job, behaviour, request, rootfs, planned, planned.notes)


def _rootfs(request: ExecutionRequest) -> RootfsPlan:
    if request.spec.image is None:
        user = process_mode_user(request.spec.user)
        return RootfsPlan(ExecutorKind.PROCESS, (), _IDENTITY, writable=True, user=user)
    user = JobUser(0, 0, name="root") if request.spec.user in ("root", "0") else JobUser(1000, 1000)
    return RootfsPlan(ExecutorKind.CONTAINER, (), _IDENTITY, writable=True, user=user, cmd=("/bin/sh",))


def without(known: ExecutorCapabilities, feature: Feature, details: str, cure: str) -> ExecutorCapabilities:
    """`known`, after a probe that saw that `feature` does not work."""
    others = tuple(probe for probe in known.probes if probe.feature is not feature)
    lost = Probe(feature, works=False, details=details or "taken away", cure=cure)
    return replace(known, probes=(*others, lost))
