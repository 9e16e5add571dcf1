"""Keepers as processes: started, found again, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_api.keeper.place import LOCK, LOG, About, Place
from forgeyard_host.locks import lock_alone
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

log: Final = logging.getLogger("forgeyard.serve")

START_SECONDS: Final = 120.0
"""Until a new keeper serves: it destroys first what a dead one left."""
END_SECONDS: Final = 60.0
LINGER_SECONDS: Final = 30.0
"""How long a keeper with nothing to keep waits for a server."""
_TICK: Final = 0.02
_LOCK_FD: Final = 3
_PASSED_ON: Final = (
    "PATH",
    "HOME",
    "TZ",
    "TMPDIR",
    "LANG",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
    "PYTHONPATH",
    "CNI_PATH",
    "CONTAINER_HOST",
    "CONTAINERD_ADDRESS",
    "REGISTRY_AUTH_FILE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
_PREFIXES_PASSED_ON: Final = ("FORGEYARD_", "LC_", "DOCKER_", "CONTAINERS_", "CONTAINERD_")
_ANY_CASE: Final = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a server wants of its keepers.

    :param config_file: the system's configuration file, where it is not the usual one.
    :param linger: seconds that one with nothing to keep waits for a server. result_ttl: one with ended attempts.
    """

    run_dir: Path
    state_dir: str
    config_file: Path | None = None
    linger: float = LINGER_SECONDS
    result_ttl: float = 3600.0

    @classmethod
    def of(cls, config: ExecutorConfig, config_file: Path | None = None) -> Wish:
        """What `config` wants."""
        settings = config.serve
        return cls(settings.run_dir, config.state_dir, config_file, settings.keeper_linger, settings.result_ttl)


@dataclass(frozen=True, slots=True)
class KeeperProcess:
    """A keeper that serves, or did when this was made."""

    place: Place
    about: About


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a keeper gets to see: how things are found, and nothing that was meant for the server alone."""
    return {
        name: value
        for name, value in environ.items()
        if name in _PASSED_ON or name.startswith(_PREFIXES_PASSED_ON) or name.lower() in _ANY_CASE
    }


async def find(wish: Wish) -> tuple[tuple[KeeperProcess, ...], bool]:
    """Keepers that serve, oldest first; and whether one died without having cleaned up: its directory is removed.

    One that a dead server had just begun to start is waited for.
    """
    found, died = [], False
    for place in Place.all(wish.run_dir, wish.state_dir):
        about = await _settled(place)
        if about is not None:
            found.append(KeeperProcess(place, about))
        elif not place.kept:
            died = True
            place.remove()
        else:
            log.error("a keeper in %s does not come to serve; it is left alone", place.directory)
    return tuple(found), died


def living(run_dir: Path, state_dir: str) -> Mapping[str, Counter[str]]:
    """Of keepers that serve, by runtime: how many there are (``keepers``), and their pools' counts. Only looks."""
    found: dict[str, Counter[str]] = {}
    for place in Place.all(run_dir, state_dir):
        about = place.about() if place.kept else None
        if about is not None:
            found.setdefault(about.runtime, Counter()).update({"keepers": 1, **place.pool()})
    return found


async def start(wish: Wish, runtime: str) -> KeeperProcess:
    """A new keeper, once it serves.

    :raises ExecutorError: SPAWN_FAILED, with what it said.
    """
    place = Place.new(wish.run_dir, wish.state_dir)
    pid = _spawn(place, wish, runtime)
    about = await _settled(place)
    if about is None:
        _end(pid)
        raise _failed(place, "keeper_not_started", f"the keeper for {runtime} did not start")
    for line in about.left:
        log.error("what a dead keeper left could not be destroyed: %s", line)
    return KeeperProcess(place, about)


async def recover(wish: Wish, runtime: str) -> None:
    """Destroy what dead keepers left, in a process that does nothing else.

    :raises ExecutorError: SPAWN_FAILED, with what it said.
    """
    place = Place.new(wish.run_dir, wish.state_dir)
    pid = _spawn(place, wish, runtime, "--recover")
    if not await _released(place, START_SECONDS):
        os.kill(pid, signal.SIGKILL)
        await _released(place, END_SECONDS)
    if _end(pid) != 0:
        raise _failed(place, "not_recovered", "what a dead keeper left could not be destroyed")
    if said := place.last_words(20):
        log.warning("recovery said: %s", said)
    place.remove()


async def end_all(wish: Wish) -> None:
    """End every keeper with what it keeps: this server wants none. One that does not end in time is killed."""
    found, _ = await find(wish)
    for keeper in found:
        log.warning("ending the keeper %d for %s with its attempts", keeper.about.pid, keeper.about.runtime)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                if keeper.place.kept:
                    os.kill(keeper.about.pid, number)
            if await _released(keeper.place, END_SECONDS):
                break
        keeper.place.remove()


def reap(pid: int) -> None:
    """Let a dead child go. One that is nobody's, or somebody else's, is no error."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _spawn(place: Place, wish: Wish, runtime: str, *more: str) -> int:
    """A session of its own, no descriptor of ours but the lock, and nobody's child once we are gone."""
    lock = lock_alone(place.directory / LOCK)
    if lock is None:
        raise RuntimeError(f"{place.directory} is somebody's already")
    argv = [
        sys.executable,
        "-P",  # the server's working directory is no place for modules
        "-m",
        "forgeyard_api.keeper",
        f"--runtime={runtime}",
        f"--state-dir={wish.state_dir}",
        f"--directory={place.directory}",
        f"--linger={wish.linger}",
        f"--result-ttl={wish.result_ttl}",
        f"--lock={_LOCK_FD}",
        *([] if wish.config_file is None else [f"--config={wish.config_file}"]),
        *more,
    ]
    appended = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.posix_spawn(
            sys.executable,
            argv,
            environment(),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, lock, _LOCK_FD),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(place.directory / LOG), appended, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
        )
    finally:
        os.close(lock)


async def _settled(place: Place) -> About | None:
    """What a keeper says of itself once it serves; None when it ended before, or does not come to it in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while True:
                kept, about = place.kept, place.about()
                if not kept:
                    return None
                if about is not None:
                    return about
                await asyncio.sleep(_TICK)
    return None


async def _released(place: Place, seconds: float) -> bool:
    """Whether its keeper ends in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while place.kept:  # noqa: ASYNC110  # it may be a process that is not ours, which nothing announces
                await asyncio.sleep(_TICK)
            return True
    return False


def _end(pid: int) -> int:
    """The exit code of a child that has ended, or that is ended now."""
    with contextlib.suppress(ProcessLookupError):
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            # Its lock is let go a moment before it can be waited for.
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    return -1


def _failed(place: Place, reason: str, brief: str) -> ExecutorError:
    said = place.last_words()
    log.error("%s; its log ends: %s", brief, place.last_words(20))
    place.remove()
    return ExecutorError(
        ExecutorErrorKind.SPAWN_FAILED,
        reason,
        brief,
        details=said or "it said nothing",
        resolution="mend what it says; the end of its log is in the server's",
    )
