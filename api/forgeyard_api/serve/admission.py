"""Who runs next: slots, what each attempt reserves, shares of tenants, and a queue with an end.

The host is never promised twice: an attempt is admitted when a slot is free and everything it reserves fits into what
is left. The head of the queue is never overtaken for ever: what waits ages, and what is first and does not fit holds
back what is behind it. Everything that waits ages alike, so the order of two attempts never changes.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
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
    :param tenants: shares by name; default_share: of each tenant that `tenants` does not name.
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    claim: Claim
    since: float
    number: int


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
        self._queue: list[_Waiting] = []
        self._number = 0

    @property
    def capacity(self) -> Capacity:
        """What there is."""
        return self._capacity

    def resize(self, capacity: Capacity) -> None:
        """Take other bounds; what runs goes on, whatever they are."""
        self._capacity = capacity
        self._queue.sort(key=self._rank)

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

        :raises ExecutorError: TIMEOUT, queue_full.
        """
        if len(self._waiting) >= self._capacity.queue:
            raise ExecutorError(
                ExecutorErrorKind.TIMEOUT,
                "queue_full",
                f"{len(self._waiting)} attempts wait already, and no more may",
                resolution="try again later, or on another host",
            )
        self._number += 1
        self._waiting[claim.key] = waiting = _Waiting(claim, self._clock(), self._number)
        insort(self._queue, waiting, key=self._rank)

    def restore(self, claim: Claim) -> None:
        """Count an attempt that runs already, whether or not it fits."""
        self._take(claim)

    def admit(self) -> tuple[Claim, ...]:
        """Those that may run now, in order. They are counted from here on until `release`."""
        admitted: list[Claim] = []
        for waiting in list(self._queue):
            claim = waiting.claim
            if not self._tenant_has_room(claim) or not self._possible(claim):
                continue  # held back by its tenant, or by bounds that shrank since: nobody else waits for it
            if not self._fits(claim):
                break
            self._unqueue(claim.key)
            self._take(claim)
            admitted.append(claim)
        return tuple(admitted)

    def release(self, key: str) -> None:
        """It runs no more, or waits no more. Repeating it is no error."""
        self._unqueue(key)
        claim = self._running.pop(key, None)
        if claim is not None:
            self._used.add(claim.reserved, -1)
            self._tenant(claim.tenant).add(claim.reserved, -1)

    def position(self, key: str) -> int:
        """How many are before it in the queue, and one; 0 for one that does not wait."""
        waiting = self._waiting.get(key)
        return 0 if waiting is None else bisect_right(self._queue, self._rank(waiting), key=self._rank)

    def used(self) -> ResourceReservation:
        """What is promised at this moment."""
        used = self._used
        return ResourceReservation(used.cpus, used.memory, used.disk, used.pids)

    def _rank(self, waiting: _Waiting) -> tuple[float, int]:
        """Smaller is sooner. Each has one of its own."""
        aging, priority = self._capacity.aging, waiting.claim.priority
        return (waiting.since / aging if aging > 0 else 0.0) - priority, waiting.number

    def _unqueue(self, key: str) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            del self._queue[bisect_left(self._queue, self._rank(waiting), key=self._rank)]

    def _possible(self, claim: Claim) -> bool:
        try:
            self.check(claim)
        except InvalidRequest:
            return False
        return True

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
