"""What `forgeyard serve` goes by: the `serve` table of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

DEFAULT_SOCKET: Final = "/run/forgeyard/executor.sock"
ADOPT, DESTROY = "adopt", "destroy"
"""What becomes of running jobs when a server dies and is started again."""


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant may have at once. None: as much as there is. cpus: cores. memory: bytes."""

    slots: int | None = None
    cpus: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TCP at `address` (HOST:PORT), for callers with a certificate of `client_ca` alone. The rest are files."""

    address: str
    certificate: str
    key: str
    client_ca: str


_NO_ROOTS: Final[Mapping[int, tuple[str, ...]]] = MappingProxyType({})
_NO_TENANTS: Final[Mapping[str, TenantShare]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """One server.

    :param socket, cri_socket: paths; no `cri_socket`, no CRI.
    :param metrics: path of a Unix socket, or 127.0.0.1:PORT; empty for none.
    :param allowed_uids: who may connect. operators: which of them see, stop and drain everything.
    :param runtimes: empty is the configured runtime alone.
    :param on_restart: ADOPT keeps containers in processes that outlive the server; DESTROY ends them with it.
    :param on_client_death: ``continue`` or ``cancel``, where a request does not say.
    :param roots: directories below which a caller's host paths must be, by uid; default_roots: of the others.
    :param slots, cpus, memory, disk, pids: what all attempts may have at once; None is what the host has, and for disk
        and pids no bound.
    :param queue: attempts that may wait. aging: seconds of waiting that are worth one step of priority.
    :param tenants: shares by name; default_share: of the others.
    :param drain: seconds that running attempts have after SIGTERM.
    :param result_ttl: seconds for which an ended attempt is kept for its caller.
    :param keeper_linger: seconds for which a process that kept containers waits for a server, once it has none.
    :param audit: where security events go: a file's path, ``journald`` or ``syslog``; empty for none.
    :param cri_writes: `crictl exec --sync` and `stopp` are allowed.
    :param cri_log_size: bytes of a log that crictl reads, after which it is rotated; cri_log_files: kept of each.
    :param keep_failed: seconds for which a failed attempt's workspace is kept for debugging; None: not at all.
    :param tracing: where OpenTelemetry spans go, as http://HOST:PORT; empty for nowhere.
    """

    socket: str = DEFAULT_SOCKET
    cri_socket: str = ""
    metrics: str = ""
    allowed_uids: tuple[int, ...] = (0,)
    operators: tuple[int, ...] = (0,)
    runtimes: tuple[str, ...] = ()
    on_restart: str = ADOPT
    on_client_death: str = "continue"
    roots: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: _NO_ROOTS)
    default_roots: tuple[str, ...] = ()
    slots: int | None = None
    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    pids: int | None = None
    queue: int = 1000
    aging: float = 60.0
    tenants: Mapping[str, TenantShare] = field(default_factory=lambda: _NO_TENANTS)
    default_share: TenantShare = TenantShare()
    drain: float = 600.0
    result_ttl: float = 3600.0
    keeper_linger: float = 30.0
    audit: str = ""
    cri_writes: bool = False
    cri_log_size: int = 10 << 20
    cri_log_files: int = 5
    keep_failed: float | None = None
    tracing: str = ""
    tls: TlsConfig | None = None

    @property
    def run_dir(self) -> Path:
        """Where its keepers are: beside its socket."""
        return Path(self.socket).parent
