"""What a container uses, as containerd's shim reads its cgroup. For people: evidence is read by us."""

from __future__ import annotations

from dataclasses import dataclass

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.containerd.messages import AnyMessage, cgroups_v1, cgroups_v2, tasks


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """Memory in bytes, processor time in seconds."""

    memory: int
    memory_limit: int
    cpu: float
    pids: int
    oom_kills: int


async def read_usage(client: Client, container_id: str) -> ContainerUsage:
    """What a running container uses now.

    :raises ExecutorError: INTERNAL, when the daemon has no figures for it, or none that we can read.
    """
    request = tasks.MetricsRequest(filters=[f"id=={container_id}"])
    found = (await client.call(calls.TASK_METRICS, request)).metrics
    if not found:
        raise _none(f"nothing for {container_id}")
    return _usage(found[0].data)


def _usage(data: AnyMessage) -> ContainerUsage:
    match data.type_url.rpartition("/")[2]:
        case "io.containerd.cgroups.v1.Metrics":
            old = cgroups_v1.Metrics.FromString(data.value)
            memory, cpu = old.memory.usage, old.cpu.usage.total / 1e9
            return ContainerUsage(memory.usage, memory.limit, cpu, old.pids.current, old.memory_oom_control.oom_kill)
        case "io.containerd.cgroups.v2.Metrics":
            new = cgroups_v2.Metrics.FromString(data.value)
            held, cpu = new.memory, new.cpu.usage_usec / 1e6
            return ContainerUsage(held.usage, held.usage_limit, cpu, new.pids.current, new.memory_events.oom_kill)
        case other:
            raise _none(f"figures of type {other!r}")


def _none(details: str) -> ExecutorError:
    brief = "containerd has no figures for the container"
    return ExecutorError(ExecutorErrorKind.INTERNAL, "containerd_metrics", brief, details=details)
