"""The schema of config.toml (docs/configuration.md): one pydantic model for the files and the environment alike."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, StrictBool, StrictInt, model_validator

from forgeyard_model.jobfile_support import UNLIMITED
from forgeyard_model.jobfile_types import (
    Argument,
    Cpus,
    Disk,
    Duration,
    Memory,
    Nofile,
    Pids,
    Shm,
    Size,
    Strict,
    WallTime,
    refusal,
)
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import IsolationLevel

RANGE: Final = 65536
"""Ids of one attempt."""
_LAST_ID: Final = (1 << 32) - 2
"""The one above means "none"."""
_PATTERN: Final = re.compile(r"[^\s\x00-\x1f\x7f]+\Z")
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
        raise refusal("write the name of an OCI runtime, such as runc or crun")
    return text


def _bounded(value: IsolationLevel) -> IsolationLevel:
    if value is IsolationLevel.NONE:
        raise refusal("no job runs without isolation: write process or more, or leave it out")
    return value


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


class RetentionTable(Strict):
    """How long what is kept is kept."""

    images: Duration | None = Field(None, description="Unpacked images that no job used.")
    caches: Duration | None = Field(None, description="Caches that no job used.")
    outputs: Duration | None = Field(None, description="Output of finished jobs.")


class WatermarksTable(Strict):
    """Free space in the state directory."""

    gc_below: Size | None = Field(None, description="Below this, what is kept is removed, oldest first.")
    refuse_below: Size | None = Field(None, description="Below this, no new job is taken.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.gc_below is not None and self.refuse_below is not None and self.gc_below < self.refuse_below:
            raise refusal("gc_below has to be at least refuse_below")
        return self


class ConfigFile(Strict):
    """One layer of the configuration. None: this layer does not set it."""

    state_dir: AbsolutePath | None = Field(None, description="Where the executor keeps its state.")
    runtime: Annotated[str, AfterValidator(_runtime)] | None = Field(None, description="OCI runtime: runc or crun.")
    minimum_isolation: Annotated[IsolationLevel, AfterValidator(_bounded)] | None = Field(
        None, description="No job runs behind less."
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


UNUSED: Final = ("retention", "watermarks")
"""Tables that are read and checked, and that nothing in this version acts on."""
SYSTEM_ONLY: Final = ("uid_block", "approved_host_paths")
"""Keys that decide for everybody on the host."""
