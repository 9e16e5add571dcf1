"""The schema of config.toml (docs/configuration.md): one pydantic model for the files and the environment alike."""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, StrictBool, StrictInt, WithJsonSchema, model_validator

from forgeyard_model.config import FetchCredential, Space
from forgeyard_model.config_file_serve import ServeTable
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.jobfile_support import UNLIMITED
from forgeyard_model.jobfile_types import (
    Argument,
    Cidr,
    Cpus,
    Disk,
    Duration,
    HostPattern,
    Memory,
    Name,
    Nofile,
    Pids,
    Port,
    Shm,
    Size,
    Strict,
    WallTime,
    refusal,
)
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import IsolationLevel, Need, NetworkDestination

RANGE: Final = 65536
"""Ids of one attempt."""
_LAST_ID: Final = (1 << 32) - 2
"""The one above means "none"."""
_PATTERN: Final = re.compile(r"[^\s\x00-\x1f\x7f]+\Z")
_SHARE: Final = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,3})?)\s*%\Z")
_PROXY: Final = re.compile(r"http://[A-Za-z0-9.-]{1,253}:[0-9]{1,5}/?\Z")
_BLOCK: Final = 27
_MOST_POOL: Final = 256
_ENDPOINT: Final = re.compile(r"[a-z+]+://[^\s\x00-\x1f\x7f]+\Z")
_RUNTIME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z")


def _limited(value: Any) -> Any:
    if value == UNLIMITED:
        raise refusal("write a value, or leave it out")
    return value


def _host_path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise refusal("write an absolute path without '..'")
    return text


def _pattern(text: str) -> str:
    if not _PATTERN.match(text):
        raise refusal("write a pattern such as registry.example.org/team/*, without spaces")
    return text


def _runtime(text: str) -> str:
    if not _RUNTIME.match(text):
        raise refusal("write the name of a runtime, such as runc or podman")
    return text


def _endpoint(text: str) -> str:
    if not _ENDPOINT.match(text):
        raise refusal("write unix:///PATH")
    return text


def _bounded(value: IsolationLevel) -> IsolationLevel:
    if value is IsolationLevel.NONE:
        raise refusal("no job runs without isolation: write process or more, or leave it out")
    return value


def _range(text: str) -> str:
    try:
        network = IPv4Network(text)
    except ValueError as error:
        raise refusal("write an IPv4 network such as 10.213.0.0/16") from error
    if not network.is_private or network.prefixlen > _BLOCK:
        raise refusal(f"write a private network of at least a /{_BLOCK}: each job takes one such block")
    return text


def _proxy(text: str) -> str:
    if not _PROXY.match(text):
        raise refusal("write http://HOST:PORT")
    return text


def _space(value: Any) -> Space:
    """`value` as a size, or as a share of the file system."""
    if isinstance(value, str) and (found := _SHARE.match(value)):
        return Space(share=float(found[1]) / 100)
    try:
        return Space(bytes=ResourceLimits.parse(shm=value).shm)
    except (InvalidRequest, AttributeError, TypeError) as error:
        raise refusal("write a size such as 5GiB, or a share of the file system from 0% to 99%") from error


SpaceText = Annotated[
    Space,
    PlainValidator(_space),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["5GiB", "10%"]}),
]
Endpoint = Annotated[Argument, AfterValidator(_endpoint)]
AbsolutePath = Annotated[Argument, AfterValidator(_host_path)]
Pattern = Annotated[Argument, AfterValidator(_pattern)]
_Limited = AfterValidator(_limited)


class LimitsTable(Strict):
    """Limits as a job file writes them."""

    cpus: Annotated[Cpus, _Limited] | None = Field(None, description="Processors, such as 2 or 0.5.")
    memory: Annotated[Memory, _Limited] | None = Field(None, description="Memory, swap off, tmpfs included.")
    pids: Annotated[Pids, _Limited] | None = Field(None, description="Processes and threads at a time.")
    disk: Annotated[Disk, _Limited] | None = Field(None, description="What the job writes.")
    nofile: Nofile | None = Field(None, description="Open files of one process.")
    shm: Shm | None = Field(None, description="Size of /dev/shm.")
    timeout: Annotated[WallTime, _Limited] | None = Field(None, description="Of all steps together.")

    def limits(self) -> ResourceLimits:
        """As the model has them."""
        values = self.model_dump()
        return ResourceLimits(wall_time=values.pop("timeout"), **values)


