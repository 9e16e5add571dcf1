"""What the containers of a running attempt are and use at this moment, for operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from forgeyard_model.plan import Bundle


@dataclass(frozen=True, slots=True)
class LiveUsage:
    """What a container uses at this moment; None: the host can't tell.

    cpu_nanoseconds: since its start. memory_bytes: without the page cache that the kernel would drop first.
    """

    at: datetime
    cpu_nanoseconds: int | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LiveContainer:
    """A container of an attempt: the job's, whose name is the job's, or a service's.

    state: created, running or exited. address: in the attempt's network; empty without one. cgroup: below each
    hierarchy's root. rootfs: what identifies it, by digest.
    """

    name: str
    container_id: str
    sandbox_id: str
    state: str
    pid: int | None
    bundle: Bundle
    rootfs: str
    image: str | None = None
    address: str = ""
    cgroup: str = ""
    usage: LiveUsage | None = None
