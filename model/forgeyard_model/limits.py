"""What a job may use at the most, and what a scheduler set aside for it (seed, sections 93-102)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.units import MAX_SECONDS, MAX_SIZE, parse_cpus, parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Hard limits of one container. None: the profile's default has not been filled in, or there is none.

    memory, disk, shm: bytes. cpus: cores. pids, nofile: counts. wall_time: seconds, over all steps.
    """

    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    pids: int | None = None
    nofile: int | None = None
    shm: int | None = None
    wall_time: float | None = None

    @classmethod
    def parse(
        cls,
        *,
        cpus: float | str | None = None,
        memory: int | str | None = None,
        disk: int | str | None = None,
        pids: int | None = None,
        nofile: int | None = None,
        shm: int | str | None = None,
        wall_time: str | None = None,
    ) -> ResourceLimits:
        """Read limits as a user writes them: ``memory="512MiB", cpus=1, wall_time="10m"``.

        :raises InvalidRequest: names the limit that can't be read.
        """
        return cls(
            cpus=None if cpus is None else parse_cpus(cpus, field="cpus"),
            memory=None if memory is None else _at_least(parse_size(memory, field="memory"), 4 << 20, "memory", "4MiB"),
            disk=None if disk is None else _at_least(parse_size(disk, field="disk"), 16 << 20, "disk", "16MiB"),
            pids=_count(pids, "pids", least=4),
            nofile=_count(nofile, "nofile", least=16),
            shm=None if shm is None else parse_size(shm, field="shm"),
            wall_time=None if wall_time is None else parse_duration(wall_time, field="wall_time"),
        )

    def or_default(self, defaults: ResourceLimits) -> ResourceLimits:
        """These limits, with `defaults` where one is not set."""
        pairs = ((f.name, getattr(self, f.name), getattr(defaults, f.name)) for f in fields(self))
        return ResourceLimits(**{name: mine if mine is not None else default for name, mine, default in pairs})

    def check(self) -> None:
        """Bounds of every limit that is set, for limits that no parser has seen. To a runtime -1 means "no limit".

        :raises InvalidRequest: names the limit.
        """
        for name, (least, most, cure) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # also refuses NaN, which compares as False
                raise InvalidRequest(name, value, cure)


def _at_least(value: int, least: int, field: str, shown: str) -> int:
    if value < least:
        raise InvalidRequest(field, value, f"too small to start a process in; write at least {shown}")
    return value


def _count(value: int | None, field: str, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 4_000_000:
        raise InvalidRequest(field, value, f"write a whole number from {least} to 4000000")
    return value


_BOUNDS: Final = {
    "cpus": (0.01, 8192, "write a number of cpus from 0.01 to 8192"),
    "memory": (4 << 20, MAX_SIZE, "write bytes, at least 4 MiB"),
    "disk": (16 << 20, MAX_SIZE, "write bytes, at least 16 MiB"),
    "pids": (4, 4_000_000, "write a whole number from 4 to 4000000"),
    "nofile": (16, 4_000_000, "write a whole number from 16 to 4000000"),
    "shm": (1, MAX_SIZE, "write bytes, more than 0"),
    "wall_time": (0.001, MAX_SECONDS, "write seconds, more than 0 and at most a year"),
}

Limits = ResourceLimits.parse
"""How the Python API spells it: ``Limits(memory="512MiB", cpus=1)``."""


@dataclass(frozen=True, slots=True)
class ResourceReservation:
    """What the scheduler set aside. The limits are enforced whether or not it did so rightly (section 95)."""

    cpus: float
    memory: int
    disk: int | None = None
    pids: int | None = None
