"""Who runs next: slots, what each attempt reserves, shares of tenants, and a queue with an end.

The host is never promised twice: an attempt is admitted when a slot is free and everything it reserves fits into what
is left. The head of the queue is never overtaken for ever: what waits ages, and what is first and does not fit holds
back what is behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from forgeyard_model.config_serve import TenantShare
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.units import format_size

_EVERYTHING: Final = TenantShare()
_NO_TENANTS: Final[Mapping[str, TenantShare]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Capacity:
    """What this host has for attempts: counts, cores, bytes. None: not counted.

    :param queue: how many attempts may wait.
    :param aging: seconds of waiting that are worth one step of priority.
    :param tenant_slots: of a tenant that `tenants` does not name.
    """

    slots: int
    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    pids: int | None = None
    queue: int = 1000
    aging: float = 60.0
    tenants: Mapping[str, TenantShare] = field(default_factory=lambda: _NO_TENANTS)
    default_share: TenantShare = _EVERYTHING


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt that wants to run.

    :param key: names it here.
    """

    key: str
    tenant: str
    reserved: ResourceReservation
    priority: int = 0


@dataclass(slots=True)
class _Waiting:
    claim: Claim
    since: float


@dataclass(slots=True)
class _Used:
    slots: int = 0
    cpus: float = 0.0
    memory: int = 0
    disk: int = 0
    pids: int = 0

    def add(self, reserved: ResourceReservation, sign: int) -> None:
        self.slots += sign
        self.cpus += sign * reserved.cpus
        self.memory += sign * reserved.memory
        self.disk += sign * (reserved.disk or 0)
        self.pids += sign * (reserved.pids or 0)


class Admission:
    """Counts what is promised, and orders what waits. Not asynchronous: whoever calls acts on what it says.

    :param clock: seconds; time.monotonic.
    """

    def __init__(self, capacity: Capacity, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._used = _Used()
        self._by_tenant: dict[str, _Used] = {}
        self._running: dict[str, Claim] = {}
        self._waiting: dict[str, _Waiting] = {}

    @property
    def capacity(self) -> Capacity:
        """What there is."""
        return self._capacity

    def resize(self, capacity: Capacity) -> None:
        """Take other bounds; what runs goes on, whatever they are."""
        self._capacity = capacity

    @property
    def running(self) -> int:
        """Attempts admitted and not released."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Attempts in the queue."""
        return len(self._waiting)

    def check(self, claim: Claim) -> None:
        """Refuse what can never run here.

        :raises InvalidRequest: it reserves more than there is, or more than its tenant may ever have.
        """
        capacity, share = self._capacity, self._share(claim.tenant)
        reserved = claim.reserved
        bounds = (
            ("resources.cpus", reserved.cpus, _least(capacity.cpus, share.cpus), f"{reserved.cpus:g}"),
            ("resources.memory", reserved.memory, _least(capacity.memory, share.memory), format_size(reserved.memory)),
            ("resources.disk", reserved.disk or 0, capacity.disk, format_size(reserved.disk or 0)),
            ("resources.pids", reserved.pids or 0, capacity.pids, str(reserved.pids)),
        )
        for name, wanted, bound, shown in bounds:
            if bound is not None and wanted > bound:
                most = format_size(int(bound)) if name in ("resources.memory", "resources.disk") else f"{bound:g}"
                raise InvalidRequest(name, shown, f"with its services, an attempt may have {most} here: ask for less")

    def enqueue(self, claim: Claim) -> None:
        """Put it at the end of the queue.

        :raises ExecutorError: UNSUPPORTED, queue_full.
        """
        if len(self._waiting) >= self._capacity.queue:
            raise ExecutorError(
                ExecutorErrorKind.TIMEOUT,
                "queue_full",
                f"{len(self._waiting)} attempts wait already, and no more may",
                resolution="try again later, or on another host",
            )
        self._waiting[claim.key] = _Waiting(claim, self._clock())

    def restore(self, claim: Claim) -> None:
        """Count an attempt that runs already, whether or not it fits."""
        self._take(claim)

    def admit(self) -> tuple[Claim, ...]:
        """Those that may run now, in order. They are counted from here on until `release`."""
        admitted: list[Claim] = []
        for waiting in self._order():
            claim = waiting.claim
            if not self._tenant_has_room(claim):
                continue  # its own tenant holds it back, and nobody else
            if not self._fits(claim):
                break
            del self._waiting[claim.key]
            self._take(claim)
            admitted.append(claim)
        return tuple(admitted)

    def release(self, key: str) -> None:
        """It runs no more, or waits no more. Repeating it is no error."""
        self._waiting.pop(key, None)
        claim = self._running.pop(key, None)
        if claim is not None:
            self._used.add(claim.reserved, -1)
            self._tenant(claim.tenant).add(claim.reserved, -1)

    def position(self, key: str) -> int:
        """How many are before it in the queue, and one; 0 for one that does not wait."""
        if key not in self._waiting:
            return 0
        return next(number for number, waiting in enumerate(self._order(), 1) if waiting.claim.key == key)

    def used(self) -> ResourceReservation:
        """What is promised at this moment."""
        used = self._used
        return ResourceReservation(used.cpus, used.memory, used.disk, used.pids)

    def _order(self) -> list[_Waiting]:
        now, aging = self._clock(), self._capacity.aging

        def rank(waiting: _Waiting) -> float:
            aged = (now - waiting.since) / aging if aging > 0 else 0.0
            return waiting.claim.priority + aged

        return sorted(self._waiting.values(), key=lambda waiting: (-rank(waiting), waiting.since))

    def _take(self, claim: Claim) -> None:
        self._running[claim.key] = claim
        self._used.add(claim.reserved, 1)
        self._tenant(claim.tenant).add(claim.reserved, 1)

    def _fits(self, claim: Claim) -> bool:
        capacity, used, reserved = self._capacity, self._used, claim.reserved
        return (
            used.slots < capacity.slots
            and _room(used.cpus, reserved.cpus, capacity.cpus)
            and _room(used.memory, reserved.memory, capacity.memory)
            and _room(used.disk, reserved.disk or 0, capacity.disk)
            and _room(used.pids, reserved.pids or 0, capacity.pids)
        )

    def _tenant_has_room(self, claim: Claim) -> bool:
        share, used, reserved = self._share(claim.tenant), self._tenant(claim.tenant), claim.reserved
        return (
            _room(used.slots, 1, share.slots)
            and _room(used.cpus, reserved.cpus, share.cpus)
            and _room(used.memory, reserved.memory, share.memory)
        )

    def _share(self, tenant: str) -> TenantShare:
        return self._capacity.tenants.get(tenant, self._capacity.default_share)

    def _tenant(self, tenant: str) -> _Used:
        return self._by_tenant.setdefault(tenant, _Used())


_ROUNDING: Final = 1e-9


def _room(used: float, wanted: float, bound: float | None) -> bool:
    return bound is None or used + wanted <= bound + _ROUNDING


def _least(*bounds: float | None) -> float | None:
    found = [bound for bound in bounds if bound is not None]
    return min(found) if found else None
