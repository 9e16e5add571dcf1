"""``services:`` of a GitLab CI file. Facts from its documentation of the keyword and of service names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.services import HealthCheck, ServiceSpec, TcpProbe
from forgeyard_services.ci_words import (
    expand,
    image_names,
    mapping_at,
    references,
    refuse_engines,
    refuse_others,
    scalar_at,
    text_at,
    words_at,
)

_KEYS: Final = frozenset({"name", "alias", "entrypoint", "command", "variables", "docker", "pull_policy"})
_DOCKER_KEYS: Final = frozenset({"platform", "user"})
_PORT_VARIABLE: Final = "HEALTHCHECK_TCP_PORT"
_MOST_EXTENDS: Final = 11
_MOST_ROUNDS: Final = 16
"""How deep variables may refer to variables; a circle is cut there, as GitLab does."""


def gitlab_services(tree: Mapping[str, object], job: str | None) -> tuple[tuple[ServiceSpec, ...], tuple[str, ...]]:
    """The services of `job`, or those for every job, and notes.

    :raises InvalidRequest: names the place in the file, and the cure.
    """
    chain = [] if job is None else list(_extended(tree, job))
    where, listed = _find(tree, chain)
    notes: list[str] = []
    variables = _variables(tree, chain)
    entries = [_entry(item, f"{where}[{number}]", variables, notes) for number, item in enumerate(listed)]
    return tuple(_named(entries, notes)), tuple(notes)


def _extended(tree: Mapping[str, object], job: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The job, then what it extends, nearest first: the first that says something is right."""
    if job not in tree or not isinstance(tree[job], Mapping):
        hint = "; included files are not followed: name the file that has it" if "include" in tree else ""
        raise InvalidRequest("job", job, f"no job of the file has this name{hint}")
    if depth == _MOST_EXTENDS:
        raise InvalidRequest(f"{job}.extends", job, "extends too deep, or in a circle")
    body = mapping_at(tree[job], job)
    yield job, body
    bases = body.get("extends")
    for base in reversed(bases if isinstance(bases, list) else [bases] if bases is not None else []):
        yield from _extended(tree, text_at(base, f"{job}.extends"), depth + 1)


def _find(tree: Mapping[str, object], chain: list[tuple[str, Mapping[str, object]]]) -> tuple[str, list[object]]:
    """Where the services are listed, and the list. A job's own, even an empty one, stand in place of the defaults."""
    places = [(name, body["services"]) for name, body in chain if "services" in body]
    if not places and _inherits(chain, "default", "services"):
        default = mapping_at(tree.get("default"), "default")
        places = [("default", default.get("services")), ("", tree.get("services"))]
    for name, listed in places:
        where = f"{name}.services" if name else "services"
        if isinstance(listed, list):
            return where, listed
        if listed is not None:
            raise InvalidRequest(where, listed, "write a list of services")
    if chain:
        return "services", []
    raise InvalidRequest("services", "", "the file has none for every job: name a job, as FILE:JOB")


def _inherits(chain: list[tuple[str, Mapping[str, object]]], what: str, key: str) -> bool:
    """``inherit: {default: …}`` of the job: true, false, or a list of the keys that are inherited."""
    for _, body in chain:
        inherited = mapping_at(body.get("inherit"), "inherit").get(what, True)
        return key in inherited if isinstance(inherited, list) else bool(inherited)
    return True


def _variables(tree: Mapping[str, object], chain: list[tuple[str, Mapping[str, object]]]) -> dict[str, str]:
    """Of the file, then of the job: GitLab gives both to services."""
    found: dict[str, str] = {}
    layers = [(name, body.get("variables")) for name, body in reversed(chain)]
    top = mapping_at(tree.get("variables"), "variables")
    inherited = {key: value for key, value in top.items() if _inherits(chain, "variables", key)}
    for name, layer in [("", inherited), *layers]:
        where = f"{name}.variables" if name else "variables"
        for key, value in mapping_at(layer, where).items():
            written = scalar_at(value.get("value") if isinstance(value, Mapping) else value, f"{where}.{key}")
            as_it_is = isinstance(value, Mapping) and value.get("expand") is False
            found[key] = written.replace("$", "$$") if as_it_is else written
    return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """A service with the names that were given to it, which may be none."""

    spec: ServiceSpec
    given: tuple[str, ...]
    where: str


