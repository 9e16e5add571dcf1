"""Removing what jobs that are over left at Podman's service: containers, then pods, volumes and networks.

Only what carries this state directory's label. One that can't be removed does not stop the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from forgeyard_host.processes import boot_id
from forgeyard_model.errors import ForgeyardError
from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.podman.client import PodmanClient
from forgeyard_runtimes.podman.errors import NotThere, not_understood
from forgeyard_runtimes.podman.labels import BOOT, SANDBOX, PodmanSettings
from forgeyard_runtimes.podman.removal import REMOVAL


@dataclass(frozen=True, slots=True)
class _Kind:
    """Only containers are removed by force: what holds another kind then is no container of ours."""

    name: str
    listing: str
    removal: str
    listed: tuple[tuple[str, str], ...] = ()
    query: tuple[tuple[str, str], ...] = ()


_KINDS: Final = (
    _Kind(
        "container",
        "containers/json",
        "containers/{}",
        (("all", "true"),),
        tuple(REMOVAL.items()),
    ),
    _Kind("pod", "pods/json", "pods/{}"),
    _Kind("volume", "volumes/json", "volumes/{}"),
    _Kind("network", "networks/json", "networks/{}"),
)


async def sweep(client: PodmanClient, settings: PodmanSettings, alive: Callable[[str], bool]) -> SweepReport:
    """Remove everything of this state directory whose sandbox is not `alive`.

    :raises ForgeyardError: when a listing fails: nothing can be said then of what is left.
    """
    removed: list[str] = []
    kept: list[str] = []
    failed: list[tuple[str, str]] = []
    for kind in _KINDS:
        for name, labels in await _listed(client, settings, kind):
            shown = f"{kind.name} {name}"
            # No sandbox is alive over a boot of this host.
            if labels.get(BOOT) == boot_id() and alive(str(labels.get(SANDBOX, ""))):
                kept.append(shown)
            elif reason := await _remove(client, kind, name):
                failed.append((shown, reason))
            else:
                removed.append(shown)
    return SweepReport(tuple(removed), tuple(kept), tuple(failed))


async def _listed(client: PodmanClient, settings: PodmanSettings, kind: _Kind) -> list[tuple[str, Mapping[str, Any]]]:
    """Names with their labels. Those that don't run come first: they hold what others wait for."""
    entries = await client.call("GET", kind.listing, query={**dict(kind.listed), "filters": settings.ours()}) or ()
    try:
        return [_named(entry) for entry in sorted(entries, key=lambda entry: entry.get("State") == "running")]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise not_understood(kind.listing, entries) from error


def _named(entry: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    name = entry["Names"][0] if "Names" in entry else entry.get("Name") or entry["name"]
    return str(name), entry.get("Labels") or entry.get("labels") or {}


async def _remove(client: PodmanClient, kind: _Kind, name: str) -> str:
    """Why it is still there; empty when it is gone."""
    try:
        await client.call("DELETE", kind.removal.format(quote(name, safe="")), query=dict(kind.query))
    except NotThere:
        return ""
    except ForgeyardError as error:
        return str(error)
    return ""
