"""The flags that describe a job, shared by `run`, `bundle generate` and `bundle show`.

They are fields of one dataclass; `with_job_flags` gives a command the signature that typer reads. What a value
means is decided in `job_from_flags`, so that a bad one is refused with a cure instead of a type name.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from forgeyard_api.main import UnusableInput
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.policy import NetworkMode, SourceMode
from forgeyard_model.profile import ExecutionProfile

_COMMAND: Final = "forgeyard.command"

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", metavar="DIR", envvar="FORGEYARD_STATE_DIR", help="Where the executor keeps its state."
    ),
]
RUNTIMES: Final = ("runc", "crun", "runsc", "containerd", "podman", "docker")
"""Names that runtime adapters have, here so that a typing mistake is found without loading it."""


def _known_runtime(value: str | None) -> str | None:
    if value is not None and value not in RUNTIMES:
        raise UnusableInput(InvalidRequest("--runtime", value, f"write {', '.join(RUNTIMES)}"))
    return value


Runtime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME",
        envvar="FORGEYARD_RUNTIME",
        callback=_known_runtime,
        help="Who runs containers: runc, crun, containerd, podman or docker.",
    ),
]


def _choice(flag: str, values: type[StrEnum], text: str) -> Any:
    # Plain text with completion: typer's own choice would answer a typing mistake without a cure, and load pydantic.
    names = [value.value for value in values]
    return typer.Option(flag, metavar="|".join(names), help=text, autocompletion=lambda: names)


def _text(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text)


@dataclass(frozen=True, slots=True)
class JobFlags:
    """Flags as typed. None and () mean: not given. They override the job file."""

    job_file: Annotated[Path | None, typer.Argument(metavar="JOBFILE", help="Job file (YAML).")] = None
    process: Annotated[bool, typer.Option("--process", help="Run on the host's programs, read-only (the default).")] = (
        False
    )
    image: Annotated[str | None, _text("--image", "REF", "Run in an image: NAME@sha256:DIGEST, or oci:PATH@….")] = None
    platform: Annotated[str | None, _text("--platform", "OS/ARCH", "Of the image; else this host's.")] = None
    pull: Annotated[
        str, typer.Option("--pull", metavar="missing|always|never", help="When to ask the image's registry.")
    ] = "missing"
    lock: Annotated[
        Path | None, typer.Option("--lock", metavar="FILE", help="File of image tags and their digests; it is kept up.")
    ] = None
    frozen: Annotated[bool, typer.Option("--locked", help="Refuse a tag that --lock does not have.")] = False
    profile: Annotated[str | None, _choice("--profile", ExecutionProfile, "Set of defaults and bounds.")] = None
    network: Annotated[str | None, _choice("--network", NetworkMode, "Network of the job.")] = None
    allow: Annotated[
        list[str],
        typer.Option("--allow", metavar="HOST[:PORT]|CIDR[:PORT]", help="What a restricted network may reach."),
    ] = ()  # type: ignore[assignment]  # a list that repeats, as below
    services_from: Annotated[
        str | None, _text("--services-from", "FILE[:JOB]", "Services as a GitLab or GitHub file has them.")
    ] = None
    memory: Annotated[str | None, _text("--memory", "SIZE", "Memory limit, such as 64MiB.")] = None
    cpus: Annotated[str | None, _text("--cpus", "N", "Processors, such as 2 or 0.5.")] = None
    pids: Annotated[str | None, _text("--pids", "N", "Processes and threads at a time.")] = None
    disk: Annotated[str | None, _text("--disk", "SIZE", "Disk limit, such as 4GiB.")] = None
    timeout: Annotated[str | None, _text("--timeout", "TIME", "Of all steps together, such as 10m.")] = None
    grace: Annotated[str | None, _text("--grace", "TIME", "Between the soft signal and the kill.")] = None
    env: Annotated[list[str], typer.Option("-e", "--env", metavar="K[=V]", help="Variable; K alone copies yours.")] = (
        # typer wants a list for an option that repeats.
        ()  # type: ignore[assignment]  # a default that can't be changed by accident
    )
    env_file: Annotated[
        list[Path], typer.Option("--env-file", metavar="FILE", help="File of K=V lines, as docker reads it.")
    ] = ()  # type: ignore[assignment]  # as above
    workdir: Annotated[str | None, typer.Option("-w", "--workdir", metavar="DIR", help="Working directory.")] = None
    user: Annotated[str | None, typer.Option("-u", "--user", metavar="USER", help="NAME, UID or UID:GID.")] = None
    entrypoint: Annotated[
        str | None, _text("--entrypoint", "PROGRAM", 'Replaces the image\'s ENTRYPOINT; "" clears it.')
    ] = None
    source: Annotated[Path | None, _text("--source", "DIR", "Tree that appears at /work/source.")] = None
    source_mode: Annotated[
        str | None, _choice("--source-mode", SourceMode, "Read-only, discarded writes, or the tree itself.")
    ] = None
    cache: Annotated[
        list[str], typer.Option("--cache", metavar="KEY=PATH[:ro|rw]", help="Directory kept between jobs.")
    ] = ()  # type: ignore[assignment]  # as above
    secret: Annotated[
        list[str], typer.Option("--secret", metavar="NAME=…", help="Value of a secret (not in this version).")
    ] = ()  # type: ignore[assignment]  # as above


class CommandAfterDashes(TyperCommand):
    """A command that takes `-- CMD…` apart before options are read, so that `run x` and `run -- x` differ."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what follows the first ``--`` in the context."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """``[OPTIONS] [JOBFILE] [-- CMD...]``."""
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


@dataclass(frozen=True, slots=True)
class JobArguments:
    """Everything on a command line that describes the job. `command` None: there was no ``--``."""

    flags: JobFlags
    command: tuple[str, ...] | None


def with_job_flags(
    function: Callable[..., int],
) -> Callable[..., int]:
    """Give `function` the job flags in front of its own; it gets them as one JobArguments."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    hints = typing.get_type_hints(JobFlags, include_extras=True)
    flags = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=list(item.default) if item.default == () else item.default,
            annotation=hints[item.name],
        )
        for item in fields(JobFlags)
        if item.default is not MISSING
    ]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    @wraps(function)
    def command(ctx: typer.Context, **values: Any) -> int:
        given = JobFlags(**{item.name: values.pop(item.name) for item in flags})
        return function(JobArguments(given, ctx.meta.get(_COMMAND)), **values)

    parameters = [context, *flags, *(item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command
