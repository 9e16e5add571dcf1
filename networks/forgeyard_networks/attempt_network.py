"""An attempt's network as an executor uses it: what is asked for, and what each container is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import Any, Final, Protocol

from forgeyard_model.network import NetworkEvidence
from forgeyard_model.policy import NetworkPolicy, PublishedPort
from forgeyard_networks.names import MemberNames

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

Lines = Callable[[Mapping[str, Any]], None]
"""Takes what is seen as it is seen, each a document for one line of JSON."""


@dataclass(frozen=True, slots=True)
class NetworkMember:
    """A container on the network, by the names it is found under."""

    name: str
    hostname: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkRequest:
    """What an attempt needs.

    :param sandbox: the attempt's id.
    :param members: the job first, then its services.
    :param audit, publish: beside what the policy says of them.
    :param lines: who wants to see connections, questions and fetches as they come.
    :param plumbed: members' namespaces are their runtime's to make; `AttemptNetwork.plumb` connects them.
    """

    sandbox: str
    policy: NetworkPolicy
    members: tuple[NetworkMember, ...]
    audit: bool = False
    publish: tuple[PublishedPort, ...] = ()
    lines: Lines | None = None
    plumbed: bool = False


@dataclass(frozen=True, slots=True)
class MemberNetwork:
    """What one container is given.

    :param netns: path of its namespace, while the network is open; None when its runtime makes it.
    :param address: of its eth0.
    :param hosts, resolv_conf: text of /etc/hosts and /etc/resolv.conf; /etc/hostname is `hostname` and a line end.
    :param environment: variables, unless the job sets them itself.
    :param home_files: by their path below HOME; one that is there stays.
    """

    netns: str | None
    address: str
    hosts: str
    resolv_conf: str
    hostname: str
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    home_files: Mapping[str, str] = field(default_factory=lambda: _NOTHING)


class AttemptNetwork(Protocol):
    """A network with everything in place. Its two kinds: RouterNetwork, ours; OperatorNetwork, by CNI plugins."""

    @property
    def members(self) -> Mapping[str, MemberNetwork]:
        """By name, the job first."""

    @property
    def settled(self) -> bool:
        """Whether addresses and names of all members are known. An operator's plugins tell them as members are plumbed;
        `members` has them from then on, and no program may run before."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth a reader's time and changes no verdict."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when a part of the network died: the attempt can't go on then."""

    async def connect(
        self, address: str, port: int, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect as the network itself, for probes; with a loopback address, as the job.

        :raises OSError: as connect(2). TimeoutError: nobody answered within `timeout` seconds.
        """

    async def plumb(self, member: str, pid: int) -> None:
        """Connect the network namespace of process `pid`, a new one, as that of `member`. Nothing may run in it yet.

        :raises SandboxError: NAMESPACE_FAILED, NETWORK_SETUP_FAILED.
        """

    async def evidence(self) -> NetworkEvidence:
        """What was seen so far."""

    async def close(self) -> None:
        """Drop all of it. Idempotent; nothing is left when it returns, but what the kernel still takes down.

        :raises SandboxError: CLEANUP_FAILED, of an operator's plugins alone; closing again tries again.
        """


def member_names(members: Sequence[NetworkMember], addresses: Sequence[IPv4Address]) -> tuple[MemberNames, ...]:
    """`members` at their addresses."""
    return tuple(
        MemberNames(member.name, address, member.aliases, member.hostname)
        for member, address in zip(members, addresses, strict=True)
    )


async def connected(
    make: Callable[[], Any], address: str, port: int, timeout: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection by the non-blocking socket that `make` makes.

    :raises OSError, TimeoutError: see AttemptNetwork.connect.
    """
    made = make()
    try:
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(made, (address, port))
            return await asyncio.open_connection(sock=made)
    except BaseException:
        made.close()
        raise
