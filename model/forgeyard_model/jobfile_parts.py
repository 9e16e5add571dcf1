"""Parts of the job file below the top level, each as CONTRACT has it. Pure data; `jobfile_convert` gives them meaning.

A field's description is what an editor shows, and what docs/job-file.md prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from forgeyard_model.job import Shell, When
from forgeyard_model.jobfile_types import (
    Argument,
    Cidr,
    Count,
    Cpus,
    Disk,
    Duration,
    Environment,
    Flag,
    HostPath,
    HostPattern,
    ImageReference,
    Memory,
    Name,
    Nofile,
    OutputPath,
    Pids,
    Platform,
    Port,
    SandboxPath,
    SecretName,
    ServiceName,
    Shm,
    SourcePath,
    Strict,
    Text,
    ToolchainName,
    User,
    Workdir,
    refusal,
)
from forgeyard_model.policy import NetworkMode, SourceMode


class Source(Strict):
    """The tree that appears at /work/source."""

    path: HostPath = Field(description="Directory to build, relative to the job file.")
    mode: SourceMode | None = Field(
        None, description="ro: read-only. cow: writes are discarded. rw: the tree itself (development only)."
    )


class Toolchain(Strict):
    """A host directory shown read-only at /toolchains/NAME, its bin directory in front of PATH."""

    path: HostPath = Field(description="Directory on the host, relative to the job file.")
    name: ToolchainName = Field(description="Name below /toolchains.")


class Resources(Strict):
    """Hard limits of the job's container. What is left out takes the profile's default."""

    cpus: Cpus | None = Field(None, description="Processors, such as 2 or 0.5.")
    memory: Memory | None = Field(None, description="Memory, swap off, tmpfs included.")
    pids: Pids | None = Field(None, description="Processes and threads at a time.")
    disk: Disk | None = Field(None, description="Bytes written outside the source's original files.")
    nofile: Nofile | None = Field(None, description="Open files of one process.")
    shm: Shm | None = Field(None, description="Size of /dev/shm.")


class Destination(Strict):
    """One place a restricted job may connect to: `host` or `cidr`, and its ports."""

    host: HostPattern | None = Field(None, description="Host name; *.example.org covers every name below it.")
    cidr: Cidr | None = Field(None, description="Network, such as 10.20.0.0/16.")
    ports: tuple[Port, ...] = Field((), description="Ports; none given means all of them.")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.host is None) == (self.cidr is None):
            raise refusal("give exactly one of host and cidr")
        return self


class Restricted(Strict):
    """The allowed destinations."""

    allow: tuple[Destination, ...] = Field(min_length=1, description="Where the job may connect to.")


def _network_name(value: object) -> NetworkMode:
    if value == NetworkMode.RESTRICTED:
        raise refusal("name its destinations: network: {restricted: {allow: [{host: NAME, ports: [443]}]}}")
    if not isinstance(value, str) or value not in _NETWORK_NAMES:
        raise refusal(f"write {', '.join(_NETWORK_NAMES)}, or a mapping with restricted")
    return NetworkMode(value)


_NETWORK_NAMES: Final = tuple(mode.value for mode in NetworkMode if mode is not NetworkMode.RESTRICTED)
NetworkName = Annotated[
    NetworkMode, PlainValidator(_network_name), WithJsonSchema({"type": "string", "enum": list(_NETWORK_NAMES)})
]


class NetworkMapping(Strict):
    """A network that is more than a name."""

    restricted: Restricted = Field(description="Only these destinations.")


def _network_form(value: object) -> str:
    return "mapping" if isinstance(value, (Mapping, NetworkMapping)) else "name"


Network = Annotated[
    Annotated[NetworkName, Tag("name")] | Annotated[NetworkMapping, Tag("mapping")], Discriminator(_network_form)
]


class Secret(Strict):
    """Where a secret appears. Its value never stands here: it comes with the request."""

    name: SecretName = Field(description="Name, as --secret NAME=… gives its value.")
    as_: Literal["env", "file"] = Field("env", alias="as", description="A variable, or a file on a private tmpfs.")
    path: SandboxPath | None = Field(None, description="For a file; /run/secrets/NAME when left out.")
    steps: tuple[Name, ...] | None = Field(None, min_length=1, description="The steps that see it; all without.")

    @model_validator(mode="after")
    def _path_is_for_files(self) -> Self:
        if self.path is not None and self.as_ != "file":
            raise refusal("path goes with `as: file`")
        return self


class Cache(Strict):
    """A directory kept between jobs under a key."""

    key: ToolchainName = Field(description="Which cache.")
    path: SandboxPath = Field(description="Where the job sees it.")
    mode: Literal["ro", "rw"] = Field("rw", description="ro: the job reads it only.")


class OutputFile(Strict):
    """A file or directory the job promises to leave in /work/output."""

    path: OutputPath = Field(description="Relative to /work/output.")
    optional: Flag = Field(False, description="Its absence does not fail the job.")


class StepFile(Strict):
    """One process of the job: a script (`run`) or an argument vector (`argv`)."""

    name: Name | None = Field(None, description="Shown in the summary; the program's name when left out.")
    run: Text | None = Field(None, min_length=1, description="A script, given to the shell as a file.")
    argv: tuple[Argument, ...] | None = Field(None, min_length=1, description="Program and arguments, no shell.")
    shell: Shell | None = Field(None, description="sh: /bin/sh -e. bash: --noprofile --norc -eo pipefail.")
    env: Environment = Field(default_factory=dict, description="Variables of this step alone.")
    workdir: Workdir | None = Field(None, description="Working directory; relative ones start at /work/source.")
    when: When = Field(When.ON_SUCCESS, description="on_success, on_failure or always.")
    continue_on_error: Flag = Field(False, description="Its failure does not fail the job.")
    background: Flag = Field(False, description="What it leaves running stays until the job ends.")

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if (self.run is None) == (self.argv is None):
            raise refusal("give exactly one of run and argv")
        if self.shell is not None and self.run is None:
            raise refusal("shell goes with run: argv starts no shell")
        if self.argv is not None and not self.argv[0]:
            raise refusal("argv starts with a program's name: it can't be empty")
        return self


def _shell_command(value: object) -> object:
    return ["/bin/sh", "-c", value] if isinstance(value, str) and value else value


HealthCommand = Annotated[
    tuple[Argument, ...],
    BeforeValidator(_shell_command, json_schema_input_type=str | list[str]),
]


class Health(Strict):
    """How a service shows that it is ready."""

    cmd: HealthCommand = Field(
        min_length=1, description="A command run in the service: a list, or one string for /bin/sh -c."
    )
    interval: Duration = Field(1.0, description="Between two probes.")
    timeout: Duration = Field(5.0, description="Of one probe.")
    retries: Count = Field(30, description="Failures in a row before the service counts as broken.")
    start_period: Duration | None = Field(None, description="Failures in this time do not count.")


class ServiceFile(Strict):
    """A file or directory of the source, put into a service read-only."""

    from_: SourcePath = Field(alias="from", description="Path in the source.")
    to: SandboxPath = Field(description="Path in the service.")


class ServiceResources(Strict):
    """Limits of a service's own container."""

    cpus: Cpus | None = Field(None, description="Processors; 1 when left out.")
    memory: Memory | None = Field(None, description="Memory; 512 MiB when left out.")
    pids: Pids | None = Field(None, description="Processes and threads at a time.")
    shm: Shm | None = Field(None, description="Size of /dev/shm.")


