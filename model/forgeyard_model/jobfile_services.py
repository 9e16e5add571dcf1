"""Services in the job file: the forms they are written in, and what each becomes.

Where compose has a form for the same thing, that form is read too, with compose's meaning.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from forgeyard_model.jobfile_support import refuse_unlimited, resolve_image
from forgeyard_model.jobfile_types import (
    Argument,
    Count,
    Cpus,
    Duration,
    Environment,
    Flag,
    ImageReference,
    Memory,
    Nofile,
    Pids,
    Platform,
    Port,
    SandboxPath,
    ServiceName,
    Shm,
    SourcePath,
    Strict,
    User,
    refusal,
)
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.services import (
    Condition,
    ExecProbe,
    HealthCheck,
    HttpProbe,
    LogProbe,
    OnExit,
    Probe,
    ServiceFile,
    ServiceNetwork,
    ServiceSpec,
    TcpProbe,
    Tmpfs,
    regex_cure,
)

_T = TypeVar("_T", int, float)


def split_words(value: object) -> object:
    """A command in one string, split as a shell would, with nothing expanded; a list as it is."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise refusal(f"is no command: {error}; write a list") from error


def _health_words(value: object) -> object:
    """compose's forms: a string for the shell; a list that starts with CMD or CMD-SHELL; and a plain list."""
    if isinstance(value, str):
        return ["/bin/sh", "-c", value] if value else value
    if not isinstance(value, list) or not value:
        return value
    if value[0] == "CMD":
        return value[1:]
    if value[0] == "CMD-SHELL":
        return ["/bin/sh", "-c", *value[1:]]
    return value


def _list_of_one(value: object) -> object:
    return [value] if isinstance(value, (str, Mapping)) else value


Words = Annotated[
    tuple[Argument, ...],
    BeforeValidator(split_words, json_schema_input_type=str | list[str]),
]
HealthCommand = Annotated[
    tuple[Argument, ...],
    BeforeValidator(_health_words, json_schema_input_type=str | list[str]),
]
Status = Annotated[int, Field(strict=True, ge=100, le=599)]


class HttpHealth(Strict):
    """A GET request to the service."""

    port: Port = Field(description="Port of the service.")
    path: Annotated[Argument, Field(pattern=r"^/[!-~]*$")] = Field("/", description="Path and query, percent-encoded.")
    status: Annotated[
        tuple[Status, ...],
        BeforeValidator(
            lambda value: [value] if isinstance(value, int) else value, json_schema_input_type=int | list[int]
        ),
    ] = Field((), description="Answers that mean ready; 200 to 399 when left out.")


class LogHealth(Strict):
    """A line of the service's output: one that holds a text, or that a regular expression finds something in."""

    text: Argument | None = Field(None, min_length=1, description="Text that the line holds.")
    regex: Argument | None = Field(None, min_length=1, description="Regular expression, searched for in each line.")

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if (self.text is None) == (self.regex is None):
            raise refusal("give exactly one of text and regex")
        if cure := regex_cure(self.regex or ""):
            raise refusal(cure)
        return self


