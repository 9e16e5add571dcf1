"""What dead executors left at containerd: containers first, then snapshots, then leases. Ours and only ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from forgeyard_model.errors import ForgeyardError
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import QUERY_DEADLINE, Client
from forgeyard_runtimes.containerd.errors import Code, expecting
from forgeyard_runtimes.containerd.messages import containers, leases, snapshots, tasks
from forgeyard_runtimes.containerd.settings import ContainerdSettings, owned_by
from forgeyard_runtimes.containerd.task import STATUS, remove_container
from forgeyard_runtimes.contract import ContainerStatus, SweepReport
from forgeyard_runtimes.sweep import Kind, Leftover, sweep_kinds

_ENDED: Final = (ContainerStatus.STOPPED, ContainerStatus.ABSENT)


async def sweep(client: Client, settings: ContainerdSettings, alive: Callable[[str], bool]) -> SweepReport:
    """Remove what is labelled with our state directory and belongs to a sandbox that is not alive.

    An image stays for the next job, until the executor's own store has forgotten it.

    :param alive: whether the sandbox of that id is.
    :raises DaemonError: the daemon can't be asked at all: nothing can be said then of what is left.
    """
    from forgeyard_runtimes.containerd.images import sweep_images  # which removes snapshots and leases as this does

    kinds = (
        Kind("container", partial(_containers, client, settings)),
        Kind("snapshot", partial(_snapshots, client, settings)),
        Kind("lease", partial(_leases, client, settings)),
        Kind("image", partial(sweep_images, client, settings)),
    )
    return await sweep_kinds(kinds, alive)


async def _containers(client: Client, settings: ContainerdSettings) -> list[Leftover]:
    request = containers.ListContainersRequest(filters=[owned_by(settings)])
    answer = await client.call(calls.CONTAINER_LIST, request, patient=True)
    states = await _states(client) if answer.containers else {}
    return [
        Leftover(
            record.id,
            record.labels,
            partial(remove_container, client, record.id),
            running=states.get(record.id, ContainerStatus.ABSENT) not in _ENDED,
        )
        for record in answer.containers
    ]


async def _states(client: Client) -> dict[str, ContainerStatus]:
    """Of the containers with a task. Only the order depends on it, so a shim that hangs is no reason to stop here."""
    try:
        answer = await client.call(calls.TASK_LIST, tasks.ListTasksRequest(), patient=True)
    except ForgeyardError:
        return {}
    return {process.id: STATUS.get(process.status, ContainerStatus.CREATING) for process in answer.tasks}


async def _snapshots(client: Client, settings: ContainerdSettings) -> list[Leftover]:
    """Unfinished extractions and views. What is committed belongs to an image, and has none of our labels."""
    request = snapshots.ListSnapshotsRequest(snapshotter=settings.snapshotter, filters=[owned_by(settings)])
    found: list[Leftover] = []
    async for answer in client.stream(calls.SNAPSHOT_LIST, request, deadline=QUERY_DEADLINE):
        found.extend(
            Leftover(info.name, info.labels, partial(remove_snapshot, client, settings.snapshotter, info.name))
            for info in answer.info
        )
    return found


async def remove_snapshot(client: Client, snapshotter: str, key: str) -> None:
    """Not there is fine."""
    with expecting(Code.NOT_FOUND):
        await client.call(
            calls.SNAPSHOT_REMOVE, snapshots.RemoveSnapshotRequest(snapshotter=snapshotter, key=key), patient=True
        )


async def _leases(client: Client, settings: ContainerdSettings) -> list[Leftover]:
    request = leases.ListRequest(filters=[owned_by(settings)])
    held = await client.call(calls.LEASE_LIST, request, patient=True)
    return [Leftover(lease.id, lease.labels, partial(remove_lease, client, lease.id)) for lease in held.leases]


async def remove_lease(client: Client, lease_id: str) -> None:
    """Not there is fine."""
    with expecting(Code.NOT_FOUND):
        await client.call(calls.LEASE_DELETE, leases.DeleteRequest(id=lease_id), patient=True)
