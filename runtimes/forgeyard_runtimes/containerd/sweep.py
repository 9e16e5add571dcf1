"""What dead executors left at the daemon: containers first, then snapshots, then leases. Ours and only ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from forgeyard_host.processes import boot_id
from forgeyard_model.errors import ForgeyardError
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import QUERY_DEADLINE, Client
from forgeyard_runtimes.containerd.errors import Code, expecting
from forgeyard_runtimes.containerd.messages import containers, leases, snapshots
from forgeyard_runtimes.containerd.settings import ContainerdSettings, Label, owned_by
from forgeyard_runtimes.containerd.task import remove_task
from forgeyard_runtimes.contract import SweepReport


class _Sweep:
    """Goes on past what can't be removed, and remembers all of it."""

    def __init__(self, alive: Callable[[str], bool]) -> None:
        self._alive = alive
        self.removed: list[str] = []
        self.kept: list[str] = []
        self.failed: list[tuple[str, str]] = []

    async def look(self, what: str, labels: Mapping[str, str], remove: Callable[[], Awaitable[None]]) -> None:
        """Remove one object, unless its sandbox lives. None does over a boot of this host."""
        if labels.get(Label.BOOT) == boot_id() and self._alive(labels.get(Label.SANDBOX, "")):
            self.kept.append(what)
            return
        try:
            await remove()
        except ForgeyardError as error:
            self.failed.append((what, str(error)))
        else:
            self.removed.append(what)


async def sweep(client: Client, settings: ContainerdSettings, alive: Callable[[str], bool]) -> SweepReport:
    """Remove what is labelled with our state directory and belongs to a sandbox that is not alive.

    :param alive: whether the sandbox of that id has an executor that lives.
    :raises DaemonError: the daemon can't be asked at all: nothing can be said then of what is left.
    """
    found, wanted = _Sweep(alive), owned_by(settings)
    answer = await client.call(calls.CONTAINER_LIST, containers.ListContainersRequest(filters=[wanted]), patient=True)
    for record in answer.containers:
        await found.look(f"container {record.id}", record.labels, partial(_remove_container, client, record.id))
    for info in await _snapshots(client, settings, wanted):
        removal = partial(remove_snapshot, client, settings.snapshotter, info.name)
        await found.look(f"snapshot {info.name}", info.labels, removal)
    held = await client.call(calls.LEASE_LIST, leases.ListRequest(filters=[wanted]), patient=True)
    for lease in held.leases:
        await found.look(f"lease {lease.id}", lease.labels, partial(remove_lease, client, lease.id))
    return SweepReport(tuple(found.removed), tuple(found.kept), tuple(found.failed))


async def _remove_container(client: Client, container_id: str) -> None:
    await remove_task(client, container_id)
    with expecting(Code.NOT_FOUND):
        await client.call(calls.CONTAINER_DELETE, containers.DeleteContainerRequest(id=container_id))


async def _snapshots(client: Client, settings: ContainerdSettings, wanted: str) -> list[snapshots.Info]:
    """Unfinished extractions and views. What is committed belongs to an image, and has none of our labels."""
    request = snapshots.ListSnapshotsRequest(snapshotter=settings.snapshotter, filters=[wanted])
    found: list[snapshots.Info] = []
    async for answer in client.stream(calls.SNAPSHOT_LIST, request, deadline=QUERY_DEADLINE):
        found.extend(answer.info)
    return found


async def remove_snapshot(client: Client, snapshotter: str, key: str) -> None:
    """Not there is fine."""
    with expecting(Code.NOT_FOUND):
        await client.call(
            calls.SNAPSHOT_REMOVE, snapshots.RemoveSnapshotRequest(snapshotter=snapshotter, key=key), patient=True
        )


async def remove_lease(client: Client, lease_id: str) -> None:
    """Not there is fine."""
    with expecting(Code.NOT_FOUND):
        await client.call(calls.LEASE_DELETE, leases.DeleteRequest(id=lease_id), patient=True)