def _log_text(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


_WAYS: Final = ("cmd", "tcp", "http", "log")
_PACE: Final = ("interval", "timeout", "retries", "start_period")


class Health(Strict):
    """How a service shows that it is ready: one of cmd, tcp, http and log."""

    cmd: HealthCommand | None = Field(
        None, min_length=1, description="A command run in the service: a list, or one string for /bin/sh -c."
    )
    tcp: Port | None = Field(None, description="A port that accepts connections.")
    http: HttpHealth | None = Field(None, description="A request that is answered well.")
    log: Annotated[LogHealth, BeforeValidator(_log_text, json_schema_input_type=str | LogHealth)] | None = Field(
        None, description="Text in a line of its output, or {regex: …}."
    )
    disable: Flag = Field(False, description="It can't show it: started is enough. `health: none` is the same.")
    interval: Duration = Field(1.0, description="Between two probes.")
    timeout: Duration = Field(5.0, description="Of one probe.")
    retries: Count = Field(30, description="Failures in a row before the service counts as broken.")
    start_period: Duration | None = Field(None, description="Failures in this time do not count.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [way for way in _WAYS if getattr(self, way) is not None]
        if len(ways) + self.disable != 1:
            raise refusal("give exactly one of cmd, tcp, http and log, or write health: none")
        if ways == ["log"] and (pace := [name for name in _PACE if name in self.model_fields_set]):
            raise refusal(f"{pace[0]} goes with cmd, tcp and http: a line comes once")
        return self

    def probe(self) -> Probe | None:
        """What it is in the model."""
        if self.disable:
            return None
        if self.cmd is not None:
            return ExecProbe(self.cmd)
        if self.tcp is not None:
            return TcpProbe(self.tcp)
        if self.http is not None:
            return HttpProbe(self.http.port, self.http.path, self.http.status)
        if self.log is not None and self.log.regex is not None:
            return LogProbe(self.log.regex, regex=True)
        return LogProbe((self.log and self.log.text) or "")


def _no_health(value: object) -> object:
    return {"disable": True} if value == "none" else value


class FileEntry(Strict):
    """A file or directory of the source, put into a service read-only."""

    from_: SourcePath = Field(alias="from", description="Path in the source.")
    to: SandboxPath = Field(description="Path in the service.")


class ServiceResources(Strict):
    """Limits of a service's own container."""

    cpus: Cpus | None = Field(None, description="Processors; 1 when left out.")
    memory: Memory | None = Field(None, description="Memory; 512 MiB when left out.")
    pids: Pids | None = Field(None, description="Processes and threads at a time; 512 when left out.")
    nofile: Nofile | None = Field(None, description="Open files of one process.")
    shm: Shm | None = Field(None, description="Size of /dev/shm.")


class Dependency(Strict):
    """What has to be true of another service first."""

    condition: Literal["service_started", "service_healthy", "service_completed_successfully"] = Field(
        "service_healthy", description="started, healthy, or completed_successfully (exit 0)."
    )


def _dependencies(value: object) -> object:
    # A plain list means in compose that the others are started, no more.
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return {name: {"condition": "service_started"} for name in value}
    return value


class TmpfsEntry(Strict):
    """A tmpfs, which counts as the service's memory."""

    path: SandboxPath = Field(description="Path in the service.")
    size: Shm | None = Field(None, description="Its size; the memory limit bounds it too.")


def _tmpfs(value: object) -> object:
    """``PATH`` and ``PATH:size=64m`` as a mapping."""
    if not isinstance(value, str):
        return value
    path, _, options = value.partition(":")
    found: dict[str, Any] = {"path": path}
    for option in filter(None, options.split(",")):
        name, _, given = option.partition("=")
        if name != "size":
            raise refusal(f"{name} is no option that a tmpfs takes here: write PATH:size=64m")
        found["size"] = given
    return found


def volume_path(text: str) -> str:
    """The place of a volume written ``PATH`` or ``NAME:PATH``. Volumes start empty and are gone with the job.

    :raises PydanticCustomError: for a directory of the host, and for what is not absolute.
    """
    name, colon, path = text.rpartition(":")
    if colon and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise refusal("is a directory of the host, or has options: put single files in with `files`")
    if not path.startswith("/") or ".." in path.split("/"):
        raise refusal("write an absolute path inside the service, without '..'")
    return path


class ServiceEntry(Strict):
    """A container beside the job, reached by its name."""

    image: ImageReference | None = Field(None, description="Image reference; or give rootfs: host.")
    rootfs: Literal["host"] | None = Field(None, description="host: a program of the host, given by argv.")
    argv: tuple[Argument, ...] | None = Field(None, min_length=1, description="With rootfs: host, what it runs.")
    platform: Platform | None = Field(None, description="linux/ARCHITECTURE of the image.")
    entrypoint: Words | None = Field(None, description="Replaces the image's ENTRYPOINT: a list, or one string.")
    command: Words | None = Field(None, description="Replaces the image's CMD: a list, or one string.")
    env: Environment = Field(default_factory=dict, description="Variables of the service.")
    user: User | None = Field(None, description="NAME, UID or UID:GID; the image's when left out.")
    workdir: SandboxPath | None = Field(None, description="Working directory; the image's when left out.")
    aliases: tuple[ServiceName, ...] = Field((), description="More names for it.")
    files: tuple[FileEntry, ...] = Field((), description="Files of the source put into it.")
    tmpfs: Annotated[
        tuple[Annotated[TmpfsEntry, BeforeValidator(_tmpfs, json_schema_input_type=str | TmpfsEntry)], ...],
        BeforeValidator(_list_of_one, json_schema_input_type=str | list[str | TmpfsEntry]),
    ] = Field((), description="Directories in memory: PATH, PATH:size=64m, or a mapping.")
    volumes: tuple[Annotated[Argument, AfterValidator(volume_path)], ...] = Field(
        (), description="Writable directories, gone with the job: PATH or NAME:PATH."
    )
    health: Annotated[Health, BeforeValidator(_no_health, json_schema_input_type=Literal["none"] | Health)] | None = (
        Field(None, description="How it shows that it is ready; none: started is enough.")
    )
    resources: ServiceResources = Field(default_factory=ServiceResources, description="Its own limits.")
    depends_on: Annotated[
        dict[ServiceName, Dependency],
        BeforeValidator(_dependencies, json_schema_input_type=list[str] | dict[str, Dependency]),
    ] = Field(default_factory=dict, description="Services that come first.")
    oneshot: Flag = Field(False, description="It has to exit 0 before the steps start.")
    on_exit: OnExit = Field(OnExit.FAIL, description="What its death during the job means.")
    network: ServiceNetwork = Field(
        ServiceNetwork.OWN, description="own, or localhost: it shares the network namespace of the job."
    )

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if (self.image is None) == (self.rootfs is None):
            raise refusal("give exactly one of image and rootfs: host")
        if (self.rootfs is None) != (self.argv is None):
            raise refusal("rootfs: host and argv go together; for an image write command")
        if self.rootfs and not (self.entrypoint is None and self.command is None and self.platform is None):
            raise refusal("entrypoint, command and platform go with an image")
        return self


_CONDITIONS: Final = {
    "service_started": Condition.STARTED,
    "service_healthy": Condition.HEALTHY,
    "service_completed_successfully": Condition.COMPLETED_SUCCESSFULLY,
}


def describe_service(name: str, entry: ServiceEntry, *, base: str) -> ServiceSpec:
    """The service that `entry` describes; a relative layout of an image starts at the directory `base`."""
    return ServiceSpec(
        name=name,
        image=None if entry.image is None else resolve_image(entry.image, base=base),
        argv=entry.argv or (),
        aliases=entry.aliases,
        platform=entry.platform,
        entrypoint=entry.entrypoint,
        command=entry.command,
        env=dict(entry.env),
        user=entry.user,
        workdir=entry.workdir,
        files=tuple(ServiceFile(item.from_, item.to) for item in entry.files),
        tmpfs=tuple(Tmpfs(item.path, item.size) for item in entry.tmpfs),
        volumes=entry.volumes,
        limits=_limits(entry.resources),
        health=_health(entry.health),
        depends_on={other: _CONDITIONS[item.condition] for other, item in entry.depends_on.items()},
        oneshot=entry.oneshot,
        on_exit=entry.on_exit,
        network=entry.network,
    )


def _health(health: Health | None) -> HealthCheck | None:
    if health is None:
        return None
    return HealthCheck(health.probe(), health.interval, health.timeout, health.retries, health.start_period or 0.0)


def _limits(resources: ServiceResources) -> ResourceLimits:
    return ResourceLimits(
        cpus=_value(resources.cpus),
        memory=_value(resources.memory),
        pids=_value(resources.pids),
        nofile=resources.nofile,
        shm=resources.shm,
    )


def _value(limit: _T | str | None) -> _T | None:
    return None if isinstance(limit, str) else limit


def refuse_unlimited_services(services: Mapping[str, ServiceEntry]) -> None:
    """A service is always bounded.

    :raises ExecutorError: UNSUPPORTED, naming the field.
    """
    for name, entry in services.items():
        for limit in ("cpus", "memory", "pids"):
            refuse_unlimited(f"services.{name}.resources.{limit}", getattr(entry.resources, limit))
