"""Which Podman service is meant: a setting, CONTAINER_HOST, or the usual place of this user's, in that order.

Connections that `podman system connection` keeps are for other machines and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from forgeyard_runtimes.endpoints import local_socket

ROOTFUL: Final = "/run/podman/podman.sock"
_QUOTED: Final = "http+unix://"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service listens. `origin` says what named it, for messages."""

    path: Path
    origin: str


def find_endpoint(address: str | None, environ: Mapping[str, str], uid: int) -> Endpoint:
    """The service that `address` or the environment names; else root's, or that of the user `uid`.

    :param address: ``unix:///PATH``, or podman-py's ``http+unix://`` with a quoted path.
    :raises ExecutorError: UNSUPPORTED for another machine's (ssh, tcp), and for what is no path of a socket.
    """
    if address:
        return _at(address, "the configuration")
    if environ.get("CONTAINER_HOST"):
        return _at(environ["CONTAINER_HOST"], "CONTAINER_HOST")
    if uid == 0:
        return Endpoint(Path(ROOTFUL), "Podman's default")
    own = environ.get("XDG_RUNTIME_DIR", "")
    # As the base directory specification has it: a relative one is no place.
    where = own if own.startswith("/") else f"/run/user/{uid}"
    return Endpoint(Path(where, "podman/podman.sock"), "Podman's default for this user")


def _at(address: str, origin: str) -> Endpoint:
    plain = f"unix://{unquote(address.removeprefix(_QUOTED))}" if address.startswith(_QUOTED) else address
    return Endpoint(Path(local_socket("podman", plain, origin)), origin)
