"""One Job from a job file and flags, or from flags alone. Flags win; paths in flags start at the working directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forgeyard_api.cli_flags import JobArguments, JobFlags
from forgeyard_api.env_flags import read_environment
from forgeyard_api.main import as_usage
from forgeyard_api.network_flags import network_policy, services_from
from forgeyard_model.cache import CacheRequest, parse_cache
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.job import HOST_ROOTFS, Job, Step
from forgeyard_model.jobfile_support import (
    UNLIMITED,
    refuse_unlimited,
    resolve,
    resolve_image,
    unsupported,
)
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import NetworkPolicy, SourceMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.units import parse_duration

if TYPE_CHECKING:
    from forgeyard_api.jobfile_reader import LoadedJobFile
    from forgeyard_model.jobfile import JobFile

_LIMIT_FLAGS: Final = {"cpus": "cpus", "memory": "memory", "pids": "pids", "disk": "disk", "wall_time": "timeout"}


_T = TypeVar("_T", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What a command line asks for. `source`: absolute path of the tree, None for none. `notes`: on what was read."""

    job: Job
    source: str | None
    notes: tuple[str, ...] = ()


def plan_run(arguments: JobArguments, *, refused: list[ExecutorError] | None = None) -> PlannedRun:
    """Read the job file, if there is one, and put the flags over it.

    :param refused: where refusals of this version go instead of being raised: to describe a run, never to do it.
    :raises UnusableInput: for a flag or a job file that can't be used as written.
    :raises ExecutorError: UNSUPPORTED, for what this version can't run.
    """
    flags = arguments.flags
    with as_usage():
        _check_combination(arguments)
        overrides = _Overrides.read(flags)
    _refuse(_unsupported_flags(flags), refused)
    if flags.job_file is None:
        job, source = _job_of_command(arguments, overrides), None
    else:
        job, source = _job_of_file(flags, overrides, flags.job_file, refused)
    if flags.source is not None:
        source = str(flags.source.absolute())
    notes: tuple[str, ...] = ()
    with as_usage():
        _check_source(flags, source)
        if flags.services_from is not None:
            services, notes = services_from(flags.services_from)
            job = replace(job, services=(*job.services, *services))
    return PlannedRun(overrides.apply(job), source, notes)


def _check_combination(arguments: JobArguments) -> None:
    flags, command = arguments.flags, arguments.command
    if flags.process and flags.image is not None:
        raise InvalidRequest("--image", flags.image, "goes not with --process: keep one")
    if flags.job_file is not None and command is not None:
        raise InvalidRequest("JOBFILE", flags.job_file, "give a job file or `-- CMD`, not both")
    if flags.job_file is None and not command and flags.image is None:
        raise InvalidRequest("CMD", "", "give a job file, or a command after --")
    if flags.platform is not None and flags.image is None and (flags.process or flags.job_file is None):
        raise InvalidRequest("--platform", flags.platform, "goes with an image: add --image REF, or leave it out")
    if flags.entrypoint is not None and (flags.image is None or flags.job_file is not None):
        raise InvalidRequest("--entrypoint", flags.entrypoint, "goes with --image and `-- ARGS` only")
    if command and not command[0] and flags.image is None:
        raise InvalidRequest("CMD", "", "name a program: it can't be empty")


def _refuse(errors: Iterator[ExecutorError], refused: list[ExecutorError] | None) -> None:
    for error in errors:
        if refused is None:
            raise error
        refused.append(error)


def _unsupported_flags(flags: JobFlags) -> Iterator[ExecutorError]:
    if flags.secret:
        # The value may be in the text: it is not shown.
        yield unsupported("--secret", "not supported in this version", "leave it out")
    for flag in _LIMIT_FLAGS.values():
        try:
            refuse_unlimited(f"--{flag}", getattr(flags, flag))
        except ExecutorError as error:
            yield error


def _job_of_command(arguments: JobArguments, overrides: _Overrides) -> Job:
    flags, command = arguments.flags, arguments.command or ()
    profile = overrides.profile or ExecutionProfile.STANDARD_CI
    if flags.image is None:
        return Job(steps=(Step(*command),), rootfs=HOST_ROOTFS, name=_job_name(command), profile=profile)
    entrypoint = None if flags.entrypoint is None else ((flags.entrypoint,) if flags.entrypoint else ())
    step = Step(*command, entrypoint=True)
    image = resolve_image(flags.image, base=str(Path.cwd()))
    return Job(steps=(step,), image=image, name=_job_name(command), profile=profile, entrypoint=entrypoint)


def _job_name(command: tuple[str, ...]) -> str:
    return command[0].rsplit("/", 1)[-1] or "job" if command else "job"


