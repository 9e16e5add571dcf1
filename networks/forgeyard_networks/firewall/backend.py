"""What every backend does, and how its commands are run and their failures read."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final, Protocol, TypeVar

from forgeyard_host.netns import in_namespace
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_networks.firewall.rules import Ruleset

T = TypeVar("T")
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for."""
LOCK_WAIT: Final = 10
"""Seconds that we wait for other people's locks before the attempt fails."""
_COMMAND_TIMEOUT: Final = 30.0
_RETRY: Final = 0.02


class Sets(Protocol):
    """The sets of addresses of one router, kept open."""

    def add(self, name: str, address: IPv4Address, seconds: int) -> None:
        """Put `address` in for `seconds` from now, or renew it.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """

    def close(self) -> None:
        """Let go; the sets stay."""


class Backend(Protocol):
    """Loads rules into a router, which has no others."""

    @property
    def name(self) -> str:
        """As capabilities show it."""

    @property
    def version(self) -> str:
        """Of its program."""

    def load_in(self, ns_fd: int | None, rulesets: Sequence[Ruleset]) -> None:
        """Load into the namespace `ns_fd` (None: the caller's). Each table as a whole or not at all. Blocking.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """

    def listing(self, ns_fd: int | None) -> str:
        """What the kernel has there, as the backend's own program shows it.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """

    def sets_in(self, ns_fd: int) -> Sets:
        """The sets there.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """


class HostBackend(Protocol):
    """Keeps shared chains in the namespace of the calling thread, beside the rules of others."""

    @property
    def name(self) -> str:
        """As capabilities show it."""

    @property
    def version(self) -> str:
        """Of its program."""

    def check_usable(self) -> None:
        """Whether the rules that are there can be listed.

        :raises SandboxError: NETWORK_SETUP_FAILED, naming the backend.
        """

    def install(self, rulesets: Sequence[Ruleset]) -> None:
        """Put the chains and exactly one jump to each there, whatever is there of them already.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """

    def remove(self, rulesets: Sequence[Ruleset]) -> None:
        """Take them away; what is gone is no error.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """

    def problems(self, rulesets: Sequence[Ruleset]) -> tuple[str, ...]:
        """What is not as `install` leaves it.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """


def at(ns_fd: int | None, act: Callable[[], T]) -> T:
    """What `act` returns in the namespace `ns_fd`, None for the caller's own."""
    return act() if ns_fd is None else in_namespace(ns_fd, act)


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, what it reads, and what its environment has beside the usual."""

    words: tuple[str, ...]
    text: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def run(backend: str, *words: str, text: str = "") -> str:
    """What a command prints, run in the calling thread's namespace.

    :raises SandboxError: NETWORK_SETUP_FAILED.
    """
    return run_all(backend, [Command(words, text)])[0]


def run_all(backend: str, commands: Sequence[Command]) -> list[str]:
    """What each command prints. They run at the same time, in the calling thread's namespace, which a child inherits.

    :raises SandboxError: NETWORK_SETUP_FAILED, for the first that fails; all have ended then.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(_start(command) for command in commands)
        # Every one is waited for, also behind one that failed.
        ended = [_finish(child, command) for child, command in zip(started, commands, strict=True)]
    except (OSError, subprocess.TimeoutExpired) as error:
        for child in started:
            child.kill()
            child.communicate()
        name = commands[min(len(started), len(commands) - 1)].words[0]
        raise failed(backend, "command_failed", f"cannot run {name}", str(error)) from error
    for child, (code, _, complaint) in zip(started, ended, strict=True):
        if code:
            raise _refused(backend, child, complaint)
    return [output for _, output, _ in ended]


def _start(command: Command) -> subprocess.Popen[bytes]:
    # No preexec_fn and no shell: the child is made by vfork, whatever the size of this process.
    return subprocess.Popen(
        command.words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": PATH, "LC_ALL": "C", **command.environment},
    )


def _finish(child: subprocess.Popen[bytes], command: Command) -> tuple[int, str, str]:
    output, complaint = child.communicate(command.text.encode(), timeout=_COMMAND_TIMEOUT)
    return child.returncode, output.decode("utf-8", "replace"), complaint.decode("utf-8", "replace")


def failed(backend: str, reason: str, brief: str, details: str, resolution: str = "") -> SandboxError:
    """The error of a backend: it always says which one it was."""
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED,
        reason,
        f"{backend}: {brief}",
        details=details,
        resolution=resolution or "see `forgeyard doctor` for what this host's firewall can do",
    )


@contextmanager
def locked(path: str, backend: str, wait: float = LOCK_WAIT) -> Iterator[None]:
    """Hold the lock file `path`.

    :raises SandboxError: NETWORK_SETUP_FAILED, reason firewall_locked, when others keep it for longer than `wait`.
    """
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise failed(backend, "firewall_lock_unusable", f"cannot open the lock {path}", str(error)) from error
    try:
        _flock(fd, path, backend, wait)
        yield
    finally:
        os.close(fd)


def has_ipv6() -> bool:
    """Whether this kernel speaks IPv6 at all."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC).close()
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return False
        raise
    return True


def _flock(fd: int, path: str, backend: str, wait: float) -> None:
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise failed(
                    backend,
                    "firewall_locked",
                    f"others have held {path} for {wait:g} s",
                    "the firewall's lock could not be had",
                    "find who holds the lock (lslocks), then start the job again",
                ) from None
            time.sleep(_RETRY)
        else:
            return


def _refused(backend: str, child: subprocess.Popen[bytes], complaint: str) -> SandboxError:
    words = child.args if isinstance(child.args, (list, tuple)) else ()
    details = f"{' '.join(map(str, words))} ended with {child.returncode}: {complaint.strip()[-500:]}"
    if "incompatible" in complaint:
        return failed(
            backend,
            "backend_incompatible",
            "this host's rules were made by another program and can't be listed",
            details,
            "install nft, which lists and changes them all",
        )
    # iptables: exit code 4 is a resource problem, the lock above all. It never means that a rule is absent.
    if child.returncode == 4 or "xtables lock" in complaint:
        return failed(backend, "firewall_locked", "others hold the firewall's lock", details)
    return failed(backend, "rule_not_set", "rules can't be listed or set", details)
