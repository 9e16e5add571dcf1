"""The executor's configuration as it is used. Reading and merging the files is `forgeyard_executor.config_load`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from forgeyard_model.config_serve import ServeConfig
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel, Need, NetworkDestination

DEFAULT_STATE_DIR: Final = "/var/lib/forgeyard"
DEFAULT_RUNTIME: Final = "runc"
OWN_ROOTFS: Final = "own"
"""Images are unpacked by the executor, in its own store."""


@dataclass(frozen=True, slots=True)
class UidBlock:
    """Host ids that attempts take their ranges from: `base` .. `base` + `size` - 1."""

    base: int
    size: int


@dataclass(frozen=True, slots=True)
class PatternRule:
    """Patterns of one file: a value must match one of them. `origin`: where they stand, for messages."""

    patterns: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class Space:
    """An amount of free space: bytes, a share (0 to 1) of the file system, or whichever of the two is less."""

    bytes: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        """In bytes, on a file system of `total` bytes."""
        amounts = [] if self.bytes is None else [self.bytes]
        if self.share is not None:
            amounts.append(int(total * self.share))
        return min(amounts, default=0)

    def __str__(self) -> str:
        parts = [] if self.bytes is None else [f"{self.bytes / (1 << 20):.10g} MiB"]
        if self.share is not None:
            parts.append(f"{self.share * 100:.10g}%")
        return " or ".join(parts)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Free space of each file system that the state lies on.

    :param gc_below: with less, what is kept for later is removed, the longest unused first, until there is half as
        much again.
    :param refuse_below: with less, even after that, no job is taken.
    """

    gc_below: Space = Space(5 << 30, 0.10)
    refuse_below: Space = Space(512 << 20, 0.02)


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds for which unused things are kept; None: until the space is needed."""

    images: float | None = None
    caches: float | None = None
    outputs: float | None = None


@dataclass(frozen=True, slots=True)
class CacheRules:
    """Bounds of what is kept between jobs.

    :param key_size: bytes of one cache; a job that leaves more is not saved.
    :param total_size: bytes of all; the longest unused go.
    :param every_profile: also release and high-assurance, which otherwise take nothing from earlier jobs.
    """

    key_size: int = 5 << 30
    total_size: int = 20 << 30
    every_profile: bool = False


@dataclass(frozen=True, slots=True)
class FetchCredential:
    """What the fetch proxy adds to requests to one host; the secret is in `file`, which no job sees.

    :param user: with one, the file holds its password; without, a bearer token, or the value of `header`.
    :param header: in the place of Authorization, with the file's text as its value.
    """

    host: str
    file: str
    user: str = ""
    header: str = ""
    port: int = 443
    tls: bool = True


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Networks of jobs.

    :param range: what their addresses come from, a small block for each.
    :param fetch: where the fetch proxy of ``fetch-only`` may go.
    :param proxy: URL of a proxy that the fetch proxy itself has to use; empty for none.
    :param conflists: names of the operator's own CNI networks that jobs may ask for.
    :param pool: networks that a long-lived executor keeps ready.
    """

    range: str = "10.213.0.0/16"
    fetch: tuple[NetworkDestination, ...] = ()
    proxy: str = ""
    credentials: tuple[FetchCredential, ...] = ()
    conflists: tuple[str, ...] = ()
    conflist_dirs: tuple[str, ...] = ("/etc/cni/net.d",)
    plugin_dirs: tuple[str, ...] = ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni")
    pool: int = 0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of daemons; empty: the environment decides, then the usual place."""

    containerd: str = ""
    podman: str = ""
    docker: str = ""


@dataclass(frozen=True, slots=True)
class RootfsRules:
    """Who unpacks images for the containers of an engine: ``own`` is the executor, the other word the engine."""

    containerd: str = OWN_ROOTFS
    podman: str = OWN_ROOTFS
    docker: str = OWN_ROOTFS

    def of(self, runtime: str) -> str:
        """What holds for a runtime; a command line has nothing but the executor."""
        return str(getattr(self, runtime, OWN_ROOTFS))


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The effective configuration; a field that nothing sets has the product's default.

    :param minimum_isolation: no job runs behind less, whatever its profile says.
    :param user_namespace: PREFERRED lets standard-ci run where a runtime has no user namespace of each attempt's own;
        the profiles above it, and jobs that are granted root, need one whatever this says.
    :param default_limits: in the place of the profile's, where a job names none.
    :param maximum_limits: a job that asks for more is refused.
    :param exact_limits: a limit that this host could only clamp is refused too, instead of being noted.
    :param allowed_registries, allowed_images: every rule must let an image pass; no rule lets all pass.
    :param approved_host_paths: shown to every job; the results say impure.
    :param origins: where a value comes from, by dotted key; a default has none.
    """

    state_dir: str = DEFAULT_STATE_DIR
    runtime: str = DEFAULT_RUNTIME
    endpoints: Endpoints = field(default_factory=Endpoints)
    rootfs: RootfsRules = field(default_factory=RootfsRules)
    minimum_isolation: IsolationLevel = IsolationLevel.NONE
    user_namespace: Need = Need.REQUIRED
    default_limits: ResourceLimits = field(default_factory=ResourceLimits)
    maximum_limits: ResourceLimits = field(default_factory=ResourceLimits)
    exact_limits: bool = False
    allowed_registries: tuple[PatternRule, ...] = ()
    allowed_images: tuple[PatternRule, ...] = ()
    approved_host_paths: tuple[ApprovedHostPath, ...] = ()
    uid_block: UidBlock | None = None
    retention: Retention = field(default_factory=Retention)
    watermarks: Watermarks = field(default_factory=Watermarks)
    caches: CacheRules = field(default_factory=CacheRules)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    origins: tuple[tuple[str, str], ...] = ()

    def origin(self, key: str) -> str:
        """Where the value of `key` was set: ``FILE:LINE``, ``env NAME``, or ``default``."""
        return dict(self.origins).get(key, "default")
