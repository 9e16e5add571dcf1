"""`forgeyard reproduce`: the job of a result file once more, with the images, services and policy that it had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgeyard_api.cli_flags import Runtime, StateDir
from forgeyard_api.configured import configured
from forgeyard_api.main import as_usage, one_line, say
from forgeyard_model.errors import InvalidRequest

if TYPE_CHECKING:
    from forgeyard_model.config import ExecutorConfig
    from forgeyard_model.job import Job
    from forgeyard_model.result import ExecutionResult

_FIELD = "RESULT.json"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A result file: what was run, and what came of it."""

    job: Job
    result: ExecutionResult
    withheld: tuple[str, ...]
    source: str | None
    tenant: str
    trusted: bool
    runtime: str
    rules: Mapping[str, Any]


def reproduce(
    file: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What `forgeyard run --result` wrote.")],
    *,
    source: Annotated[
        Path | None, typer.Option("--source", metavar="DIR", help="The source, where it is not where it was.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("-e", "--env", metavar="K[=V]", help="A variable whose value is not recorded.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Absent or empty directory for /work/output.")
    ] = None,
    result: Annotated[str | None, typer.Option("--result", metavar="FILE|-", help="Write the new result.")] = None,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Keep what it wrote when it fails, where the operator allows it.")
    ] = False,
    runtime: Runtime = None,
    state_dir: StateDir = None,
) -> int:
    """Run the job of a result again: the same images, services, network and policy, on the source as it is now.

    Exits as `forgeyard run` does. Values of variables whose names sound like secrets are not in the file; give them
    with -e.
    """
    from forgeyard_api.env_flags import read_environment
    from forgeyard_api.job_from_flags import PlannedRun
    from forgeyard_api.operate.kept import refuse_unless_allowed
    from forgeyard_api.pull_progress import pull_progress
    from forgeyard_api.run_command import Session, check_targets
    from forgeyard_executor.images import ImageOptions

    with as_usage():
        check_targets(output, result)
        recorded = read_recorded(file)
        job = with_values(recorded, read_environment([], env or []))
        where = _source(recorded, source)
    config = configured(state_dir, runtime or recorded.runtime)
    if keep_on_failure:
        refuse_unless_allowed(config)
    for note in differences(recorded, config):
        say(f"note: {note}")
    progress = pull_progress()
    session = Session(
        PlannedRun(job, where),
        output=output,
        target=result,
        quiet=False,
        config=config,
        images=ImageOptions(progress=progress),
        progress=progress,
    )
    session.belongs_to(recorded.tenant, trusted=recorded.trusted)
    session.keep_failed = keep_on_failure
    code = session.run_to_end()
    if session.result is not None:
        say(compared(recorded.result, session.result))
    return code


def read_recorded(path: Path) -> Recorded:
    """The result file at `path`.

    :raises InvalidRequest: it is none, or holds nothing to run again.
    """
    from forgeyard_api.operate.reproduction import SCHEMA
    from forgeyard_model.job_json import job_from_data
    from forgeyard_model.result_json import read_result

    try:
        text = path.read_bytes()
    except OSError as error:
        raise _refused(path, f"can't be read: {error.strerror}") from error
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise _refused(path, "is no result: name what `forgeyard run --result` wrote")
        _check_schema(path, data, SCHEMA)
        block = data["reproduce"]
        names = ("source", "tenant", "trusted", "runtime", "rules")
        rest = {name: block[name] for name in names}
        job = job_from_data(block["job"])
        if job.host_paths:
            raise _refused(path, "names host paths, which only this host's configuration allows: take them out")
        return Recorded(job, read_result(text), tuple(block["withheld"]), **rest)
    except InvalidRequest:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path, "is no result, or a damaged one: name what `forgeyard run --result` wrote") from error


def _check_schema(path: Path, data: Mapping[str, Any], known: int) -> None:
    if "error" in data:
        raise _refused(path, "holds a refusal: no job ran, so that there is none to run again")
    schema = data.get("schema", 1)
    if schema < known:
        raise _refused(path, "is of an older forgeyard, which did not record the job: run it again with --result")
    if schema > known:
        raise _refused(path, f"is of a newer forgeyard (schema {schema}, this one reads {known}): use that one")
    impossible = data["reproduce"].get("impossible")
    if impossible:
        raise _refused(path, f"does not hold its job ({one_line(str(impossible))}): run it from its job file")


def _refused(path: Path, cure: str) -> InvalidRequest:
    return InvalidRequest(_FIELD, path, cure)


def with_values(recorded: Recorded, given: Mapping[str, str]) -> Job:
    """The job with the values that its file does not hold.

    :raises InvalidRequest: one is missing, or one is given that the file has.
    """
    from forgeyard_api.operate.reproduction import map_variables

    for name in recorded.withheld:
        if name not in given:
            raise InvalidRequest("-e", name, f"its value is not recorded: give -e {name}, or -e {name}=VALUE")
    for name in given:
        if name not in recorded.withheld:
            known = ", ".join(recorded.withheld) or "none"
            raise InvalidRequest("-e", name, f"is recorded, and reproduced as it was; not recorded: {known}")
    return map_variables(recorded.job, lambda env: {name: given.get(name, value) for name, value in env.items()})


def _source(recorded: Recorded, given: Path | None) -> str | None:
    if recorded.source is None:
        if given is not None:
            raise InvalidRequest("--source", given, "the job had no source: leave it out")
        return None
    where = recorded.source if given is None else str(given.absolute())
    if not Path(where).is_dir():
        raise InvalidRequest("--source", where, "is not a directory: name where the job's source is now")
    return where


def differences(recorded: Recorded, config: ExecutorConfig) -> tuple[str, ...]:
    """In which a run of today can differ from that of then, as far as it is known before."""
    from forgeyard_api.operate.reproduction import rules

    now = rules(config)
    found = [
        f"{name} was {recorded.rules[name]} and is {now[name]}"
        for name in now
        if name in recorded.rules and recorded.rules[name] != now[name]
    ]
    if config.runtime != recorded.runtime:
        found.append(f"it ran on {recorded.runtime}, and now runs on {config.runtime}")
    if recorded.source is not None:
        found.append("the source is taken as it is now: no record was made of what it held")
    if recorded.job.caches:
        found.append("its caches are those of now")
    return tuple(found)


def compared(then: ExecutionResult, now: ExecutionResult) -> str:
    """One line on whether it was the same, and came to the same."""
    same = then.provenance.plan_digest == now.provenance.plan_digest
    plan = "the same plan" if same else f"another plan ({then.provenance.plan_digest} then)"
    ends = [f"{result.outcome.value} ({result.exit_code})" for result in (then, now)]
    return f"reproduced: {plan}; then {ends[0]}, now {ends[1]}"
