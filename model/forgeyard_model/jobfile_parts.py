"""Parts of the job file below the top level, each as CONTRACT has it. Pure data; `jobfile_convert` gives them meaning.

A field's description is what an editor shows, and what docs/job-file.md prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from forgeyard_model.cache import MOST_KEY, CacheMode, key_cure, path_cure
from forgeyard_model.job import Shell, When
from forgeyard_model.jobfile_types import (
    Argument,
    Cidr,
    Cpus,
    Disk,
    Environment,
    Flag,
    HostPath,
    HostPattern,
    Memory,
    Name,
    Nofile,
    OutputPath,
    Pids,
    Port,
    SandboxPath,
    SecretName,
    Shm,
    Strict,
    Text,
    ToolchainName,
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
    """One place a restricted job may connect to: `host` or `cidr`, its ports and protocols."""

    host: HostPattern | None = Field(None, description="Host name; *.example.org covers every name below it.")
    cidr: Cidr | None = Field(None, description="Network, such as 10.20.0.0/16.")
    ports: tuple[Port, ...] = Field((), description="Ports; none given means all of them.")
    protocols: tuple[Literal["tcp", "udp", "icmp"], ...] = Field(
        (), description="tcp, udp, icmp; none given means tcp and udp."
    )

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
        raise refusal(f"write {', '.join(_NETWORK_NAMES)}, or a mapping with restricted, audit or conflist")
    return NetworkMode(value)


_NETWORK_NAMES: Final = tuple(
    mode.value for mode in NetworkMode if mode not in (NetworkMode.RESTRICTED, NetworkMode.CONFLIST)
)
NetworkName = Annotated[
    NetworkMode, PlainValidator(_network_name), WithJsonSchema({"type": "string", "enum": list(_NETWORK_NAMES)})
]


class Published(Strict):
    """A TCP port of a service on the host's loopback (development only)."""

    service: Name = Field(description="Name of the service.")
    port: Port = Field(description="Port of the service.")
    host_port: Port = Field(description="Port of 127.0.0.1 on the host.")


class NetworkMapping(Strict):
    """A network that is more than a name."""

    mode: NetworkName | None = Field(None, description="Beside publish: deny, fetch-only or allow.")
    restricted: Restricted | None = Field(None, description="Only these destinations.")
    audit: Flag = Field(
        False, description="Let everything outside through and record it, for `forgeyard policy from-audit`."
    )
    conflist: Name | None = Field(None, description="An operator's own CNI network, by its name.")
    publish: tuple[Published, ...] = Field((), description="Ports of services on the host's loopback.")

    @model_validator(mode="after")
    def _one_network(self) -> Self:
        named = [self.mode is not None, self.restricted is not None or self.audit, self.conflist is not None]
        if sum(named) > 1:
            raise refusal("mode, restricted (or audit) and conflist are three networks: choose one")
        if not any(named) and not self.publish:
            raise refusal("name a network: restricted, audit or conflist")
        return self


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


def _cache_key(text: str) -> str:
    if cure := key_cure(text):
        raise refusal(cure)
    return text


def _cache_path(text: str) -> str:
    if cure := path_cure(text):
        raise refusal(cure)
    return text


class Cache(Strict):
    """A directory kept between jobs under a key."""

    key: Annotated[Argument, AfterValidator(_cache_key), Field(min_length=1, max_length=MOST_KEY)] = Field(
        description="Which cache: any text, such as cargo-linux or npm/main."
    )
    path: Annotated[Argument, AfterValidator(_cache_path)] = Field(description="Where the job sees it.")
    mode: CacheMode = Field(
        CacheMode.RW, description="ro: the job reads it only. rw: what a job that succeeds leaves is kept."
    )


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
