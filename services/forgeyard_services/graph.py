"""The order that services start in."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter

from forgeyard_model.services import ServiceSpec


def start_levels(services: Sequence[ServiceSpec]) -> tuple[tuple[str, ...], ...]:
    """Names in groups: what a group depends on is in the groups before it, so that a group can start at once.

    Within a group in the order given. The services have passed `checked_services`: no unknown names, no cycle.
    """
    sorter = TopologicalSorter({service.name: tuple(service.depends_on) for service in services})
    sorter.prepare()
    levels = []
    while sorter.is_active():
        ready = set(sorter.get_ready())
        levels.append(tuple(service.name for service in services if service.name in ready))
        sorter.done(*ready)
    return tuple(levels)
