"""What a sandbox must and may do (seed, sections 15-83)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import total_ordering
from ipaddress import IPv4Network, ip_network
from typing import Final

from forgeyard_model.errors import InvalidRequest


@total_ordering
class IsolationLevel(Enum):
    """How strong the boundary is, weakest first. Containers are not equivalent to VMs."""

    NONE = "none"
    PROCESS = "process"
    NAMESPACE = "namespace"
    CONTAINER = "container"
    VIRTUAL_MACHINE = "virtual_machine"
    CONFIDENTIAL_VIRTUAL_MACHINE = "confidential_virtual_machine"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, IsolationLevel):
            return NotImplemented
        order = list(IsolationLevel)
        return order.index(self) < order.index(other)


class Need(StrEnum):
    """How much a property is wanted. A PREFERRED one that the host lacks is reported; a REQUIRED one refuses."""

    PREFERRED = "preferred"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class IsolationRequirement:
    """The weakest boundary the job may run behind."""

    minimum: IsolationLevel
    user_namespace: Need = Need.REQUIRED


class SourceMode(StrEnum):
    """How /work/source appears: read-only, an overlay that is thrown away, or the tree itself (development)."""

    RO = "ro"
    COW = "cow"
    RW = "rw"


@dataclass(frozen=True, slots=True)
class ApprovedHostPath:
    """A host path that a policy names, and where the job sees it. Always nosuid and nodev."""

    source: str
    destination: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class FilesystemPolicy:
    """What the job sees of files. `tmp_size`: bytes, None when only the disk limit bounds it."""

    source_mode: SourceMode
    root_read_only: bool
    allow_host_paths: tuple[ApprovedHostPath, ...] = ()
    writable_paths: tuple[str, ...] = ("/work/build", "/work/output", "/work/tmp", "/tmp", "/home/forgeyard")  # noqa: S108  in the sandbox
    toolchains: tuple[ApprovedHostPath, ...] = ()
    tmp_size: int | None = None


class CapabilityGrant(StrEnum):
    """Named sets of capabilities, never single ones. ROOT_IN_USERNS needs a user namespace of the job's own."""

    NONE = "none"
    ROOT_IN_USERNS = "root-in-userns"


ROOT_IN_USERNS_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETUID",
)


@dataclass(frozen=True, slots=True)
class ProcessPolicy:
    """Rules for the job's processes: the seccomp profile by name, core dumps, umask."""

    seccomp: str = "general-build"
    core_dumps: bool = False
    umask: int = 0o022


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """Leased devices. Empty: the minimal /dev and nothing else."""

    allowed_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrivilegePolicy:
    """Privileges. no_new_privs is not a choice and has no field."""

    capabilities: CapabilityGrant = CapabilityGrant.NONE


class NetworkMode(StrEnum):
    """The modes of section 79; HOST is the development profile's own, labelled impure.

    CONFLIST: an operator's own CNI network. What it lets through is the operator's choice; nothing is claimed of it.
    """

    DENY = "deny"
    FETCH_ONLY = "fetch-only"
    RESTRICTED = "restricted"
    ALLOW = "allow"
    HOST = "host"
    CONFLIST = "conflist"


PROTOCOLS: Final = ("tcp", "udp", "icmp")
DEFAULT_PROTOCOLS: Final = ("tcp", "udp")
MOST_PORT: Final = 65535
MOST_NAME: Final = 253
_LABEL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class NetworkDestination:
    """One allowed destination: a host name (``*.`` prefix allowed) or a CIDR; ports (empty: all); protocols.

    No protocols mean tcp and udp. ``*.example.org`` covers every name below example.org, at any depth, and not
    example.org itself.
    """

    host: str = ""
    cidr: str = ""
    ports: tuple[int, ...] = ()
    protocols: tuple[str, ...] = ()

    def check(self, field: str = "network.restricted.allow") -> None:
        """Whether a network can enforce it.

        :param field: what the caller names this destination.
        :raises InvalidRequest: names the field below `field`.
        """
        if bool(self.host) == bool(self.cidr):
            raise InvalidRequest(field, self.host or self.cidr, "give exactly one of host and cidr")
        if self.host:
            _check_host(self.host, f"{field}.host")
        else:
            _check_cidr(self.cidr, f"{field}.cidr")
        for port in self.ports:
            if not 1 <= port <= MOST_PORT:
                raise InvalidRequest(f"{field}.ports", port, f"write ports from 1 to {MOST_PORT}")
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise InvalidRequest(f"{field}.protocols", protocol, f"write {', '.join(PROTOCOLS)}")


