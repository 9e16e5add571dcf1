"""``jobs.<id>.services`` of a GitHub workflow. Facts from its workflow syntax and docker's create options."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.jobfile_services import volume_path
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.services import ExecProbe, HealthCheck, ServiceNetwork, ServiceSpec
from forgeyard_model.units import parse_duration
from forgeyard_services.ci_words import mapping_at, refuse_engines, refuse_others, scalar_at, text_at

_KEYS: Final = frozenset({"image", "credentials", "env", "ports", "volumes", "options"})
_SHORT: Final = {"-e": "--env", "-m": "--memory"}
_FLAGS: Final = frozenset({"--no-healthcheck"})
_VALUES: Final = frozenset(
    {
        *("--health-cmd", "--health-interval", "--health-timeout", "--health-retries", "--health-start-period"),
        *("--env", "--shm-size", "--ulimit", "--memory", "--cpus"),
    }
)
_DOCKER_HEALTH: Final = HealthCheck(None, interval=30.0, timeout=30.0, retries=3)


def github_services(tree: Mapping[str, object], job: str | None) -> tuple[tuple[ServiceSpec, ...], tuple[str, ...]]:
    """The services of `job`, or of the only job that has some, and notes.

    :raises InvalidRequest: names the place in the file, and the cure.
    """
    jobs = mapping_at(tree.get("jobs"), "jobs")
    name = job if job is not None else _only_job(jobs)
    if name not in jobs:
        raise InvalidRequest("job", name, f"no job of the file has this name: it has {', '.join(jobs) or 'none'}")
    body = mapping_at(jobs[name], f"jobs.{name}")
    where, notes = f"jobs.{name}.services", list[str]()
    # Steps of a job without a container are outside docker's network: they know services as ports of localhost.
    at_localhost = body.get("container") is None
    services = mapping_at(body.get("services"), where)
    specs = [_service(label, item, f"{where}.{label}", notes, at_localhost) for label, item in services.items()]
    return tuple(specs), tuple(notes)


def _only_job(jobs: Mapping[str, object]) -> str:
    having = [name for name, body in jobs.items() if isinstance(body, Mapping) and body.get("services")]
    if len(having) != 1:
        listed = ", ".join(having) or "none"
        raise InvalidRequest("job", "", f"name one job, as FILE:JOB; jobs with services: {listed}")
    return having[0]


def _service(label: str, item: object, where: str, notes: list[str], at_localhost: bool) -> ServiceSpec:
    given = mapping_at(item, where)
    refuse_others(given, _KEYS, where)
    if given.get("credentials") is not None:
        cure = "take it out: the executor has its own credentials for registries, and a file with them is no secret"
        raise InvalidRequest(f"{where}.credentials", "…", cure)
    image = _plain(text_at(given.get("image"), f"{where}.image"), f"{where}.image")
    refuse_engines(image, f"{where}.image")
    env = {
        key: _plain(scalar_at(value, f"{where}.env.{key}"), f"{where}.env.{key}")
        for key, value in mapping_at(given.get("env"), f"{where}.env").items()
    }
    ports = _ports(given.get("ports"), f"{where}.ports", at_localhost)
    if at_localhost and not ports:
        notes.append(f"{where}: without ports nothing of it is at localhost; it is found as {label.lower()}")
    spec = ServiceSpec(
        name=label.lower(),
        image=image,
        env=env,
        volumes=tuple(_volume(item, f"{where}.volumes") for item in _list(given.get("volumes"), f"{where}.volumes")),
        network=ServiceNetwork.LOCALHOST if at_localhost and ports else ServiceNetwork.OWN,
    )
    options = given.get("options")
    if options is None:
        return spec
    text = _plain(scalar_at(options, f"{where}.options"), f"{where}.options")
    return _with_options(spec, _split_options(text, f"{where}.options"), f"{where}.options")


def _plain(text: str, where: str) -> str:
    """Text without expressions, which only GitHub can work out.

    :raises InvalidRequest: it has one.
    """
    if "${{" in text:
        raise InvalidRequest(where, text, "expressions are not worked out here: write the value")
    return text


def _list(value: object, where: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(where, value, "write a list")
    return value


def _ports(value: object, where: str, at_localhost: bool) -> list[str]:
    """Ports as the service has them. At localhost it has no others, so that none can be mapped to another number."""
    found = []
    for item in _list(value, where):
        text = _plain(scalar_at(item, where), where)
        outside, _, inside = text.partition("/")[0].rpartition(":")
        if not inside.isdigit() or (outside and not outside.isdigit()):
            raise InvalidRequest(where, text, "write PORT or PORT:PORT")
        if at_localhost and outside not in ("", inside):
            raise InvalidRequest(
                where, text, f"ports can't be renumbered: use {inside} in the steps and {inside}:{inside}"
            )
        found.append(inside)
    return found


def _volume(value: object, where: str) -> str:
    text = _plain(scalar_at(value, where), where)
    try:
        return volume_path(text)
    except ValueError as error:
        raise InvalidRequest(where, text, str(error)) from error


def _split_options(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Options and their values, written as two words or with ``=``.

    :raises InvalidRequest: for one that is not supported.
    """
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        raise InvalidRequest(where, text, f"can't be split into words: {error}") from error
    for word in words:
        name, equals, value = word.partition("=")
        if word[:2] in _SHORT and not word.startswith("--"):
            name, equals, value = _SHORT[word[:2]], word[2:], word[2:].removeprefix("=")
        if name in _FLAGS and not equals:
            yield name, ""
        elif name not in _VALUES:
            supported = ", ".join(sorted(option.removeprefix("--") for option in _VALUES))
            raise InvalidRequest(where, name, f"is not supported; these are: {supported}")
        elif equals:
            yield name, value
        elif (following := next(words, None)) is not None:
            yield name, following
        else:
            raise InvalidRequest(where, name, "needs a value")


