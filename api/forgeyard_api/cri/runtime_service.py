"""`runtime.v1.RuntimeService` over a table of attempts: to look, and where an operator allows it to stop and to run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from forgeyard_api.cri.exec_sync import ExecSync
from forgeyard_api.cri.health import Health
from forgeyard_api.cri.ids import owner, pod_id
from forgeyard_api.cri.info import container_info, pod_info, spec_of
from forgeyard_api.cri.logs import Logs
from forgeyard_api.cri.messages import cri
from forgeyard_api.cri.pods import Pod, Pods, ShownContainer
from forgeyard_api.cri.views import (
    container_message,
    container_status,
    labels_of,
    pod_message,
    pod_status,
    stats_message,
)
from forgeyard_api.observe import audit
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Caller
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import CancellationReason

CRI_VERSION: Final = "0.1.0"
"""What kubelets have always been told."""

_SETTLE_SECONDS: Final = 0.5


class RuntimeService:
    """The calls. Each method takes a message and who asks, and returns a message.

    :param writes: whether anything may be changed through here.
    """

    def __init__(
        self, table: AttemptTable, pods: Pods, logs: Logs, runner: ExecSync, version: str, *, writes: bool
    ) -> None:
        self._table = table
        self._pods = pods
        self._logs = logs
        self._runner = runner
        self._version = version
        self._writes = writes
        self._health = Health(table)

    async def version(self, request: cri.VersionRequest, caller: Caller) -> cri.VersionResponse:
        """All four are needed: a client takes an empty one for a broken runtime."""
        return cri.VersionResponse(
            version=CRI_VERSION, runtime_name="forgeyard", runtime_version=self._version, runtime_api_version="v1"
        )

    async def status(self, request: cri.StatusRequest, caller: Caller) -> cri.StatusResponse:
        """Whether jobs can run here, and be given networks."""
        conditions, runtimes = await self._health.conditions()
        response = cri.StatusResponse(
            status=cri.RuntimeStatus(conditions=conditions),
            runtime_handlers=[cri.RuntimeHandler(name=name) for name in self._table.executors],
        )
        if request.verbose:
            running, queued = self._table.counts
            state = {
                "version": self._version,
                "draining": self._table.draining,
                "running": running,
                "queued": queued,
                "runtimes": runtimes,
            }
            response.info["info"] = json.dumps(state, separators=(",", ":"))
        return response

    # ---- pods

    async def list_pod_sandbox(self, request: cri.ListPodSandboxRequest, caller: Caller) -> cri.ListPodSandboxResponse:
        """Every attempt that passes the filter."""
        wanted = request.filter
        pods = [self._pods.known(view) for view in self._pods.views() if _begins(wanted.id, view)]
        found = [pod_message(pod) for pod in pods if _has(labels_of(pod), wanted.label_selector)]
        if wanted.HasField("state"):
            found = [item for item in found if item.state == wanted.state.state]
        return cri.ListPodSandboxResponse(items=found)

    async def pod_sandbox_status(
        self, request: cri.PodSandboxStatusRequest, caller: Caller
    ) -> cri.PodSandboxStatusResponse:
        """One attempt."""
        pod = await self._looked_at(self._pods.find(request.pod_sandbox_id))
        info = pod_info(pod) if request.verbose else {}
        return cri.PodSandboxStatusResponse(status=pod_status(pod), info=info)

    async def stop_pod_sandbox(self, request: cri.StopPodSandboxRequest, caller: Caller) -> cri.StopPodSandboxResponse:
        """Ask an attempt to stop. It has its grace; returns at once."""
        view = self._pods.find(request.pod_sandbox_id)
        self._may_write("stopp", "`forgeyard stop` ends attempts")
        audit.acted(audit.Event.CANCELLED, caller, view, warning=True, via="cri")
        await self._table.cancel(owner(view), view.attempt_id, CancellationReason.USER)
        return cri.StopPodSandboxResponse()

    # ---- containers

    async def list_containers(self, request: cri.ListContainersRequest, caller: Caller) -> cri.ListContainersResponse:
        """Every container that passes the filter."""
        wanted = request.filter
        found = [
            container_message(pod, item)
            for pod, item in await self._matching(wanted.id, wanted.pod_sandbox_id, wanted.label_selector)
        ]
        if wanted.HasField("state"):
            found = [item for item in found if item.state == wanted.state.state]
        return cri.ListContainersResponse(containers=found)

    async def container_status(
        self, request: cri.ContainerStatusRequest, caller: Caller
    ) -> cri.ContainerStatusResponse:
        """One container. Of an attempt that has just ended, once its log is whole."""
        view, service = self._pods.find_container(request.container_id)
        if view.state is AttemptState.ENDED:
            await self._logs.settle(view, service, _SETTLE_SECONDS)
        pod = await self._looked_at(view)
        item = next(item for item in pod.containers if item.service == service)
        spec = spec_of(item)
        status = container_status(pod, item, spec, await self._logs.shown_path(view, service))
        info = container_info(pod, item, spec) if request.verbose else {}
        return cri.ContainerStatusResponse(status=status, info=info)

    async def container_stats(self, request: cri.ContainerStatsRequest, caller: Caller) -> cri.ContainerStatsResponse:
        """What one container uses."""
        view, service = self._pods.find_container(request.container_id)
        pod = await self._looked_at(view)
        item = next(item for item in pod.containers if item.service == service)
        return cri.ContainerStatsResponse(stats=stats_message(pod, item))

    async def list_container_stats(
        self, request: cri.ListContainerStatsRequest, caller: Caller
    ) -> cri.ListContainerStatsResponse:
        """What all of them use."""
        wanted = request.filter
        found = await self._matching(wanted.id, wanted.pod_sandbox_id, wanted.label_selector)
        return cri.ListContainerStatsResponse(stats=[stats_message(pod, item) for pod, item in found])

    async def exec_sync(self, request: cri.ExecSyncRequest, caller: Caller) -> cri.ExecSyncResponse:
        """Run a command in a job's container, for attempts that take commands."""
        view, service = self._pods.find_container(request.container_id)
        self._may_write("exec", "`forgeyard shell` is for operators")
        if service:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED, "exec_in_service", "commands run in the job's container, not a service's"
            )
        audit.acted(audit.Event.EXEC, caller, view, warning=True, via="cri", program=next(iter(request.cmd), ""))
        ran = await self._runner.run(view, request.cmd, request.timeout)
        return cri.ExecSyncResponse(stdout=ran.stdout, stderr=ran.stderr, exit_code=ran.exit_code)

    # ---- inside

    async def _looked_at(self, view: AttemptView) -> Pod:
        return (await self._pods.look((view,)))[0]

    async def _matching(
        self, container: str, pod: str, labels: Mapping[str, str]
    ) -> Iterable[tuple[Pod, ShownContainer]]:
        """Containers whose id and pod begin so, and that have these labels. Only their attempts are asked after."""
        known = [self._pods.known(view) for view in self._pods.views() if _begins(pod, view)]
        wanted = {
            item.container_id
            for found in known
            for item in found.containers
            if item.container_id.startswith(container) and _has(labels_of(found, item), labels)
        }
        asked = [found.view for found in known if any(item.container_id in wanted for item in found.containers)]
        looked_at = await self._pods.look(asked)
        return [(found, item) for found in looked_at for item in found.containers if item.container_id in wanted]

    def _may_write(self, what: str, instead: str) -> None:
        if not self._writes:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "not_allowed",
                f"this endpoint only shows attempts, and does no {what}",
                resolution=f"set serve.cri_writes, or go without crictl: {instead}",
            )


def _begins(prefix: str, view: AttemptView) -> bool:
    return not prefix or pod_id(view).startswith(prefix) or prefix in (view.sandbox_id, view.attempt_id)


def _has(labels: Mapping[str, str], wanted: Mapping[str, Any]) -> bool:
    return wanted.items() <= labels.items()
