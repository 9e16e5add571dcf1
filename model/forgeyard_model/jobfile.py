"""The job file (CONTRACT.md, A job file): one pydantic model, the text's only meaning.

It covers the whole format, including parts that this version cannot run yet: they are read and checked, and
`to_job` refuses them by name. Reading YAML, with its positions, is the business of `forgeyard_api`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from forgeyard_model.job import Job
from forgeyard_model.jobfile_parts import (
    Cache,
    Network,
    OutputFile,
    Resources,
    Secret,
    Source,
    StepFile,
    Toolchain,
)
from forgeyard_model.jobfile_services import ServiceEntry
from forgeyard_model.jobfile_types import (
    CdiDevice,
    Duration,
    DurationOrZero,
    Environment,
    Flag,
    ImageReference,
    Name,
    Platform,
    ServiceName,
    Size,
    Strict,
    User,
    WallTime,
    Workdir,
    refusal,
)
from forgeyard_model.policy import CapabilityGrant
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.services import cycle_cure, find_cycle

SCHEMA_ID: Final = "urn:forgeyard:schema:job:1"
"""Stable: an editor's setting that names it keeps working while `version: 1` is read."""

Problem = tuple[tuple[str | int, ...], object, str]
"""Where (keys and indices), the value that is there, the cure."""


class JobFile(Strict):
    """A job: where it runs, within which bounds, and its steps."""

    version: Literal[1] = Field(description="Version of this format: 1.")
    name: Name = Field("job", description="Name of the job, for people.")
    profile: ExecutionProfile = Field(
        ExecutionProfile.STANDARD_CI, description="Set of defaults and bounds: see docs/profiles.md."
    )
    image: ImageReference | None = Field(None, description="Image to run in, by digest; or give rootfs: host.")
    rootfs: Literal["host"] | None = Field(None, description="host: run on the host's own programs, read-only.")
    platform: Platform | None = Field(None, description="linux/ARCHITECTURE of the image.")
    user: User | None = Field(None, description="NAME, UID or UID:GID; forgeyard (1000), or the image's USER.")
    capabilities: CapabilityGrant | None = Field(
        None, description="none, or root-in-userns: what apt-get needs, inside the job's own user namespace."
    )
    env: Environment = Field(default_factory=dict, description="Variables of every step.")
    workdir: Workdir | None = Field(None, description="Working directory; relative ones start at /work/source.")
    source: Source | None = Field(None, description="Tree that appears at /work/source; none when left out.")
    toolchains: tuple[Toolchain, ...] = Field((), description="Host directories shown below /toolchains.")
    resources: Resources = Field(default_factory=Resources, description="Hard limits.")
    timeout: WallTime | None = Field(None, description="Of all steps together.")
    grace: DurationOrZero = Field(10.0, description="Between the soft signal and the kill.")
    prepare_timeout: Duration = Field(600.0, description="Of pull and set-up.")
    services_timeout: Duration = Field(120.0, description="Of the services' readiness.")
    finally_timeout: DurationOrZero = Field(0.0, description="For `always` steps after a time-out or a cancel.")
    network: Network | None = Field(None, description="deny, fetch-only, allow, host, or restricted destinations.")
    secrets: tuple[Secret, ...] = Field((), description="Where secrets appear; values come with the request.")
    devices: tuple[CdiDevice, ...] = Field((), description="CDI devices, such as vendor.com/gpu=0.")
    caches: tuple[Cache, ...] = Field((), description="Directories kept between jobs.")
    services: dict[ServiceName, ServiceEntry] = Field(default_factory=dict, description="Containers beside the job.")
    steps: tuple[StepFile, ...] = Field(min_length=1, max_length=1000, description="What runs, in order.")
    outputs: tuple[OutputFile, ...] = Field((), description="Files the job promises to leave in /work/output.")
    merge_output: Flag = Field(False, description="One exact stream of stdout and stderr together.")
    output_cap: Size = Field(512 << 20, description="Bytes of output that are kept, head and tail.")

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        if (self.image is None) == (self.rootfs is None):
            raise refusal("give exactly one of image and rootfs: host")
        problems = [*_duplicates(self), *_unknown_names(self)]
        if problems:
            raise ValidationError.from_exception_data("job file", [_details(*problem) for problem in problems])
        return self

    def to_job(self, *, base: str = "/") -> Job:
        """The job this file describes; relative host paths start at the directory `base`.

        :raises ExecutorError: UNSUPPORTED, for a part that this version can't run, by its field.
        :raises InvalidRequest: for a value that the file's profile does not allow.
        """
        from forgeyard_model.jobfile_convert import job_from_file

        return job_from_file(self, base=base)


def job_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the job file."""
    schema = _tidy(JobFile.model_json_schema(by_alias=True))
    schema["$defs"]["StepFile"]["oneOf"] = [{"required": ["run"]}, {"required": ["argv"]}]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, "title": "Forgeyard job file"}
    return {**head, **schema, "oneOf": [{"required": ["image"]}, {"required": ["rootfs"]}]}


def _tidy(node: Any) -> Any:
    """What an editor shows: no invented titles, no null as a choice, durations as a person writes them."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _tidy(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    if {"type": "null"} in out.get("anyOf", ()):
        choices = [choice for choice in out.pop("anyOf") if choice != {"type": "null"}]
        out = {**out, **(choices[0] if len(choices) == 1 else {"anyOf": choices})}
    if out.get("default", 0) is None:
        del out["default"]
    if out.get("type") == "string" and isinstance(out.get("default"), float):
        out["default"] = f"{out['default']:g}s"
    return out


def _details(loc: tuple[str | int, ...], value: object, cure: str) -> InitErrorDetails:
    return InitErrorDetails(type=refusal(cure), loc=loc, input=value)


def _duplicates(file: JobFile) -> Iterator[Problem]:
    """Names that must stand for one thing only."""
    groups: list[tuple[str, str, list[str]]] = [
        ("toolchains", "name", [item.name for item in file.toolchains]),
        ("secrets", "name", [item.name for item in file.secrets]),
        ("caches", "key", [item.key for item in file.caches]),
        ("caches", "path", [item.path for item in file.caches]),
        ("outputs", "path", [item.path for item in file.outputs]),
    ]
    for field, key, values in groups:
        for index, value in enumerate(values):
            if value in values[:index]:
                yield (field, index, key), value, f"stands twice in {field}: keep one"
    taken = set(file.services)
    for name, service in file.services.items():
        for index, alias in enumerate(service.aliases):
            if alias in taken:
                yield ("services", name, "aliases", index), alias, "is taken by another service: choose another name"
            taken.add(alias)


def _unknown_names(file: JobFile) -> Iterator[Problem]:
    """References to steps and services that are not there."""
    steps = {step.name for step in file.steps}
    for index, secret in enumerate(file.secrets):
        for position, step in enumerate(secret.steps or ()):
            if step not in steps:
                yield ("secrets", index, "steps", position), step, "no step has this name"
    for name, service in file.services.items():
        for other in service.depends_on:
            if other not in file.services or other == name:
                yield ("services", name, "depends_on", other), other, "no other service has this name"
    if cycle := find_cycle({name: set(entry.depends_on) - {name} for name, entry in file.services.items()}):
        yield ("services", cycle[0], "depends_on", cycle[1]), cycle[1], cycle_cure(cycle)