def _check_host(text: str, field: str) -> None:
    name = text.removeprefix("*.")
    labels = name.split(".")
    # The last label needs a letter, or 10.0.0.1 would pass for a name and match nothing.
    if len(name) > MOST_NAME or not all(map(_LABEL.fullmatch, labels)) or not re.search("[A-Za-z]", labels[-1]):
        raise InvalidRequest(field, text, "write a host name such as pypi.example.org or *.example.org")


def _check_cidr(text: str, field: str) -> None:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise InvalidRequest(field, text, "write a network such as 10.20.0.0/16") from error
    if not isinstance(network, IPv4Network):
        raise InvalidRequest(field, text, "name IPv4 networks: a job's network has no IPv6")


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """Where a restricted job may connect to."""

    destinations: tuple[NetworkDestination, ...]


@dataclass(frozen=True, slots=True)
class PublishedPort:
    """A TCP port of a service that the host's loopback leads to, for somebody who develops there."""

    service: str
    port: int
    host_port: int

    def check(self, field: str = "network.publish") -> None:
        """:raises InvalidRequest: names the field below `field`."""
        for name, port in (("port", self.port), ("host_port", self.host_port)):
            if not 1 <= port <= MOST_PORT:
                raise InvalidRequest(f"{field}.{name}", port, f"write a port from 1 to {MOST_PORT}")


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """A network mode, with its destinations when restricted.

    :param audit: with ALLOW: everything outside is let through, so that the evidence shows what a job needs. Private
        destinations stay closed unless `egress` names them.
    :param conflist: with CONFLIST, the name of the operator's network.
    :param publish: ports of services on the host's loopback; development only.
    """

    mode: NetworkMode
    egress: EgressPolicy | None = None
    audit: bool = False
    conflist: str = ""
    publish: tuple[PublishedPort, ...] = ()

    @classmethod
    def deny(cls) -> NetworkPolicy:
        """Loopback only."""
        return cls(NetworkMode.DENY)

    @classmethod
    def fetch_only(cls) -> NetworkPolicy:
        """Dependency resolution through a fetch proxy."""
        return cls(NetworkMode.FETCH_ONLY)

    @classmethod
    def restricted(cls, *destinations: NetworkDestination) -> NetworkPolicy:
        """Only the destinations named."""
        return cls(NetworkMode.RESTRICTED, EgressPolicy(destinations))

    @classmethod
    def allow(cls) -> NetworkPolicy:
        """A network of the job's own with a way out."""
        return cls(NetworkMode.ALLOW)

    @classmethod
    def audited(cls, *destinations: NetworkDestination) -> NetworkPolicy:
        """As `allow`, to learn from the evidence what `restricted` would have to name."""
        return cls(NetworkMode.ALLOW, EgressPolicy(destinations) if destinations else None, audit=True)

    @classmethod
    def operator(cls, conflist: str) -> NetworkPolicy:
        """The operator's own CNI network of that name."""
        return cls(NetworkMode.CONFLIST, conflist=conflist)

    @classmethod
    def host(cls) -> NetworkPolicy:
        """The host network itself; development only, the result is labelled impure."""
        return cls(NetworkMode.HOST)


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """Everything that decides what the sandbox lets the workload do."""

    isolation: IsolationRequirement
    filesystem: FilesystemPolicy
    network: NetworkPolicy
    process: ProcessPolicy
    devices: DevicePolicy
    privileges: PrivilegePolicy