def _job_of_file(
    flags: JobFlags, overrides: _Overrides, path: Path, refused: list[ExecutorError] | None
) -> tuple[Job, str | None]:
    from forgeyard_api.jobfile_reader import load_job_file
    from forgeyard_model.jobfile_convert import describe_job, not_supported

    with as_usage():
        loaded = load_job_file(path)
    file = _overridden(loaded, flags, overrides)
    job = describe_job(file, base=loaded.base)
    _refuse(not_supported(file), refused)
    if flags.image is not None:
        job = replace(job, image=resolve_image(flags.image, base=str(Path.cwd())))
    source = loaded.file.source
    return job, None if source is None else resolve(source.path, base=loaded.base)


def _overridden(loaded: LoadedJobFile, flags: JobFlags, overrides: _Overrides) -> JobFile:
    """The file with the flags that decide whether it can run at all: `--network deny` cures a restricted one."""
    changes: dict[str, object] = {}
    if overrides.profile is not None:
        changes["profile"] = overrides.profile
    if overrides.network is not None:
        changes["network"] = overrides.network.mode
    if flags.process:
        changes.update(rootfs=HOST_ROOTFS, image=None)
    if flags.image is not None:
        changes.update(rootfs=None, image=flags.image)
    return loaded.file.model_copy(update=changes)


def _check_source(flags: JobFlags, source: str | None) -> None:
    if source is None:
        if flags.source_mode is not None:
            raise InvalidRequest("--source-mode", flags.source_mode, "there is no source: add --source DIR")
        return
    if not os.path.isdir(source):  # noqa: PTH112  Path.is_dir raises for a name that is too long
        field = "--source" if flags.source is not None else "source.path"
        raise InvalidRequest(field, source, "is not a directory")


@dataclass(frozen=True, slots=True)
class _Overrides:
    """Flags whose values are read the same with and without a job file."""

    profile: ExecutionProfile | None
    network: NetworkPolicy | None
    source_mode: SourceMode | None
    limits: ResourceLimits
    grace: float | None
    env: Mapping[str, str]
    caches: tuple[CacheRequest, ...]
    flags: JobFlags

    @classmethod
    def read(cls, flags: JobFlags) -> _Overrides:
        """:raises InvalidRequest: names the flag."""
        grace = None if flags.grace is None else parse_duration(flags.grace, field="--grace", allow_zero=True)
        for flag, value in (
            ("--workdir", flags.workdir),
            ("--user", flags.user),
            ("--image", flags.image),
            ("--platform", flags.platform),
        ):
            if value == "":
                raise InvalidRequest(flag, value, "can't be empty: leave it out")
        return cls(
            profile=_choice("--profile", flags.profile, ExecutionProfile),
            network=network_policy(flags.network, flags.allow),
            source_mode=_choice("--source-mode", flags.source_mode, SourceMode),
            limits=_limits(flags),
            grace=grace,
            env=read_environment(flags.env_file, flags.env),
            caches=tuple(parse_cache(text) for text in flags.cache),
            flags=flags,
        )

    def apply(self, job: Job) -> Job:
        """`job` with these values in the place of its own."""
        flags = self.flags
        changes: dict[str, Any] = {
            "limits": self.limits.or_default(job.limits),
            "env": {**job.env, **self.env},
            # CONTRACT: `-e` is the last word, after a step's own variables.
            "steps": tuple(_without(step, self.env) for step in job.steps),
        }
        if self.network is not None:
            changes["network"] = self.network
        if flags.user is not None:
            changes["user"] = flags.user
        if flags.platform is not None:
            changes["platform"] = flags.platform
        if flags.workdir is not None:
            changes["workdir"] = str(Path("/work/source", flags.workdir))
        if self.source_mode is not None:
            changes["source_mode"] = self.source_mode
        if self.caches:
            keys = {cache.key for cache in self.caches}
            changes["caches"] = (*(cache for cache in job.caches if cache.key not in keys), *self.caches)
        if self.grace is not None:
            changes["timeouts"] = replace(job.timeouts, grace=self.grace)
        return replace(job, **changes)


def _choice(flag: str, text: str | None, kind: type[_T]) -> _T | None:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise InvalidRequest(flag, text, f"write {', '.join(kind)}") from error


def _limits(flags: JobFlags) -> ResourceLimits:
    found: dict[str, Any] = {}
    for field, flag in _LIMIT_FLAGS.items():
        text = getattr(flags, flag)
        if text is None or text == UNLIMITED:
            continue
        try:
            value: Any = int(text) if field == "pids" and text.isascii() and text.isdigit() and len(text) < 20 else text
            found[field] = getattr(ResourceLimits.parse(**{field: value}), field)
        except InvalidRequest as error:
            raise InvalidRequest(f"--{flag}", text, error.cure) from error
    return ResourceLimits(**found)


def _without(step: Step, names: Mapping[str, str]) -> Step:
    if not names.keys() & step.env.keys():
        return step
    return Step(
        *step.argv,
        script=step.script,
        interpreter=step.interpreter,
        name=step.name,
        env={key: value for key, value in step.env.items() if key not in names},
        workdir=step.workdir,
        stdin=step.stdin,
        continue_on_error=step.continue_on_error,
        when=step.when,
        background=step.background,
        entrypoint=step.entrypoint,
    )
