"""Sidecar services of a job: what each is, how it shows that it is ready, and what has to come before it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from posixpath import normpath
from types import MappingProxyType
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.limits import ResourceLimits

DEFAULT_LIMITS: Final = ResourceLimits(cpus=1.0, memory=512 << 20, pids=512)
"""What a service gets that names none (CONTRACT.md, Services)."""
MOST_SERVICES: Final = 12
MOST_HOSTNAME: Final = 63
"""Characters. A service's name is its host name as well, and the kernel takes no longer one."""
MOST_NAME: Final = 253
MOST_REGEX: Final = 256
_NO_ENV: Final[Mapping[str, str]] = MappingProxyType({})
# With '_': names made from images have it, though host names (RFC 1123) do not.
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_DIGEST: Final = "@sha256:"


class Condition(StrEnum):
    """What has to be true of another service before this one starts."""

    STARTED = "started"
    HEALTHY = "healthy"
    COMPLETED_SUCCESSFULLY = "completed_successfully"


class OnExit(StrEnum):
    """What the death of a service during the job means."""

    FAIL = "fail"
    IGNORE = "ignore"


class ServiceNetwork(StrEnum):
    """OWN: an address of its own on the job's network. LOCALHOST: the job's own network namespace, as pods have it."""

    OWN = "own"
    LOCALHOST = "localhost"


@dataclass(frozen=True, slots=True)
class ExecProbe:
    """A command run inside the service; exit 0 is ready. A command for a shell has that shell in front."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """A connection to this port of the service is accepted."""

    port: int


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """GET `path` is answered with one of the `statuses`; none given: 200 to 399."""

    port: int
    path: str = "/"
    statuses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogProbe:
    """A line of the service's output holds `text`, or, with `regex`, matches it anywhere."""

    text: str
    regex: bool = False


Probe = ExecProbe | TcpProbe | HttpProbe | LogProbe


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """How a service shows that it is ready. Times in seconds.

    :param probe: None says that it has no way to show it: started is enough, and is labelled unproven.
    :param interval: between the end of one probe and the start of the next.
    :param timeout: of one probe.
    :param retries: failures in a row after which it counts as broken.
    :param start_period: failures of probes that began in this time do not count.

    A log line comes once, so that of these only the bound of all services together applies to a LogProbe.
    """

    probe: Probe | None
    interval: float = 1.0
    timeout: float = 5.0
    retries: int = 30
    start_period: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """`source`, relative to the job's source tree, put at `destination` in the service, read-only."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """A tmpfs of the service; it counts as its memory. `size`: bytes, None when only the memory limit bounds it."""

    path: str
    size: int | None = None
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A container beside the job, reached by its name.

    :param name: its host name too.
    :param image: an image reference; or None with `argv`: a program of the host, in process mode.
    :param argv: in process mode, the program and its arguments.
    :param entrypoint: replaces the image's ENTRYPOINT; () clears it. None keeps it.
    :param command: replaces the image's CMD. None keeps it, unless `entrypoint` is given, as docker has it.
    :param volumes: directories of its own, writable, gone with the attempt.
    :param limits: its own; what is None takes DEFAULT_LIMITS.
    :param health: None: the image's own HEALTHCHECK, else the ports that it exposes.
    :param depends_on: services that come first.
    :param oneshot: it has to exit 0 before the steps start.
    """

    name: str
    image: str | None = None
    argv: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    platform: str | None = None
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=lambda: _NO_ENV)
    user: str | None = None
    workdir: str | None = None
    files: tuple[ServiceFile, ...] = ()
    tmpfs: tuple[Tmpfs, ...] = ()
    volumes: tuple[str, ...] = ()
    limits: ResourceLimits = DEFAULT_LIMITS
    health: HealthCheck | None = None
    depends_on: Mapping[str, Condition] = field(default_factory=lambda: MappingProxyType({}))
    oneshot: bool = False
    on_exit: OnExit = OnExit.FAIL
    network: ServiceNetwork = ServiceNetwork.OWN

    @property
    def rootfs(self) -> str | None:
        """``host`` in process mode, else None."""
        return "host" if self.image is None else None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it is found under, each once, its own first."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))


def completed_ones(services: Iterable[ServiceSpec]) -> frozenset[str]:
    """Names of those that have to exit 0 before the steps: oneshot, or somebody waits for their success."""
    services = tuple(services)
    awaited = (
        name
        for service in services
        for name, condition in service.depends_on.items()
        if condition is Condition.COMPLETED_SUCCESSFULLY
    )
    return frozenset((*awaited, *(service.name for service in services if service.oneshot)))


