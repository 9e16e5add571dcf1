"""What a sandbox must and may do (seed, sections 15-83)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import total_ordering


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
    """The modes of section 79; HOST is the development profile's own, labelled impure."""

    DENY = "deny"
    FETCH_ONLY = "fetch-only"
    RESTRICTED = "restricted"
    ALLOW = "allow"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class NetworkDestination:
    """One allowed destination: a host name (``*.`` prefix allowed) or a CIDR, and ports (empty: all)."""

    host: str = ""
    cidr: str = ""
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """Where a restricted job may connect to."""

    destinations: tuple[NetworkDestination, ...]


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """A network mode, with its destinations when restricted."""

    mode: NetworkMode
    egress: EgressPolicy | None = None

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
