"""What the configuration leaves open of a server: what this host has."""

from __future__ import annotations

import os
from typing import Final

from forgeyard_api.serve.admission import Capacity
from forgeyard_model.config_serve import ServeConfig

PER_CPU: Final = 4
"""Attempts, and cores promised to them, for each processor: most jobs wait for something most of the time."""
_MEMORY_SHARE: Final = 0.9


def capacity_of(config: ServeConfig) -> Capacity:
    """What attempts may have at once: what is configured, and otherwise what this host has."""
    here = len(os.sched_getaffinity(0))
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Capacity(
        slots=config.slots if config.slots is not None else here * PER_CPU,
        cpus=config.cpus if config.cpus is not None else float(here * PER_CPU),
        memory=config.memory if config.memory is not None else int(installed * _MEMORY_SHARE),
        disk=config.disk,
        pids=config.pids,
        queue=config.queue,
        aging=config.aging,
        tenants=config.tenants,
        default_share=config.default_share,
    )