def find_cycle(depends_on: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Names along a way that leads back to its start, which stands at both ends; empty when there is none."""
    done: set[str] = set()
    for start in depends_on:
        path: dict[str, None] = {}
        stack = [iter((start,))]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                if path:
                    done.add(path.popitem()[0])
            elif name in path:
                way = list(path)
                return (*way[way.index(name) :], name)
            elif name not in done:
                path[name] = None
                stack.append(iter(tuple(depends_on.get(name, ()))))
    return ()


def cycle_cure(cycle: tuple[str, ...]) -> str:
    """What to say of a cycle that `find_cycle` found."""
    return f"goes round: {' -> '.join(cycle)}; take one of these out"


def checked_services(
    services: Iterable[ServiceSpec], *, digest_required: bool = False, field: str = "services"
) -> tuple[ServiceSpec, ...]:
    """`services` with their defaults filled in and every value checked that can be without looking at an image.

    :raises InvalidRequest: names the service, its field, and the cure.
    """
    found = tuple(replace(service, limits=service.limits.or_default(DEFAULT_LIMITS)) for service in services)
    if len(found) > MOST_SERVICES:
        raise InvalidRequest(field, len(found), f"a job takes {MOST_SERVICES} services at the most")
    for number, service in enumerate(found):
        where = f"{field}.{service.name}" if service.name else f"{field}[{number}]"
        _check_names(service, found[:number], where)
        _check_program(service, where, digest_required=digest_required)
        _check_places(service, where)
        _check_health(service.health, f"{where}.health")
        service.limits.check()
    _check_graph(found, field)
    return found


def _check_names(service: ServiceSpec, others: tuple[ServiceSpec, ...], where: str) -> None:
    owners = {name: other.name for other in others for name in other.names}
    if len(service.name) > MOST_HOSTNAME:
        raise InvalidRequest(where, service.name, f"a service's name has at most {MOST_HOSTNAME} characters")
    for name in service.names:
        if len(name) > MOST_NAME or not _NAME.fullmatch(name):
            raise InvalidRequest(where, name, "write a host name: lower-case letters, digits, - and _, dots between")
        if name == "localhost" or name.endswith(".localhost") or name.rpartition(".")[2].isdigit():
            raise InvalidRequest(where, name, "choose another name: this one does not lead to a service")
        if name in owners:
            raise InvalidRequest(where, name, f"choose another name: service {owners[name]} has this one")


def _check_program(service: ServiceSpec, where: str, *, digest_required: bool) -> None:
    if (service.image is None) == (not service.argv):
        raise InvalidRequest(where, service.name, "give exactly one of image, and rootfs: host with argv")
    if service.image is None:
        if service.entrypoint is not None or service.command is not None or service.platform is not None:
            raise InvalidRequest(where, service.name, "entrypoint, command and platform go with an image: use argv")
    elif digest_required and _DIGEST not in service.image:
        raise InvalidRequest(f"{where}.image", service.image, "the profile takes a pinned image: add @sha256:DIGEST")


_RESERVED: Final = ("/proc", "/sys", "/dev", "/.forgeyard")


def _check_places(service: ServiceSpec, where: str) -> None:
    """Absolute places, none inside what every sandbox has, no two the same."""
    taken: set[str] = set()
    places = [
        *(("files", item.destination) for item in service.files),
        *(("tmpfs", item.path) for item in service.tmpfs),
        *(("volumes", path) for path in service.volumes),
    ]
    for kind, path in places:
        place = "/" + normpath(path).lstrip("/")
        if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise InvalidRequest(f"{where}.{kind}", path, "write an absolute path inside the service, without '..'")
        if place == "/" or any(place == top or place.startswith(f"{top}/") for top in _RESERVED):
            raise InvalidRequest(f"{where}.{kind}", path, "belongs to the sandbox itself: choose another path")
        if place in taken:
            raise InvalidRequest(f"{where}.{kind}", path, "something else of this service has this place")
        taken.add(place)


def _check_health(health: HealthCheck | None, where: str) -> None:
    if health is None:
        return
    if health.interval <= 0 or health.timeout <= 0 or health.retries < 1 or health.start_period < 0:
        raise InvalidRequest(where, health, "interval, timeout and retries are more than 0, start_period not less")
    match health.probe:
        case ExecProbe(argv) if not argv or not argv[0]:
            raise InvalidRequest(f"{where}.cmd", argv, "write a program and its arguments")
        case TcpProbe(port) | HttpProbe(port) if not 1 <= port <= 65535:
            raise InvalidRequest(f"{where}.port", port, "write a port from 1 to 65535")
        case HttpProbe(path=path) if not path.startswith("/") or not path.isascii() or not path.isprintable():
            raise InvalidRequest(f"{where}.path", path, "write a path such as /healthz, percent-encoded")
        case HttpProbe(path=path) if " " in path:
            raise InvalidRequest(f"{where}.path", path, "write a space as %20")
        case LogProbe(text, regex):
            _check_line(text, f"{where}.log", regex=regex)
        case _:
            pass


def regex_cure(pattern: str) -> str:
    """What is wrong with `pattern` as a regular expression; empty when nothing is."""
    if len(pattern) > MOST_REGEX:
        return f"write a regular expression of at most {MOST_REGEX} characters"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return ""


def _check_line(text: str, where: str, *, regex: bool) -> None:
    if not text:
        raise InvalidRequest(where, text, "write text that a line of its output has")
    if regex and (cure := regex_cure(text)):
        raise InvalidRequest(where, text, cure)


def _check_graph(services: tuple[ServiceSpec, ...], field: str) -> None:
    names = {service.name for service in services}
    for service in services:
        for other in service.depends_on:
            if other not in names:
                raise InvalidRequest(f"{field}.{service.name}.depends_on", other, "no service has this name")
    completed = completed_ones(services)
    for service in services:
        # Ended by exit 0 is what it has to show; a probe would race with that.
        if service.name in completed and service.health is not None and service.health.probe is not None:
            cure = "a service that has to exit 0 is not probed: take health out"
            raise InvalidRequest(f"{field}.{service.name}.health", service.health.probe, cure)
    if cycle := find_cycle({service.name: service.depends_on for service in services}):
        raise InvalidRequest(f"{field}.{cycle[0]}.depends_on", cycle[1], cycle_cure(cycle))
