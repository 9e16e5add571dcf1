"""The schema of the `serve` table of config.toml."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt

from forgeyard_model.config_serve import TenantShare, TlsConfig
from forgeyard_model.jobfile_support import UNLIMITED
from forgeyard_model.jobfile_types import Argument, Cpus, Disk, Duration, Memory, Name, Pids, Strict, refusal

_LOOPBACK: Final = re.compile(r"(127\.0\.0\.1|\[::1\]):[0-9]{1,5}\Z")
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.\[\]:-]{1,253}:[0-9]{1,5}\Z")
_URL: Final = re.compile(r"https?://[A-Za-z0-9.\[\]:-]{1,253}(/[^\s]*)?\Z")
_UID: Final = re.compile(r"[0-9]{1,10}\Z")
_LAST_UID: Final = (1 << 32) - 2


def _absolute(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise refusal("write an absolute path without '..'")
    return text


def _metrics(text: str) -> str:
    if not _LOOPBACK.match(text):
        return _absolute(text)
    return text


def _audit(text: str) -> str:
    return text if text in ("journald", "syslog") else _absolute(text)


def _address(text: str) -> str:
    if not _ADDRESS.match(text):
        raise refusal("write HOST:PORT")
    return text


def _url(text: str) -> str:
    if not _URL.match(text):
        raise refusal("write http://HOST:PORT")
    return text


def _uid(text: str) -> str:
    if not _UID.match(text):
        raise refusal("write a numeric uid")
    return text


def _bounded(value: Any) -> Any:
    if value == UNLIMITED:
        raise refusal("write a value, or leave it out")
    return value


_Path = Annotated[Argument, AfterValidator(_absolute)]
_Uid = Annotated[StrictInt, Field(ge=0, le=_LAST_UID)]
_Limited = AfterValidator(_bounded)


class TenantTable(Strict):
    """What one tenant may have at once."""

    slots: Annotated[StrictInt, Field(ge=1)] | None = Field(None, description="Attempts that run.")
    cpus: Annotated[Cpus, _Limited] | None = Field(None, description="Processors of all of them.")
    memory: Annotated[Memory, _Limited] | None = Field(None, description="Memory of all of them.")

    def share(self) -> TenantShare:
        """As the model has it."""
        return TenantShare(**self.model_dump())


class TlsTable(Strict):
    """TCP with certificates on both sides."""

    address: Annotated[Argument, AfterValidator(_address)] = Field(description="HOST:PORT to listen at.")
    certificate: _Path = Field(description="PEM file of the server's certificate.")
    key: _Path = Field(description="PEM file of its key, readable for root alone.")
    client_ca: _Path = Field(description="PEM file of who signs callers' certificates.")


class ServeTable(Strict):
    """`forgeyard serve`."""

    socket: _Path | None = Field(None, description="Where agents connect; /run/forgeyard/executor.sock.")
    cri_socket: _Path | None = Field(None, description="Where crictl connects; none when left out.")
    metrics: Annotated[Argument, AfterValidator(_metrics)] | None = Field(
        None, description="Unix socket or 127.0.0.1:PORT that /metrics is served at; none when left out."
    )
    allowed_uids: tuple[_Uid, ...] | None = Field(None, description="Who may connect; root alone.")
    operators: tuple[_Uid, ...] | None = Field(None, description="Who sees, stops and drains everything; root alone.")
    runtimes: tuple[Name, ...] | None = Field(None, description="Who runs containers; the configured runtime alone.")
    on_restart: Literal["adopt", "destroy"] | None = Field(
        None, description="adopt keeps jobs over a restart of the server; destroy ends them. adopt."
    )
    on_client_death: Literal["continue", "cancel"] | None = Field(
        None, description="What becomes of a job whose client dies, where the request does not say; continue."
    )
    roots: dict[Annotated[str, AfterValidator(_uid)], tuple[_Path, ...]] | None = Field(
        None, description="Directories below which a caller's paths must be, by uid."
    )
    default_roots: tuple[_Path, ...] | None = Field(None, description="The same for any other uid; none.")
    slots: Annotated[StrictInt, Field(ge=1)] | None = Field(None, description="Attempts at once; 4 per processor.")
    cpus: Annotated[Cpus, _Limited] | None = Field(None, description="Processors of all attempts; 4 per processor.")
    memory: Annotated[Memory, _Limited] | None = Field(None, description="Memory of all attempts; 90% of the host's.")
    disk: Annotated[Disk, _Limited] | None = Field(None, description="Disk limits of all attempts; no bound.")
    pids: Annotated[Pids, _Limited] | None = Field(None, description="Pids limits of all attempts; no bound.")
    queue: Annotated[StrictInt, Field(ge=0)] | None = Field(None, description="Attempts that may wait; 1000.")
    aging: Duration | None = Field(None, description="Waiting that is worth one step of priority; 1m.")
    tenants: dict[Argument, TenantTable] | None = Field(None, description="What each tenant may have at once.")
    default_share: TenantTable | None = Field(None, description="The same for any other tenant; no bound.")
    drain: Duration | None = Field(None, description="What running attempts have after SIGTERM; 10m.")
    result_ttl: Duration | None = Field(None, description="How long ended attempts are kept; 1h.")
    keeper_linger: Duration | None = Field(
        None, description="How long a process that kept containers outlives the last of them and the server; 30s."
    )
    audit: Annotated[Argument, AfterValidator(_audit)] | None = Field(
        None, description="Where security events go: a file, journald or syslog; nowhere."
    )
    cri_writes: StrictBool | None = Field(None, description="Whether crictl may exec and stop; it may not.")
    cri_log_size: Annotated[Memory, _Limited] | None = Field(
        None, description="Size of a log that crictl reads, after which it is rotated; 10MiB."
    )
    cri_log_files: Annotated[StrictInt, Field(ge=1, le=100)] | None = Field(
        None, description="Files that are kept of each such log; 5."
    )
    keep_failed: Duration | None = Field(None, description="How long workspaces of failed attempts are kept; not.")
    tracing: Annotated[Argument, AfterValidator(_url)] | None = Field(
        None, description="http://HOST:PORT that OpenTelemetry spans are sent to; nowhere."
    )
    tls: TlsTable | None = Field(None, description="TCP, for callers with a certificate alone; none.")

    def values(self) -> dict[str, Any]:
        """What is set, as the model has it."""
        found: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        if self.roots is not None:
            found["roots"] = {int(uid): paths for uid, paths in self.roots.items()}
        if self.tenants is not None:
            found["tenants"] = {name: tenant.share() for name, tenant in self.tenants.items()}
        if self.default_share is not None:
            found["default_share"] = self.default_share.share()
        if self.tls is not None:
            found["tls"] = TlsConfig(self.tls.address, self.tls.certificate, self.tls.key, self.tls.client_ca)
        return {name: value for name, value in found.items() if value is not None}
