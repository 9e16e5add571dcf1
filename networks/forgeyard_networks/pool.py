"""Networks made ahead of time, so that a job finds one ready: filled in the background, used once, then thrown away."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forgeyard_host.links import NetState
from forgeyard_model.errors import ForgeyardError
from forgeyard_networks.topology import Fingerprint, Topology

QUIET: Final = 0.5
"""Seconds without a take before more are made: beside a job that starts, that would cost it more than it saves."""
log: Final = logging.getLogger("forgeyard.networks")


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """Counts since the pool was opened. `refused`: ready ones that had changed and were not used."""

    size: int
    ready: int
    hits: int
    misses: int
    refused: int

    @property
    def hit_rate(self) -> float:
        """Share of takes that found one ready; 1.0 before the first."""
        taken = self.hits + self.misses
        return self.hits / taken if taken else 1.0


class NetworkPool:
    """Keeps up to `size` networks ready. Safe to use from several threads.

    :param make: makes one; blocking.
    :param discard: gives one back that is not used.
    """

    def __init__(self, make: Callable[[], Topology], discard: Callable[[Topology], None], size: int) -> None:
        self._make, self._discard, self._size = make, discard, size
        self._ready: deque[tuple[Topology, Fingerprint]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._taken = float("-inf")
        self._hits = self._misses = self._refused = 0
        self._thread = threading.Thread(target=self._fill, name="forgeyard-network-pool", daemon=True)
        if size:
            self._thread.start()

    def take(self) -> Topology:
        """A network: a ready one that still is what it was, or a new one. Blocking.

        :raises SandboxError: none could be made.
        """
        while True:
            with self._changed:
                found = self._ready.popleft() if self._ready else None
                self._taken = time.monotonic()
                self._changed.notify_all()
                if found is None:
                    self._misses += 1
            if found is None:
                return self._make()
            if self._unchanged(*found):
                with self._changed:
                    self._hits += 1
                return found[0]
            with self._changed:
                self._refused += 1
            log.warning("a ready network had changed before its use and is thrown away")
            self._discard(found[0])

    def close(self) -> None:
        """Drop what is ready and make no more. Blocking for as long as one is being made. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        while self._ready:
            self._discard(self._ready.popleft()[0])

    def metrics(self) -> PoolMetrics:
        """Counts so far."""
        with self._changed:
            return PoolMetrics(self._size, len(self._ready), self._hits, self._misses, self._refused)

    def wait_full(self, timeout: float) -> bool:
        """Whether the pool got full within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._ready) >= self._size, timeout)

    @staticmethod
    def _unchanged(topology: Topology, before: Fingerprint) -> bool:
        try:
            now = topology.fingerprint()
        except ForgeyardError:
            return False
        return _comparable(now) == _comparable(before)

    def _fill(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or len(self._ready) < self._size)
                while not self._closing and (busy := self._taken + QUIET - time.monotonic()) > 0:
                    self._changed.wait(busy)
                if self._closing:
                    return
            try:
                made = self._make()
                entry = (made, made.fingerprint())
            except ForgeyardError as error:
                # A take that finds none makes its own and raises; here there is nobody to tell but the log.
                log.warning("no network could be made ahead of time: %s", error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=5.0)
                continue
            with self._changed:
                self._ready.append(entry)
                self._changed.notify_all()


def _comparable(found: Fingerprint) -> tuple[object, ...]:
    """All of it but what the kernel itself moves: neighbours come and go."""
    return _still(found.router), _still(found.member), found.sysctls, found.flows


def _still(state: NetState) -> tuple[object, ...]:
    return state.links, state.addresses, state.routes, state.rules