def _entry(item: object, where: str, shared: Mapping[str, str], notes: list[str]) -> _Entry:
    given = {"name": item} if isinstance(item, str) else mapping_at(item, where)
    refuse_others(given, _KEYS, where)
    own = mapping_at(given.get("variables"), f"{where}.variables")
    written = {**shared, **{key: scalar_at(value, f"{where}.variables.{key}") for key, value in own.items()}}
    env = _expanded(written, where, notes)
    image = _filled(text_at(given.get("name"), f"{where}.name"), f"{where}.name", env)
    refuse_engines(image, f"{where}.name")
    docker = mapping_at(given.get("docker"), f"{where}.docker")
    refuse_others(docker, _DOCKER_KEYS, f"{where}.docker")
    if "pull_policy" in given:
        notes.append(f"{where}.pull_policy: images are kept by digest, so that a pull policy has no meaning here")
    spec = ServiceSpec(
        name="",
        image=image,
        entrypoint=words_at(given.get("entrypoint"), f"{where}.entrypoint"),
        command=words_at(given.get("command"), f"{where}.command"),
        env=env,
        platform=None if "platform" not in docker else text_at(docker["platform"], f"{where}.docker.platform"),
        user=None if "user" not in docker else scalar_at(docker["user"], f"{where}.docker.user"),
        health=_health(env, where),
    )
    alias = _filled(scalar_at(given.get("alias"), f"{where}.alias"), f"{where}.alias", env)
    return _Entry(spec, tuple(name for name in re.split(r"[\s,]+", alias.lower()) if name), where)


def _filled(text: str, where: str, env: Mapping[str, str]) -> str:
    """`text` with its variables: an image or a name with a hole in it would be another one.

    :raises InvalidRequest: names the variable that is not known here.
    """
    for name in references(text):
        if name not in env:
            raise InvalidRequest(where, text, f"the value of {name} is not in the file: write it out")
    return expand(text, env, where)


def _expanded(values: Mapping[str, str], where: str, notes: list[str]) -> dict[str, str]:
    """Variables that refer to others, filled in; what is not known stays empty, and is noted."""
    unknown = {name for text in values.values() for name in references(text) if name not in values}
    if unknown:
        listed = ", ".join(sorted(unknown))
        notes.append(f"{where}.variables: values of {listed} are not in the file, and are empty")
    found = dict(values)
    for _ in range(_MOST_ROUNDS):
        # `$$` stays for the last round, or it would be read as the begin of a name in the next.
        filled = {
            key: expand(text.replace("$$", "$$$$"), found, f"{where}.variables.{key}") for key, text in found.items()
        }
        if filled == found:
            break
        found = filled
    return {key: expand(text, {}, f"{where}.variables.{key}") for key, text in found.items()}


def _health(env: Mapping[str, str], where: str) -> HealthCheck | None:
    """GitLab's way to choose the port that shows that a service is ready."""
    port = env.get(_PORT_VARIABLE)
    if port is None:
        return None
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise InvalidRequest(f"{where}.variables.{_PORT_VARIABLE}", port, "write a port from 1 to 65535")
    return HealthCheck(TcpProbe(int(port)))


def _named(entries: list[_Entry], notes: list[str]) -> Iterator[ServiceSpec]:
    """Names for each: its aliases, and the two forms of its image's name when no other service can claim these."""
    derived = [image_names(entry.spec.image or "") for entry in entries]
    claims = Counter(name for names in derived for name in names)
    nameless = Counter(names for entry, names in zip(entries, derived, strict=True) if not entry.given)
    taken = {name for entry in entries for name in entry.given}
    for entry, names in zip(entries, derived, strict=True):
        if not entry.given and (nameless[names] > 1 or taken.intersection(names)):
            cure = f"another service has the name {names[0]}: give each an alias"
            raise InvalidRequest(f"{entry.where}.name", entry.spec.image, cure)
        mine = [name for name in names if not entry.given or (claims[name] == 1 and name not in taken)]
        if entry.given and not mine:
            notes.append(f"{entry.where}: {names[0]} names more than one service; it is found by its alias")
        every = tuple(dict.fromkeys((*entry.given, *mine)))
        yield replace(entry.spec, name=every[0], aliases=every[1:])
