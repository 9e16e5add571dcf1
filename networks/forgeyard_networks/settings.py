"""What an executor's networks are made with: its configuration, and where its files are."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Final

from forgeyard_host.failures import describe
from forgeyard_model.config import FetchCredential, NetworkConfig
from forgeyard_model.errors import InvalidRequest
from forgeyard_networks.host_resolvers import RESOLV_CONF
from forgeyard_networks.ipam import parse_range

RUN_DIR: Final = "/run/forgeyard"
_MOST_SECRET: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Of one executor.

    :param run_dir: locks that all executors of the host share, and pinned namespaces.
    :param cni_cache: what is attached to operators' networks, below the executor's state.
    :param resolv_conf: names the servers that jobs' names are asked from.
    :param dns_port: of those servers.
    """

    config: NetworkConfig = field(default_factory=NetworkConfig)
    run_dir: str = RUN_DIR
    cni_cache: str = "/var/lib/forgeyard/cni/results"
    resolv_conf: str = RESOLV_CONF
    dns_port: int = 53

    @classmethod
    def of(cls, config: NetworkConfig, state_dir: str) -> NetworkSettings:
        """For an executor with that configuration and state directory."""
        return cls(config, cni_cache=f"{state_dir}/cni/results")

    @property
    def network(self) -> IPv4Network:
        """The range of jobs' addresses.

        :raises InvalidRequest: it can't be used.
        """
        return parse_range(self.config.range)

    @property
    def pool(self) -> int:
        """Networks to keep ready."""
        return self.config.pool


def read_secret(credential: FetchCredential, field: str = "network.credentials") -> str:
    """The text of the credential's file, without its last line end. Blocking.

    :raises InvalidRequest: it can't be read, or others than its owner can read it too; its text is never shown.
    """
    try:
        fd = os.open(credential.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MOST_SECRET)
    except OSError as error:
        raise InvalidRequest(f"{field}.file", credential.file, f"can't be read: {describe(error)}") from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise InvalidRequest(f"{field}.file", credential.file, "others may read it: chmod go= this file")
    try:
        return data.decode("ascii").rstrip("\r\n")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{field}.file", credential.file, "holds more than ASCII text") from None


def known_conflist(name: str, config: NetworkConfig) -> None:
    """Whether jobs may have the operator's network `name`.

    :raises InvalidRequest: the configuration does not list it.
    """
    if name not in config.conflists:
        raise InvalidRequest("network.conflist", name, _offer(config.conflists))


def _offer(names: Sequence[str]) -> str:
    if not names:
        return "no operator's network is configured: list it under network.conflists of the configuration"
    return f"list it under network.conflists of the configuration, or choose {' or '.join(sorted(names)[:10])}"