def _with_options(spec: ServiceSpec, options: Iterator[tuple[str, str]], where: str) -> ServiceSpec:
    env, limits, health = dict(spec.env), ResourceLimits(), dict[str, str]()
    for name, value in options:
        match name:
            case "--env":
                variable, equals, text = value.partition("=")
                if not variable or not equals:
                    raise InvalidRequest(where, value, "write --env NAME=VALUE: nothing is taken over from the caller")
                env[variable] = text
            case "--memory":
                limits = ResourceLimits.parse(memory=value).or_default(limits)
            case "--cpus":
                limits = ResourceLimits.parse(cpus=value).or_default(limits)
            case "--shm-size":
                limits = ResourceLimits.parse(shm=value).or_default(limits)
            case "--ulimit":
                limits = ResourceLimits.parse(nofile=_nofile(value, where)).or_default(limits)
            case _:
                health[name] = value
    return replace(spec, env=env, limits=limits.or_default(spec.limits), health=_health(health, where))


def _nofile(value: str, where: str) -> int:
    name, _, numbers = value.partition("=")
    hard = numbers.rpartition(":")[2]
    if name != "nofile" or not hard.isascii() or not hard.isdigit():
        raise InvalidRequest(where, f"--ulimit {value}", "only nofile=NUMBER is a limit of a service: take it out")
    return int(hard)


def _health(options: Mapping[str, str], where: str) -> HealthCheck | None:
    """docker's health options, with its defaults for those left out."""
    if not options:
        return None
    if "--no-healthcheck" in options:
        if len(options) > 1:
            raise InvalidRequest(where, "--no-healthcheck", "does not go with other health options")
        return HealthCheck(None)
    command = options.get("--health-cmd", "")
    if not command:
        raise InvalidRequest(where, next(iter(options)), "goes with --health-cmd: add one")
    retries = options.get("--health-retries") or "0"
    if not retries.isascii() or not retries.isdigit():
        raise InvalidRequest(where, f"--health-retries {retries}", "write a whole number")
    default = _DOCKER_HEALTH
    return HealthCheck(
        ExecProbe(("/bin/sh", "-c", command)),
        _seconds(options, "--health-interval", where) or default.interval,
        _seconds(options, "--health-timeout", where) or default.timeout,
        int(retries) or default.retries,
        _seconds(options, "--health-start-period", where),
    )


def _seconds(options: Mapping[str, str], name: str, where: str) -> float:
    value = options.get(name)
    return 0.0 if value is None else parse_duration(value, field=f"{where} {name}", allow_zero=True)
