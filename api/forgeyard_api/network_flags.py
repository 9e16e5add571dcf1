"""What the flags say of a job's network and its services."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.policy import NetworkDestination, NetworkMode, NetworkPolicy

if TYPE_CHECKING:
    from forgeyard_model.services import ServiceSpec

_BY_FLAG = (NetworkMode.DENY, NetworkMode.FETCH_ONLY, NetworkMode.RESTRICTED, NetworkMode.ALLOW, NetworkMode.HOST)


def network_policy(name: str | None, allow: Sequence[str]) -> NetworkPolicy | None:
    """The policy of ``--network`` and ``--allow``; None when neither was given.

    :raises InvalidRequest: names the flag.
    """
    destinations = tuple(parse_destination(text) for text in allow)
    if name is None and not destinations:
        return None
    mode = NetworkMode.RESTRICTED if name is None else _mode(name)
    if destinations and mode is not NetworkMode.RESTRICTED:
        raise InvalidRequest("--allow", allow[0], f"goes with --network restricted, not with {mode.value}")
    if mode is NetworkMode.RESTRICTED and not destinations:
        raise InvalidRequest("--network", mode.value, "name what it may reach: --allow HOST[:PORT] or --allow CIDR")
    return NetworkPolicy.restricted(*destinations) if destinations else NetworkPolicy(mode)


def _mode(name: str) -> NetworkMode:
    for mode in _BY_FLAG:
        if mode.value == name:
            return mode
    raise InvalidRequest("--network", name, f"write {', '.join(mode.value for mode in _BY_FLAG)}")


def parse_destination(text: str, field: str = "--allow") -> NetworkDestination:
    """``HOST``, ``*.HOST``, an address or a CIDR, each with ``:PORT`` or without.

    :raises InvalidRequest: for anything else.
    """
    where, colon, port = text.rpartition(":")
    if not colon:
        where, port = text, ""
    elif not (port.isascii() and port.isdigit() and len(port) < 6):
        raise InvalidRequest(field, text, "write HOST, HOST:PORT, CIDR or CIDR:PORT; IPv6 is not in a job's network")
    ports = (int(port),) if port else ()
    try:
        network = str(ip_network(where))
    except ValueError:
        if "/" in where:
            raise InvalidRequest(field, text, "write a network such as 10.20.0.0/16, no bits set past it") from None
        destination = NetworkDestination(host=where, ports=ports)
    else:
        destination = NetworkDestination(cidr=network, ports=ports)
    try:
        destination.check(field)
    except InvalidRequest as error:
        raise InvalidRequest(field, text, error.cure) from error
    return destination


def services_from(text: str) -> tuple[tuple[ServiceSpec, ...], tuple[str, ...]]:
    """The services of ``--services-from FILE[:JOB]``, of another CI system's file, and notes on them.

    :raises InvalidRequest: it can't be read, or holds what has no meaning here.
    """
    from forgeyard_api.jobfile_reader import read_document
    from forgeyard_services.ci_files import read_services

    path, job = _split(text)
    try:
        return read_services(read_document(path).value, job)
    except InvalidRequest as error:
        if error.field.startswith("--"):
            raise
        raise InvalidRequest(f"--services-from {path}: {error.field}", error.value, error.cure) from error


def _split(text: str) -> tuple[Path, str | None]:
    path, colon, job = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), None
    return Path(path), job or None
