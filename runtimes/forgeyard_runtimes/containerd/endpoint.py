"""Which containerd is meant: a setting, CONTAINERD_ADDRESS, or the usual socket, in that order, as `ctr` has it.

The namespace is never the environment's: other users of the daemon live in theirs, and a sweep only in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forgeyard_runtimes.endpoints import local_socket

SOCKET: Final = "/run/containerd/containerd.sock"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the daemon listens. `origin` says what named it, for messages."""

    path: str
    origin: str


def find_endpoint(address: str, environ: Mapping[str, str]) -> Endpoint:
    """The daemon that `address` or the environment names; else the one at the usual place.

    :param address: ``unix:///PATH``, or a plain path as containerd's own tools take it; empty for none.
    :raises ExecutorError: UNSUPPORTED, for what is no socket of this machine.
    """
    if address:
        return _at(address, "the configuration")
    if environ.get("CONTAINERD_ADDRESS"):
        return _at(environ["CONTAINERD_ADDRESS"], "CONTAINERD_ADDRESS")
    return Endpoint(SOCKET, "containerd's default")


def _at(address: str, origin: str) -> Endpoint:
    plain = f"unix://{address}" if address.startswith("/") else address
    return Endpoint(local_socket("containerd", plain, origin), origin)
