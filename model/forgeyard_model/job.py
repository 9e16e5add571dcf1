"""A job as a program writes it: steps, limits, profile. The job file and the command line become one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from forgeyard_model.cache import CacheRequest
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import (
    ApprovedHostPath,
    CapabilityGrant,
    NetworkPolicy,
    SourceMode,
)
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.services import ServiceSpec

EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
HOST_ROOTFS: Final = "host"
"""`rootfs: host`: process mode, a bundle on the host's own programs."""


class When(StrEnum):
    """When a step runs, given what happened before it."""

    ON_SUCCESS = "on_success"
    ON_FAILURE = "on_failure"
    ALWAYS = "always"


class Shell(StrEnum):
    """Interpreters of a script step, and the flags they get."""

    SH = "sh"
    BASH = "bash"

    @property
    def argv(self) -> tuple[str, ...]:
        """The interpreter's argument vector, before the script's path."""
        return ("/bin/sh", "-e") if self is Shell.SH else ("bash", "--noprofile", "--norc", "-eo", "pipefail")


@dataclass(frozen=True, slots=True, init=False)
class Step:
    """One process in the sandbox: ``Step("pytest", "-q")`` in exec form, or ``Step.shell("make && make test")``.

    :param argv: program and arguments, no shell involved. Empty with `entrypoint`: the image's CMD.
    :param script: text of a script, given to `interpreter` as a read-only file.
    :param stdin: bytes the step reads; None is /dev/null.
    :param background: leave what this step started running until the job ends; the next step does not wait for it.
    :param entrypoint: run `argv` through the image's ENTRYPOINT, as docker run has it.
    """

    argv: tuple[str, ...]
    script: str | None
    interpreter: Shell
    name: str
    env: Mapping[str, str]
    workdir: str | None
    stdin: bytes | None
    continue_on_error: bool
    when: When
    background: bool
    entrypoint: bool

    def __init__(
        self,
        *argv: str,
        script: str | None = None,
        interpreter: Shell | str = Shell.SH,
        name: str = "",
        env: Mapping[str, str] = EMPTY,
        workdir: str | None = None,
        stdin: bytes | None = None,
        continue_on_error: bool = False,
        when: When | str = When.ON_SUCCESS,
        background: bool = False,
        entrypoint: bool = False,
    ) -> None:
        if script is not None and argv:
            raise InvalidRequest("step", name or argv[0], "has both argv and a script: keep one")
        if script is None and not argv and not entrypoint:
            raise InvalidRequest("step", name, "has nothing to run: give argv or a script")
        values = {
            "argv": tuple(argv),
            "script": script,
            "interpreter": Shell(interpreter),
            "name": name or (argv[0].rsplit("/", 1)[-1] if argv else "run"),
            "env": MappingProxyType(dict(env)),
            "workdir": workdir,
            "stdin": stdin,
            "continue_on_error": continue_on_error,
            "when": When(when),
            "background": background,
            "entrypoint": entrypoint,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @classmethod
    def shell(
        cls,
        script: str,
        *,
        interpreter: Shell | str = Shell.SH,
        name: str = "",
        env: Mapping[str, str] = EMPTY,
        workdir: str | None = None,
        continue_on_error: bool = False,
        when: When | str = When.ON_SUCCESS,
        background: bool = False,
    ) -> Step:
        """A step that runs `script`: ``Step.shell("tar cf /work/output/r.tar reports")``."""
        return cls(
            script=script,
            interpreter=interpreter,
            name=name,
            env=env,
            workdir=workdir,
            continue_on_error=continue_on_error,
            when=when,
            background=background,
        )


@dataclass(frozen=True, slots=True)
class Output:
    """A file or directory below /work/output that the job promises. `path` is relative."""

    path: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `steps` is the job's own wall time and stands in ResourceLimits.wall_time instead.

    prepare: pull and set-up. grace: between the soft signal and the kill. finally_: what `always` steps get
    after a time-out or a cancel. services: until all services are ready.
    """

    prepare: float = 600.0
    grace: float = 10.0
    finally_: float = 0.0
    services: float = 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to run and within which bounds.

    :param rootfs: "host" for process mode; otherwise leave it and give `image`.
    :param image: an image reference, such as ``oci:PATH@sha256:…``.
    :param entrypoint: replaces the image's ENTRYPOINT for steps that go through it; () clears it.
    :param caches: directories kept between jobs.
    :param services: containers beside the job, on its network.
    :param output_cap: bytes of output kept, head and tail.
    """

    steps: Sequence[Step]
    rootfs: str | None = None
    image: str | None = None
    name: str = "job"
    profile: ExecutionProfile = ExecutionProfile.STANDARD_CI
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    network: NetworkPolicy | None = None
    env: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    user: str | None = None
    workdir: str | None = None
    source_mode: SourceMode | None = None
    toolchains: tuple[ApprovedHostPath, ...] = ()
    host_paths: tuple[ApprovedHostPath, ...] = ()
    outputs: tuple[Output, ...] = ()
    capabilities: CapabilityGrant | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    merge_output: bool = False
    output_cap: int = 512 << 20
    platform: str | None = None
    entrypoint: tuple[str, ...] | None = None
    caches: tuple[CacheRequest, ...] = ()
    services: tuple[ServiceSpec, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        if (self.rootfs is None) == (self.image is None):
            raise InvalidRequest("rootfs", self.rootfs, 'give exactly one of rootfs="host" and image=REF')
        if self.rootfs is not None and self.rootfs != HOST_ROOTFS:
            raise InvalidRequest("rootfs", self.rootfs, 'only "host" is a rootfs; name an image with image=REF')
