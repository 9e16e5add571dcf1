"""What dead executors left at the daemon: containers, also ended ones, then networks, volumes and images.

Ours and only ours, by label; one object that can't be removed does not stop the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import requests
from docker import APIClient
from docker.errors import DockerException

from forgeyard_host.processes import boot_id
from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.docker.client import DockerSettings
from forgeyard_runtimes.docker.errors import NotThere, translate
from forgeyard_runtimes.docker.skeleton import SKELETON_LABEL, STATE_LABEL

SANDBOX_LABEL: Final = "forgeyard.sandbox"
EXECUTOR_LABEL: Final = "forgeyard.executor"
BOOT_LABEL: Final = "forgeyard.boot"
DIRECTORY_LABEL: Final = "forgeyard.directory"


def owner_labels(settings: DockerSettings, sandbox: str, directory: str) -> dict[str, str]:
    """Whose a container is."""
    return {
        SANDBOX_LABEL: sandbox,
        EXECUTOR_LABEL: settings.executor,
        STATE_LABEL: settings.state,
        BOOT_LABEL: boot_id(),
        DIRECTORY_LABEL: directory,
    }


def owned_by(settings: DockerSettings) -> dict[str, Any]:
    """The filter for objects of one state directory."""
    return {"label": [f"{STATE_LABEL}={settings.state}"]}


def sweep(api: APIClient, settings: DockerSettings, alive: Callable[[str], bool]) -> SweepReport:
    """Remove what is labelled with our state directory and an executor that is dead, or another boot. Blocking.

    A skeleton's image goes when no container is made of it any more; a running executor makes it again when needed.

    :raises DockerException, requests.RequestException: the daemon can't be asked at all.
    """
    found, wanted = _Found(alive), owned_by(settings)
    for entry in api.containers(all=True, filters=wanted):
        name = (entry.get("Names") or [entry["Id"]])[0].lstrip("/")
        found.look(f"container {name}", entry, partial(api.remove_container, entry["Id"], v=True, force=True))
    for network in api.networks(filters=wanted):
        found.look(f"network {network['Name']}", network, partial(api.remove_network, network["Id"]))
    for volume in api.volumes(filters=wanted).get("Volumes") or ():
        found.look(f"volume {volume['Name']}", volume, partial(api.remove_volume, volume["Name"]))
    if not alive(settings.executor):
        # While an executor of this state directory lives it may be about to use them.
        labels = [*wanted["label"], f"{SKELETON_LABEL}=1"]
        for image in api.images(filters={"label": labels}):
            found.remove(f"image {image['Id']}", partial(api.remove_image, image["Id"]))
    return SweepReport(tuple(found.removed), tuple(found.kept), tuple(found.failed))


@dataclass(slots=True)
class _Found:
    """Goes on past what can't be removed, and remembers all of it."""

    alive: Callable[[str], bool]
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def look(self, what: str, entry: Mapping[str, Any], removal: Callable[[], object]) -> None:
        """Remove one object, unless its executor lives. None does over a boot of this host."""
        labels = entry.get("Labels") or {}
        if labels.get(BOOT_LABEL) == boot_id() and self.alive(labels.get(EXECUTOR_LABEL, "")):
            self.kept.append(what)
        else:
            self.remove(what, removal)

    def remove(self, what: str, removal: Callable[[], object]) -> None:
        """One that is gone already counts as removed."""
        try:
            removal()
        except (DockerException, requests.RequestException, OSError) as error:
            translated = translate(error, f"remove {what}")
            if not isinstance(translated, NotThere):
                self.failed.append((what, str(translated)))
                return
        self.removed.append(what)
