"""What dead executors left at Podman: containers first, then networks, volumes and pods. Ours and only ours."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.labels import label_filter
from forgeyard_runtimes.podman.client import PodmanClient
from forgeyard_runtimes.podman.errors import NotThere, not_understood
from forgeyard_runtimes.podman.images import sweep_images
from forgeyard_runtimes.podman.removal import remove_container
from forgeyard_runtimes.podman.settings import PodmanSettings
from forgeyard_runtimes.sweep import Kind, Leftover, sweep_kinds

_RUNNING: Final = ("running", "paused", "stopping")
Remove = Callable[[PodmanClient, str], Awaitable[object]]


async def sweep(client: PodmanClient, settings: PodmanSettings, alive: Callable[[str], bool]) -> SweepReport:
    """Remove what is labelled with our state directory and belongs to a sandbox that is not alive.

    Only containers are removed by force: what holds another kind then is no container of ours.

    :param alive: whether the sandbox of that id is.
    :raises ForgeyardError: the service can't be asked at all: nothing can be said then of what is left.
    """

    def kind(name: str, remove: Remove) -> Kind:
        return Kind(name, partial(_listed, client, settings, f"{name}s", remove))

    others = (kind(name, partial(_remove, kind=f"{name}s")) for name in ("network", "volume", "pod"))
    images = Kind("image", partial(sweep_images, client, settings))
    return await sweep_kinds((kind("container", _remove_container), *others, images), alive)


async def _listed(client: PodmanClient, settings: PodmanSettings, kind: str, remove: Remove) -> list[Leftover]:
    query = {"filters": json.dumps(label_filter(settings)), **({"all": "true"} if kind == "containers" else {})}
    entries = await client.call("GET", f"{kind}/json", query=query) or ()
    try:
        return [_leftover(entry, partial(remove, client)) for entry in entries]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise not_understood(kind, entries) from error


def _leftover(entry: Mapping[str, Any], remove: Callable[[str], Awaitable[object]]) -> Leftover:
    """Each kind writes its fields in its own way."""
    name = str(entry["Names"][0] if "Names" in entry else entry.get("Name") or entry["name"])
    labels = entry.get("Labels") or entry.get("labels") or {}
    return Leftover(name, labels, partial(remove, name), running=entry.get("State") in _RUNNING)


async def _remove_container(client: PodmanClient, name: str) -> None:
    await remove_container(client, quote(name, safe=""))


async def _remove(client: PodmanClient, name: str, *, kind: str) -> None:
    try:
        await client.call("DELETE", f"{kind}/{quote(name, safe='')}")
    except NotThere:
        return
