"""The rules of the executor's own namespace, which carry routers' traffic outside and keep it from everything else.

They are constant and shared by all executors of the host. Each is registered by a locked file, so that a dead one has
no part in them, and the last that leaves takes them along.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_model.errors import SandboxError
from forgeyard_networks.firewall import forwarding
from forgeyard_networks.firewall.backend import LOCK_WAIT, HostBackend, at, failed, locked
from forgeyard_networks.firewall.registered import HOST_RULES, abandoned, live, namespace_key
from forgeyard_networks.firewall.rules import Chain, Match, Rule, Ruleset, State, Verdict, refuse
from forgeyard_networks.topology import HOST_LINKS

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS: Final = f"{HOST_LINKS}*"
_KNOWN: Final = frozenset({State.ESTABLISHED, State.RELATED})


def host_rules(networks: Sequence[IPv4Network]) -> tuple[Ruleset, ...]:
    """The chains of the host, for attempts' addresses out of `networks`.

    From one attempt to another, to the host's own addresses and ports, or to an attempt from outside: refused.
    """
    into = refuse(Match(out_link=_OURS))
    forward = (
        *refuse(Match(in_link=_OURS, out_link=_OURS)),
        *(Rule(Match(source=network, in_link=_OURS), Verdict.ACCEPT) for network in networks),
        # A forged source, which the router has let through: nobody to answer.
        Rule(Match(in_link=_OURS), Verdict.DROP),
        Rule(Match(out_link=_OURS, states=_KNOWN), Verdict.ACCEPT),
        *into,
    )
    masquerade = (
        Rule(Match(out_link=_OURS), Verdict.RETURN),
        *(Rule(Match(source=network), Verdict.MASQUERADE) for network in networks),
    )
    inward = _shared("INPUT", refuse(Match(in_link=_OURS)))
    across = (*refuse(Match(in_link=_OURS)), *into)
    return (
        Ruleset("ip", "filter", (_shared("FORWARD", forward), inward)),
        Ruleset("ip", "nat", (_shared("POSTROUTING", masquerade),)),
        Ruleset("ip6", "filter", (_shared("FORWARD", across), inward)),
    )


class HostFirewall:
    """One executor's part in the rules of its namespace. Every method blocks.

    :param network: the range that its attempts' addresses come from.
    :param ns_fd: the namespace, None for the caller's.
    :param wait: seconds to wait for other executors that change the same rules.
    """

    def __init__(
        self,
        backend: HostBackend,
        network: IPv4Network,
        *,
        ns_fd: int | None = None,
        lock_dir: str | Path = HOST_RULES,
        wait: float = LOCK_WAIT,
    ) -> None:
        self.backend = backend
        self._network = network
        self._ns_fd = ns_fd
        self._dir = Path(lock_dir) / at(ns_fd, namespace_key)
        self._wait = wait
        self._fd = -1
        self._file = self._dir / f"user.{uuid.uuid4().hex}"

    def acquire(self) -> None:
        """Put the rules there and turn forwarding on; put right what is not as it should be. As often as wanted.

        :raises SandboxError: NETWORK_SETUP_FAILED; nothing of ours is left then, unless others use it.
        """
        with self._changing():
            self._register()
            try:
                at(self._ns_fd, self._install)
            except BaseException:
                # The first error is the one to tell; what can't be undone now, the next acquire or release finds.
                with suppress(SandboxError):
                    self._leave()
                raise

    def release(self) -> None:
        """Leave; the last one takes the rules away and gives forwarding back as it was. Idempotent.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        if self._fd >= 0:
            with self._changing():
                self._leave()

    def sweep(self) -> None:
        """Take away what executors left that were killed, unless others live. For one that has not acquired.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        with self._changing():
            if abandoned(self._dir.parent, self._dir.name) and not self._networks():
                self._remove()

    def problems(self) -> tuple[str, ...]:
        """What is not as `acquire` leaves it.

        :raises SandboxError: NETWORK_SETUP_FAILED, when the rules can't be listed.
        """
        with self._changing():
            rules = host_rules(self._networks())
            return at(self._ns_fd, lambda: (*self.backend.problems(rules), *forwarding.problems()))

    def check(self) -> None:
        """Whether all is in force.

        :raises SandboxError: NETWORK_SETUP_FAILED, reason host_rules_changed.
        """
        found = self.problems()
        if found:
            raise failed(
                self.backend.name,
                "host_rules_changed",
                "this host's rules for job networks are not in force",
                "; ".join(found),
                "find what removes rules of others, then restart the executor",
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with locked(str(self._dir / "lock"), self.backend.name, self._wait):
            yield

    def _install(self) -> None:
        self.backend.install(host_rules(self._networks()))
        forwarding.turn_on(self._dir / "forwarding", self.backend.name)

    def _leave(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self._file.unlink(missing_ok=True)
        left = self._networks()
        if left:
            at(self._ns_fd, lambda: self.backend.install(host_rules(left)))
        else:
            self._remove()

    def _remove(self) -> None:
        at(self._ns_fd, lambda: self.backend.remove(host_rules(())))
        at(self._ns_fd, lambda: forwarding.restore(self._dir / "forwarding", self.backend.name))

    def _register(self) -> None:
        if self._fd >= 0:
            return
        try:
            fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, str(self._network).encode())
        except OSError as error:
            raise failed(self.backend.name, "firewall_lock_unusable", f"cannot use {self._dir}", str(error)) from error
        self._fd = fd

    def _networks(self) -> tuple[IPv4Network, ...]:
        """The ranges of all executors that live; what dead ones left is removed."""
        found = set()
        for path in self._dir.glob("user.*"):
            if path == self._file:
                found |= {self._network} if self._fd >= 0 else set()
            elif (text := live(path)) is not None:
                found.add(IPv4Network(text))
        return tuple(sorted(found))


def _shared(where: str, rules: tuple[Rule, ...]) -> Chain:
    return Chain(f"FORGEYARD-{where}", rules, where.lower(), shared=True)
