"""What a result file holds so that its job can be run again: the job as it was resolved, its images by digest, its
source, and the rules of this host that a plan depends on. Values of variables that sound like secrets are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from forgeyard_model.job import Job, Step
from forgeyard_model.job_json import job_data
from forgeyard_model.sensitive import is_sensitive, sensitive_values

if TYPE_CHECKING:
    from forgeyard_executor.attempt import Attempt
    from forgeyard_model.config import ExecutorConfig

SCHEMA: Final = 2
"""Of the result file. 1 had no version in it, and nothing to run again."""
FINDABLE: Final = 4
"""Bytes of a value that can be told from any other bytes."""
_RULES: Final = ("minimum_isolation", "user_namespace", "exact_limits")


@dataclass(frozen=True, slots=True)
class Origin:
    """How a job came to run, beside what it is."""

    source: str | None
    tenant: str = ""
    trusted: bool = True


@dataclass(frozen=True, slots=True)
class Pins:
    """Images by digest: the job's, and those of its services by their names."""

    job: str | None = None
    services: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, attempt: Attempt) -> Pins:
        """Those an attempt was made of."""
        own = attempt.job.blueprint.image
        members = {item.spec.name: item.member.blueprint.image for item in attempt.services}
        services = {name: image.used.pinned for name, image in members.items() if image is not None}
        return cls(None if own is None else own.used.pinned, services)

    def put(self, job: Job) -> Job:
        """`job` with these in the place of its tags."""
        services = tuple(replace(item, image=self.services.get(item.name, item.image)) for item in job.services)
        return replace(job, image=self.job or job.image, services=services)


def reproduction(job: Job, origin: Origin, config: ExecutorConfig, pins: Pins) -> dict[str, Any]:
    """The fields that are added to a result: its schema, and what `forgeyard reproduce` reads."""
    from forgeyard_executor.config_apply import configured_job

    # The operator's host paths are the operator's to allow again: a file that anybody may have written can't.
    resolved = replace(configured_job(job, config).job, host_paths=job.host_paths)
    return {"schema": SCHEMA, "reproduce": _recorded(pins.put(resolved), origin, config)}


def _recorded(job: Job, origin: Origin, config: ExecutorConfig) -> dict[str, Any]:
    secrets = sensitive_values(job.env, tuple(job.steps), job.services)
    names = sorted({name for name, _ in secrets})
    twice = [name for name in names if len({value for other, value in secrets if other == name}) > 1]
    if twice:
        return _impossible(f"{twice[0]} has different values in different places, and none of them is recorded")
    try:
        data = job_data(map_variables(job, _withheld))
        text = json.dumps(data, ensure_ascii=False)
        text.encode()
    except UnicodeError:
        return _impossible("the job holds text that is no UTF-8")
    if any(len(value.encode()) >= FINDABLE and json.dumps(value)[1:-1] in json.dumps(data) for _, value in secrets):
        return _impossible("the value of a secret variable also stands elsewhere in the job")
    return {
        "job": data,
        "withheld": names,
        "source": origin.source,
        "tenant": origin.tenant,
        "trusted": origin.trusted,
        "runtime": config.runtime,
        "rules": rules(config),
    }


def _impossible(why: str) -> dict[str, Any]:
    return {"impossible": why}


def rules(config: ExecutorConfig) -> dict[str, Any]:
    """What of a host's configuration decides how a resolved job runs."""
    shown = sorted(f"{path.source}:{path.destination}" for path in config.approved_host_paths)
    return {**{name: _plain(getattr(config, name)) for name in _RULES}, "approved_host_paths": shown}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def map_variables(job: Job, change: Callable[[Mapping[str, str]], Mapping[str, str]]) -> Job:
    """`job` with the variables of itself, its steps and its services changed."""
    services = tuple(replace(item, env=change(item.env)) for item in job.services)
    steps = tuple(_step(step, change(step.env)) for step in job.steps)
    return replace(job, env=change(job.env), steps=steps, services=services)


def _withheld(env: Mapping[str, str]) -> Mapping[str, str]:
    """Empty values stay: there is nothing to hide, and nothing to ask for."""
    return {name: "" if is_sensitive(name) else value for name, value in env.items()}


def _step(step: Step, env: Mapping[str, str]) -> Step:
    return Step(
        *step.argv,
        script=step.script,
        interpreter=step.interpreter,
        name=step.name,
        env=env,
        workdir=step.workdir,
        stdin=step.stdin,
        continue_on_error=step.continue_on_error,
        when=step.when,
        background=step.background,
        entrypoint=step.entrypoint,
    )
