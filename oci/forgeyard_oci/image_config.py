"""What an image's config says about running it, and the one table that merges it with a request.

======================  =======================  =====================================
request                 entry point              arguments
======================  =======================  =====================================
nothing                 the image's ENTRYPOINT   the image's CMD
arguments               the image's ENTRYPOINT   the request's; CMD is dropped
``--entrypoint X``      X                        the request's, or none; CMD is dropped
``--entrypoint ""``     none                     the request's; CMD is dropped
======================  =======================  =====================================

Absent, null and empty mean the same in an image. Job-file steps never go through ENTRYPOINT. docs/image-config.md
has the whole of it.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import SandboxError
from forgeyard_model.plan import ImageHealthcheck, RootfsPlan
from forgeyard_oci.image_errors import refused
from forgeyard_oci.image_manifest import ConfigFile, ExecutionConfig, HealthWords
from forgeyard_oci.image_signal import parse_stop_signal

_MOST_VOLUMES: Final = 100
_MOST_PORTS: Final = 1000
_PORT: Final = re.compile(r"(?P<port>[0-9]{1,5})(?:/(?P<protocol>tcp|udp|sctp))?\Z")
_MOST_RETRIES: Final = 1_000_000
_LEAST_NANOSECONDS: Final = 1_000_000
"""What Docker takes at the least for a health check's times."""
_MOST_NANOSECONDS: Final = 366 * 86_400 * 1_000_000_000
_SHELL: Final = ("/bin/sh", "-c")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The checked part of a config. `user` is still text: it is looked up in the image's own files.

    workdir: absolute, "" when the image names none. stop_signal: as the image has it, "" for none.
    volumes: absolute, sorted. exposed_ports: as ``5432/tcp``. notes: what is not honoured and does no harm.
    """

    user: str
    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    stop_signal: str = ""
    volumes: tuple[str, ...] = ()
    exposed_ports: tuple[str, ...] = ()
    healthcheck: ImageHealthcheck | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: ConfigFile) -> ImageConfig:
        """Check a config.

        :raises SandboxError: names the entry that is wrong.
        """
        config = file.config or ExecutionConfig()
        for name, words in (("Entrypoint", config.entrypoint), ("Cmd", config.cmd), ("User", (config.user,))):
            _no_nul(name, words)
        volumes, notes = _volumes(config.volumes)
        return cls(
            user=config.user,
            env=MappingProxyType(_environment(config.env)),
            entrypoint=config.entrypoint if any(config.entrypoint) else (),
            cmd=config.cmd,
            workdir=_workdir(config.working_dir),
            stop_signal=config.stop_signal,
            volumes=volumes,
            exposed_ports=_ports(config.exposed_ports),
            healthcheck=_healthcheck(config.healthcheck, config.shell),
            notes=(*notes, *_signal_notes(config.stop_signal)),
        )

    def rootfs(self, lowers: tuple[str, ...], identity: str) -> RootfsPlan:
        """The image as a root filesystem of the trees `lowers`, topmost first; its user is not looked up yet."""
        return RootfsPlan(
            kind=ExecutorKind.CONTAINER,
            lowers=lowers,
            identity=identity,
            writable=True,
            env=self.env,
            entrypoint=self.entrypoint,
            cmd=self.cmd,
            workdir=self.workdir,
            stop_signal=parse_stop_signal(self.stop_signal) or signal.SIGTERM,
            notes=self.notes,
            volumes=self.volumes,
            exposed_ports=self.exposed_ports,
            healthcheck=self.healthcheck,
        )


def _bad(field: str, why: str, *, details: str = "") -> SandboxError:
    return refused("bad_config", f"image config: {field} {why}", details=details, resolution="rebuild the image")


def _shown(text: str) -> str:
    return repr(text[:80])


def _no_nul(name: str, words: Iterable[str]) -> None:
    for word in words:
        if "\0" in word:
            raise _bad(name, "holds a NUL byte", details=_shown(word))


def _environment(entries: Sequence[str]) -> dict[str, str]:
    _no_nul("Env", entries)
    env = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise _bad("Env", f"entry {_shown(entry)} is not NAME=VALUE")
        env[name] = value
    return env


def _workdir(path: str) -> str:
    _no_nul("WorkingDir", (path,))
    # As docker has it: relative to the root, which `..` never leaves. normpath keeps a leading "//", POSIX's own case.
    return "/" + posixpath.normpath(f"/{path}").lstrip("/") if path else ""


def _volumes(entries: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The directories, and notes on those that mean nothing."""
    paths: set[str] = set()
    notes: tuple[str, ...] = ()
    _no_nul("Volumes", entries)
    for entry in entries:
        if not entry.startswith("/"):
            raise _bad("Volumes", f"entry {_shown(entry)} is not an absolute path")
        path = _workdir(entry)
        if path == "/":
            notes = ("the image declares its root as a volume, which means nothing: left out",)
        else:
            paths.add(path)
    if len(paths) > _MOST_VOLUMES:
        raise _bad("Volumes", f"has {len(paths)} entries; {_MOST_VOLUMES} are taken at most")
    return tuple(sorted(paths)), notes


def _ports(entries: Mapping[str, object]) -> tuple[str, ...]:
    ports = set()
    if len(entries) > _MOST_PORTS:
        raise _bad("ExposedPorts", f"has {len(entries)} entries; {_MOST_PORTS} are taken at most")
    for entry in entries:
        match = _PORT.match(entry)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise _bad("ExposedPorts", f"entry {_shown(entry)} is not PORT or PORT/PROTOCOL", details="as in 5432/tcp")
        ports.add((int(match["port"]), match["protocol"] or "tcp"))
    return tuple(f"{port}/{protocol}" for port, protocol in sorted(ports))


def _healthcheck(words: HealthWords | None, shell: tuple[str, ...]) -> ImageHealthcheck | None:
    if words is None or not words.test or words.test[0] == "NONE":
        return None
    _no_nul("Healthcheck.Test", (*words.test, *shell))
    kind, *rest = words.test
    if kind not in ("CMD", "CMD-SHELL") or not rest or not rest[0] or (kind == "CMD-SHELL" and len(rest) != 1):
        raise _bad("Healthcheck.Test", f"{_shown(str(list(words.test)))} is not NONE, CMD with a program, or CMD-SHELL")
    retries = words.retries or 0
    if not 0 <= retries <= _MOST_RETRIES:
        raise _bad("Healthcheck.Retries", f"{retries} is no number of times")
    default = ImageHealthcheck(())
    return ImageHealthcheck(
        test=tuple(rest) if kind == "CMD" else (*(shell or _SHELL), *rest),
        interval=_seconds("Interval", words.interval, default.interval),
        timeout=_seconds("Timeout", words.timeout, default.timeout),
        start_period=_seconds("StartPeriod", words.start_period, default.start_period),
        retries=retries or default.retries,
    )


def _seconds(field: str, nanoseconds: int | None, default: float) -> float:
    if not nanoseconds:
        return default
    if not _LEAST_NANOSECONDS <= nanoseconds <= _MOST_NANOSECONDS:
        raise _bad(f"Healthcheck.{field}", f"{nanoseconds} ns is not between a millisecond and a year")
    return nanoseconds / 1e9


def _signal_notes(text: str) -> tuple[str, ...]:
    if not text or parse_stop_signal(text) is not None:
        return ()
    return (f"the image's StopSignal {text[:40]!r} is no signal: SIGTERM is sent instead",)
