"""What flows between the areas once a request is planned: data only, no host object behind it.

ContainerPlan holds no value of one attempt, so its digest names *what* is run; Placement holds all of them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import EMPTY, Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import FilesystemPolicy, NetworkMode

SHIM_DIR = "/.forgeyard"
"""Where the shim and its channel appear in every sandbox: a path no image owns."""


@dataclass(frozen=True, slots=True)
class JobUser:
    """Numeric identity inside the sandbox. `name` and `home` are for the environment and messages.

    :param home: as the image's passwd has it; empty where it has no such account.
    """

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    name: str = "forgeyard"
    home: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class RootfsBind:
    """A host path that is part of a rootfs (process mode's /usr), always read-only, nosuid, nodev."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class ImageHealthcheck:
    """How an image says that its program is well. Times in seconds.

    :param test: an argument vector, run inside; a test written for a shell has that shell in front.
    :param retries: failures in a row after which it counts as unhealthy.
    :param start_period: while it lasts, failures do not count.
    """

    test: tuple[str, ...]
    interval: float = 30.0
    timeout: float = 30.0
    start_period: float = 0.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An image as the engine has it that unpacked it.

    :param identity: what the engine calls it, by digest, and has to say of a container that is made of it.
    :param hold: what was made to keep it there while an attempt uses it, by name.
    :param volumes: paths that its config declares, over which an engine may put volumes of its own.
    """

    identity: str
    hold: str
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RootfsPlan:
    """A root filesystem as data. Made by `oci` for images and by `process_shim` for the host rootfs.

    :param kind: PROCESS or CONTAINER.
    :param lowers: directories on the host, topmost first. Process mode has one: the skeleton.
    :param binds: host paths put on top of it.
    :param writable: an ephemeral layer goes over it.
    :param identity: digest that provenance shows: the image's, or the skeleton's.
    :param env, user, entrypoint, cmd, workdir, stop_signal: from an image's config; empty in process mode.
    :param notes: what of the image can't be honoured and does no harm.
    :param volumes: directories that the image writes to: absolute, writable even on a read-only root.
    :param exposed_ports: what the image listens on, as ``5432/tcp``; nothing is published for them.
    :param healthcheck: None when the image has none, or switches its base's off.
    :param engine: the image whose layers at the runtime's engine `lowers` are; None for our own store's.
    """

    kind: ExecutorKind
    lowers: tuple[str, ...]
    identity: str
    binds: tuple[RootfsBind, ...] = ()
    writable: bool = False
    user: JobUser | None = None
    env: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    stop_signal: int = signal.SIGTERM
    notes: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    exposed_ports: tuple[str, ...] = ()
    healthcheck: ImageHealthcheck | None = None
    engine: EngineImage | None = None


class MountKind(StrEnum):
    """Mount types the compiler knows."""

    BIND = "bind"
    TMPFS = "tmpfs"
    PROC = "proc"
    CGROUP = "cgroup"
    DEVPTS = "devpts"
    MQUEUE = "mqueue"


@dataclass(frozen=True, slots=True)
class PlanMount:
    """One mount. For BIND, `slot` names a source that Placement resolves to a host path.

    :param recursive: False for a bind that can have no mounts below it: of a file, or of a directory of our own.
    """

    destination: str
    kind: MountKind
    slot: str = ""
    read_only: bool = True
    executable: bool = True
    size: int | None = None
    mode: int | None = None
    recursive: bool = True


@dataclass(frozen=True, slots=True)
class Rlimit:
    """A POSIX limit by its kernel name, such as RLIMIT_NOFILE."""

    name: str
    soft: int
    hard: int


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """What one container is, the same for every attempt of the same request on the same rootfs."""

    kind: ExecutorKind
    rootfs_identity: str
    root_read_only: bool
    mounts: tuple[PlanMount, ...]
    user: JobUser
    user_namespace: bool
    network: NetworkMode
    capabilities: tuple[str, ...]
    seccomp: str
    limits: ResourceLimits
    rlimits: tuple[Rlimit, ...]
    umask: int
    env: Mapping[str, str]
    workdir: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt of a plan is put on this host.

    :param rootfs: host path of the assembled root.
    :param sources: host path for each slot of the plan's BIND mounts.
    :param uid_base: first host uid and gid of the range; None when the plan has no user namespace.
    :param cgroup: path below each hierarchy's root, as OCI's cgroupsPath has it; None lets the runtime choose.
    :param netns: path of a namespace to join; None makes a new one (or the host's, for NetworkMode.HOST).
    :param argv: the shim's argument vector inside the sandbox.
    :param userns: path of a user namespace to join, whose maps are those of `uid_base`; None makes a new one.
    :param hostname: None takes one that is made from the sandbox's id.
    :param plumbed: the network is put into a new namespace of the container's, once it is there.
    """

    sandbox: SandboxId
    rootfs: str
    sources: Mapping[str, str]
    uid_base: int | None
    uid_count: int
    cgroup: str | None
    netns: str | None
    argv: tuple[str, ...]
    userns: str | None = None
    hostname: str | None = None
    plumbed: bool = False


@dataclass(frozen=True, slots=True)
class NetworkAttachment:
    """What `networks` made for an attempt. `netns` None: the runtime makes the namespace, loopback only.

    :param of: name of a container of the same attempt, whose namespace it is to share; that one runs by then.
    :param attempt: id of the attempt's sandbox, which is that of its job; empty where nothing was made for it.
    """

    mode: NetworkMode
    netns: str | None = None
    of: str | None = None
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled bundle. `config` is the exact bytes of config.json; digests as ``sha256:…``."""

    config: bytes
    plan_digest: str
    bundle_digest: str


_NO_SOURCES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PreparedExecution:
    """A fully validated plan before any workload process starts (seed, section 8)."""

    sandbox_id: SandboxId
    context: AttemptContext
    plan: ContainerPlan
    placement: Placement
    bundle: Bundle
    filesystem: FilesystemPolicy
    resource_limits: ResourceLimits
    notes: tuple[str, ...] = ()

    @property
    def bundle_digest(self) -> str:
        """Of `bundle`."""
        return self.bundle.bundle_digest