class LimitTables(Strict):
    """Two tables of limits."""

    default: LimitsTable = Field(default_factory=LimitsTable, description="What a job gets that names none.")
    maximum: LimitsTable = Field(default_factory=LimitsTable, description="A job that asks for more is refused.")


class UidBlockTable(Strict):
    """Host ids that attempts take their ranges of 65536 from."""

    base: Annotated[StrictInt, Field(ge=RANGE, le=_LAST_ID)] = Field(description="First id.")
    size: Annotated[StrictInt, Field(ge=RANGE, le=_LAST_ID)] = Field(description="How many; 65536 per running job.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.base + self.size - 1 > _LAST_ID:
            raise refusal(f"base and size reach past {_LAST_ID}, the last id there is")
        return self


class ApprovedPathTable(Strict):
    """A host path that every job sees."""

    source: AbsolutePath = Field(description="Path on the host.")
    destination: AbsolutePath | None = Field(None, description="Path in the sandbox; the same when left out.")
    read_only: StrictBool = Field(True, description="Whether jobs may only read it.")


class EndpointsTable(Strict):
    """Where daemons listen, in the place of what the environment and Docker's contexts say."""

    containerd: Endpoint | None = Field(None, description="unix:///PATH of containerd's socket.")
    podman: Endpoint | None = Field(None, description="unix:///PATH of the socket of root's Podman service.")
    docker: Endpoint | None = Field(None, description="unix:///PATH of dockerd's socket, or tcp://127.0.0.1:PORT.")


class RootfsTable(Strict):
    """Who unpacks images, by runtime: own is the executor itself."""

    containerd: Literal["own", "snapshotter"] | None = Field(None, description="own, or containerd's snapshotter.")
    podman: Literal["own", "image"] | None = Field(None, description="own, or image: Podman's own store.")
    docker: Literal["own", "image"] | None = Field(None, description="own, or image: Docker's own store.")


class RetentionTable(Strict):
    """How long what is kept is kept."""

    images: Duration | None = Field(None, description="Unpacked images that no job used.")
    caches: Duration | None = Field(None, description="Caches that no job used.")
    outputs: Duration | None = Field(None, description="Output of finished jobs.")


class WatermarksTable(Strict):
    """Free space of each file system that the state directory's parts lie on: a size, or a share such as 10%."""

    gc_below: SpaceText | None = Field(
        None, description="Below this, what no job uses is removed, longest unused first."
    )
    refuse_below: SpaceText | None = Field(None, description="Below this, no new job is taken.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        collect, refuse = self.gc_below, self.refuse_below
        if collect is not None and refuse is not None:
            for least, most in ((collect.bytes, refuse.bytes), (collect.share, refuse.share)):
                if least is not None and most is not None and least < most:
                    raise refusal("gc_below has to be at least refuse_below")
        return self


class CachesTable(Strict):
    """Bounds of the caches between jobs."""

    key_size: Size | None = Field(None, description="Of one cache; a job that leaves more is not saved.")
    total_size: Size | None = Field(None, description="Of all; the longest unused go.")
    every_profile: StrictBool | None = Field(None, description="Also in release and high-assurance.")


class FetchTable(Strict):
    """A place that the fetch proxy may go to."""

    host: HostPattern | None = Field(None, description="Host name; *.example.org covers every name below it.")
    cidr: Cidr | None = Field(None, description="Network, such as 10.20.0.0/16.")
    ports: tuple[Port, ...] = Field((), description="Ports; none given means 443, and 80 for plain HTTP.")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.host is None) == (self.cidr is None):
            raise refusal("give exactly one of host and cidr")
        if ":" in (self.cidr or ""):
            raise refusal("name IPv4 networks: a job's network has no IPv6")
        return self


class CredentialTable(Strict):
    """What the fetch proxy adds to requests to one host."""

    host: HostPattern = Field(description="Host name; no wildcard.")
    file: AbsolutePath = Field(description="File with the secret, readable for root alone.")
    user: Argument | None = Field(None, description="User name, when the file holds a password.")
    header: Argument | None = Field(None, description="Header to set, in the place of Authorization.")
    port: Port = Field(443, description="Port of the host.")
    tls: StrictBool = Field(True, description="Whether the proxy speaks TLS to the host.")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.user is not None and self.header is not None:
            raise refusal("user is for Authorization: give one of user and header")
        if self.host.startswith("*"):
            raise refusal("a secret is for one host: write its name")
        return self


class NetworkTable(Strict):
    """Networks of jobs."""

    range: Annotated[Argument, AfterValidator(_range)] | None = Field(
        None, description="Private IPv4 network that jobs' addresses come from; 10.213.0.0/16."
    )
    fetch: tuple[FetchTable, ...] | None = Field(None, description="Where the proxy of fetch-only may go.")
    proxy: Annotated[Argument, AfterValidator(_proxy)] | None = Field(
        None, description="http://HOST:PORT of a proxy that the fetch proxy has to use."
    )
    credentials: tuple[CredentialTable, ...] | None = Field(None, description="What the fetch proxy adds, by host.")
    conflists: tuple[Name, ...] | None = Field(None, description="CNI networks that jobs may ask for by name.")
    conflist_dirs: tuple[AbsolutePath, ...] | None = Field(None, description="Where their files are.")
    plugin_dirs: tuple[AbsolutePath, ...] | None = Field(None, description="Where their plugins are.")
    pool: Annotated[StrictInt, Field(ge=0, le=_MOST_POOL)] | None = Field(
        None, description="Networks kept ready while an executor is open; 0."
    )

    def values(self) -> dict[str, Any]:
        """What is set, as the model has it."""
        found: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        if self.fetch is not None:
            found["fetch"] = tuple(
                NetworkDestination(item.host or "", item.cidr or "", item.ports, ("tcp",)) for item in self.fetch
            )
        if self.credentials is not None:
            found["credentials"] = tuple(
                FetchCredential(item.host, item.file, item.user or "", item.header or "", item.port, item.tls)
                for item in self.credentials
            )
        return {name: value for name, value in found.items() if value is not None}


class ConfigFile(Strict):
    """One layer of the configuration. None: this layer does not set it."""

    state_dir: AbsolutePath | None = Field(None, description="Where the executor keeps its state.")
    runtime: Annotated[str, AfterValidator(_runtime)] | None = Field(
        None, description="Who runs containers: runc, crun, containerd, podman or docker."
    )
    endpoints: EndpointsTable | None = Field(None, description="Where daemons listen.")
    rootfs: RootfsTable | None = Field(None, description="Who unpacks images, by runtime. System file only.")
    minimum_isolation: Annotated[IsolationLevel, AfterValidator(_bounded)] | None = Field(
        None, description="No job runs behind less."
    )
    user_namespace: Need | None = Field(
        None, description="preferred lets standard-ci run on Docker, which has none. System file only."
    )
    allowed_registries: tuple[Pattern, ...] | None = Field(None, description="Where images may come from.")
    allowed_images: tuple[Pattern, ...] | None = Field(None, description="Images that may run.")
    exact_limits: StrictBool | None = Field(
        None, description="Refuse a limit that this host could only hold at less than was asked."
    )
    limits: LimitTables = Field(default_factory=LimitTables, description="Defaults and maximums.")
    uid_block: UidBlockTable | None = Field(None, description="Host ids for user namespaces. System file only.")
    approved_host_paths: tuple[ApprovedPathTable, ...] | None = Field(
        None, description="Host paths that every job sees; results say impure. System file only."
    )
    retention: RetentionTable | None = Field(None, description="How long things are kept.")
    watermarks: WatermarksTable | None = Field(None, description="What happens when disk space gets short.")
    caches: CachesTable | None = Field(None, description="Bounds of the caches between jobs.")
    network: NetworkTable | None = Field(None, description="Networks of jobs. System file only.")
    serve: ServeTable | None = Field(None, description="The server of `forgeyard serve`. System file only.")


SYSTEM_ONLY: Final = ("user_namespace", "uid_block", "approved_host_paths", "caches", "network", "rootfs", "serve")
"""Keys that decide for everybody on the host."""
