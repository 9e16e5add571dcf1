"""Addresses: one small block of a configured range for each attempt, reserved across processes.

A block is reserved by a lock on a file. Everything that carries its addresses is held by the same process as the lock,
so that when the process dies both go, and there is no lease that anybody would have to find and give back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from forgeyard_host.locks import lock_alone
from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind

DEFAULT_RANGE: Final = "10.213.0.0/16"
DEFAULT_LOCKS: Final = "/run/forgeyard/subnets"
_BLOCK: Final = 27
_INSIDE: Final = 28
MAX_MEMBERS: Final = 13
"""The job and its services: an inside network of /28, less the router's address and the two that name the network."""


@dataclass(frozen=True, slots=True)
class Block:
    """The addresses of one attempt. `inside`: its own network; the uplink's ends lie outside of that."""

    network: IPv4Network
    number: int

    @property
    def inside(self) -> IPv4Network:
        """Where the job and its services are."""
        return IPv4Network((self.network.network_address, _INSIDE))

    @property
    def gateway(self) -> IPv4Address:
        """The router: resolver, proxy, way out."""
        return self.network.network_address + 1

    def member(self, index: int) -> IPv4Address:
        """Of the job (0) or a service (1 and up)."""
        return self.network.network_address + 2 + index

    @property
    def uplink(self) -> tuple[IPv4Address, IPv4Address]:
        """The router's end and the host's."""
        return self.network.network_address + 29, self.network.network_address + 30


def parse_range(text: str) -> IPv4Network:
    """An IPv4 network that blocks are cut from.

    :raises InvalidRequest: names the field.
    """
    try:
        network = IPv4Network(text)
    except ValueError as error:
        raise InvalidRequest("network.range", text, "write an IPv4 network such as 10.213.0.0/16") from error
    if network.prefixlen > _BLOCK or not network.is_private:
        raise InvalidRequest("network.range", text, f"write a private network of at least a /{_BLOCK}")
    return network


class Blocks:
    """The blocks of one range. Safe to use from several threads and, through the lock files, several processes.

    :param routes: networks that this host reaches already; blocks that touch one stay unused.
    """

    def __init__(
        self, network: IPv4Network, lock_dir: str = DEFAULT_LOCKS, *, routes: Sequence[IPv4Network] = ()
    ) -> None:
        self.network = network
        self._lock_dir = lock_dir
        self._routes = tuple(route for route in routes if route.prefixlen and route.overlaps(network))
        self._count = 1 << (_BLOCK - network.prefixlen)
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._next = os.getpid() * 7 % self._count  # executors that start together look in different places

    def acquire(self) -> Block:
        """A block that nobody else has.

        :raises SandboxError: NETWORK_SETUP_FAILED, reasons subnets_exhausted and subnet_locks_unusable.
        """
        with self._lock:
            try:
                found = self._find()
            except OSError as error:
                raise SandboxError(
                    SandboxErrorKind.NETWORK_SETUP_FAILED,
                    "subnet_locks_unusable",
                    f"cannot use the locks of subnets in {self._lock_dir}",
                    details=str(error),
                    resolution="make the directory writable for the executor",
                ) from error
            if found is not None:
                return found
        raise SandboxError(
            SandboxErrorKind.NETWORK_SETUP_FAILED,
            "subnets_exhausted",
            f"all {self._count} subnets of {self.network} are in use",
            details=f"{len(self._held)} of them by this executor",
            resolution="run fewer jobs at once, or configure a larger network.range",
        )

    def release(self, block: Block) -> None:
        """Give `block` back. A second call is fine."""
        with self._lock:
            fd = self._held.pop(block.number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Let go of every block."""
        with self._lock:
            for fd in self._held.values():
                os.close(fd)
            self._held.clear()

    @property
    def held(self) -> int:
        """How many this process has."""
        return len(self._held)

    def _find(self) -> Block | None:
        Path(self._lock_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        for step in range(self._count):
            number = (self._next + step) % self._count
            network = IPv4Network((self.network.network_address + (number << (32 - _BLOCK)), _BLOCK))
            if number in self._held or any(route.overlaps(network) for route in self._routes):
                continue
            fd = lock_alone(f"{self._lock_dir}/{network.network_address}")
            if fd is not None:
                self._held[number] = fd
                self._next = number + 1
                return Block(network, number)
        return None
