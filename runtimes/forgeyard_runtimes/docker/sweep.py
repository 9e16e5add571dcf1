"""What dead executors left at Docker: containers first, then networks, volumes and images. Ours and only ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from docker import APIClient

from forgeyard_host.processes import boot_id
from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.docker.client import DockerClient, DockerSettings
from forgeyard_runtimes.docker.containers import remove_container
from forgeyard_runtimes.docker.errors import NotThere
from forgeyard_runtimes.docker.images import sweep_images
from forgeyard_runtimes.docker.skeleton import SKELETON_LABEL
from forgeyard_runtimes.labels import BOOT, EXECUTOR, label_filter
from forgeyard_runtimes.sweep import Kind, Leftover, sweep_kinds

_RUNNING: Final = ("running", "paused", "restarting")
Entries = Sequence[Mapping[str, Any]]


async def sweep(client: DockerClient, alive: Callable[[str], bool]) -> SweepReport:
    """Remove what is labelled with our state directory and belongs to a sandbox that is not alive.

    :param alive: whether the sandbox of that id is, or our own executor.
    :raises ForgeyardError: the daemon can't be asked at all: nothing can be said then of what is left.
    """
    ours = label_filter(client.settings)

    def volumes(api: APIClient) -> Entries:
        return api.volumes(filters=ours).get("Volumes") or ()

    def kind(name: str, listing: Callable[[APIClient], Entries], remove: Callable[[APIClient, str], object]) -> Kind:
        return Kind(name, partial(_listed, client, f"list the {name}s", listing, remove))

    kinds = (
        kind("container", lambda api: api.containers(all=True, filters=ours), remove_container),
        kind("network", lambda api: api.networks(filters=ours), APIClient.remove_network),
        kind("volume", volumes, APIClient.remove_volume),
        kind("image", partial(_unused_skeletons, client.settings), APIClient.remove_image),
        Kind("image", partial(sweep_images, client)),
    )
    return await sweep_kinds(kinds, alive)


async def _listed(
    client: DockerClient,
    doing: str,
    listing: Callable[[APIClient], Entries],
    remove: Callable[[APIClient, str], object],
) -> list[Leftover]:
    return [
        Leftover(
            name_of(entry),
            entry.get("Labels") or {},
            partial(_remove, client, remove, entry),
            running=entry.get("State") in _RUNNING,
        )
        for entry in await client.ask(listing, doing)
    ]


async def _remove(client: DockerClient, remove: Callable[[APIClient, str], object], entry: Mapping[str, Any]) -> None:
    # Two networks may have one name; a volume has nothing else.
    identity = entry.get("Id") or entry["Name"]
    try:
        await client.change(lambda api: remove(api, identity), f"remove {name_of(entry)}")
    except NotThere:
        return


def _unused_skeletons(settings: DockerSettings, api: APIClient) -> Entries:
    """Those that no container is made of. They are our own executor's while that lives, for the next job."""
    labels = [*label_filter(settings)["label"], f"{SKELETON_LABEL}=1"]
    images = [str(image["Id"]) for image in api.images(filters={"label": labels})]
    used = {entry["ImageID"] for entry in api.containers(all=True)} if images else set()
    ours = {BOOT: boot_id(), EXECUTOR: settings.executor}
    return [{"Name": image, "Id": image, "Labels": ours} for image in images if image not in used]


def name_of(entry: Mapping[str, Any]) -> str:
    """The name of an object in a listing; a container's id while Docker takes its name away."""
    names = entry.get("Names") or [entry.get("Name") or entry["Id"]]
    return str(names[0]).lstrip("/")