class Dependency(Strict):
    """What has to be true of another service first."""

    condition: Literal["service_started", "service_healthy", "service_completed_successfully"] = Field(
        "service_healthy", description="started, healthy, or completed_successfully (exit 0)."
    )


class ServiceSpec(Strict):
    """A container beside the job, reached by its name."""

    image: ImageReference = Field(description="Image reference.")
    platform: Platform | None = Field(None, description="linux/ARCHITECTURE of the image.")
    entrypoint: tuple[Argument, ...] | None = Field(None, description="Replaces the image's ENTRYPOINT.")
    command: tuple[Argument, ...] | None = Field(None, description="Replaces the image's CMD.")
    env: Environment = Field(default_factory=dict, description="Variables of the service.")
    user: User | None = Field(None, description="NAME, UID or UID:GID; the image's when left out.")
    aliases: tuple[ServiceName, ...] = Field((), description="More names for it.")
    files: tuple[ServiceFile, ...] = Field((), description="Files of the source put into it.")
    health: Health | None = Field(None, description="How it shows that it is ready.")
    resources: ServiceResources | None = Field(None, description="Its own limits.")
    depends_on: dict[ServiceName, Dependency] = Field(default_factory=dict, description="Services that come first.")
    oneshot: Flag = Field(False, description="It has to exit 0 before the steps start.")
    on_exit: Literal["fail", "ignore"] = Field("fail", description="What its death during the job means.")
