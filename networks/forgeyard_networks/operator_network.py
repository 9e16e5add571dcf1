"""An attempt on an operator's own network: plugins fill the members' namespaces and decide what is let through."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from types import MappingProxyType
from typing import Final

from forgeyard_host.links import Links, Up
from forgeyard_host.netns import (
    NetNamespace,
    in_namespace,
    namespace_of,
    new_namespace,
    pin,
    set_sysctls,
    stream_socket,
    unpin,
)
from forgeyard_host.processes import own_start_time, start_time
from forgeyard_model.errors import ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.network import NetworkEvidence
from forgeyard_model.policy import NetworkMode
from forgeyard_networks.attempt_network import MemberNetwork, NetworkRequest, connected, member_names
from forgeyard_networks.cni.attachment import OURS
from forgeyard_networks.cni.network import CniNetwork
from forgeyard_networks.cni.result import CniDns, CniResult
from forgeyard_networks.etc_files import hosts_text, resolv_text
from forgeyard_networks.names import is_address
from forgeyard_networks.tasks import InPool, to_the_end

_SYSCTLS: Final = MappingProxyType({"net.ipv4.ip_unprivileged_port_start": "0"})
_NOTE: Final = "network {}: its rules are its operator's; nothing is enforced or recorded by us"
_IFNAME: Final = "eth0"
_PIN: Final = re.compile(r"fy-.+@(\d+)\.(\d+)")


class OperatorNetwork:
    """See AttemptNetwork. `attach`, then `close`, also when attaching failed.

    :param pins: directory of pinned namespaces.
    :param forget: called when all is gone.
    """

    def __init__(
        self,
        request: NetworkRequest,
        cni: CniNetwork,
        pins: Path,
        in_pool: InPool,
        forget: Callable[[OperatorNetwork], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.notes: tuple[str, ...] = (_NOTE.format(request.policy.conflist),)
        self.members: Mapping[str, MemberNetwork] = MappingProxyType({})
        self._request, self._cni, self._pins, self._in_pool, self._forget = request, cni, pins, in_pool, forget
        self._containers = tuple(container_id(request.sandbox, number) for number in range(len(request.members)))
        self._namespaces: dict[str, NetNamespace] = {}
        self._results: dict[str, CniResult] = {}
        self._closing = asyncio.Lock()

    async def attach(self) -> None:
        """Make the members' namespaces, and have the plugins fill them; where runtimes make them, `plumb` does.

        :raises SandboxError: NAMESPACE_FAILED, or NETWORK_SETUP_FAILED: the plugin's own error.
        """
        if not self._request.plumbed:
            await to_the_end(self._in_pool(self._make))
            await to_the_end(*map(self._fill, self._containers))
        self.members = MappingProxyType(self._settled_members() if self.settled else self._awaited_members())

    @property
    def settled(self) -> bool:
        """See AttemptNetwork."""
        return len(self._results) == len(self._containers)

    async def connect(
        self, address: str, port: int, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See AttemptNetwork. There is no router to connect from: the job's own namespace is what comes nearest."""
        job = self._namespaces.get(self._containers[0])
        if job is None:
            raise ConnectionRefusedError("the job's container has yet to be made")
        return await connected(lambda: stream_socket(job.fd), address, port, timeout)

    async def plumb(self, member: str, pid: int) -> None:
        """See AttemptNetwork. Pinned as one of ours is, so that DEL finds it when its last process is gone.

        :raises SandboxError: also the plugin's own error; `close` takes back what there is then.
        """
        number = [own.name for own in self._request.members].index(member)
        container, namespace = self._containers[number], namespace_of(pid)
        await to_the_end(self._in_pool(lambda: self._take(container, namespace)))
        await self._fill(container)
        if self.settled:
            self.members = MappingProxyType(self._settled_members())

    async def evidence(self) -> NetworkEvidence:
        """See AttemptNetwork: none of it is ours."""
        return NetworkEvidence(NetworkMode.CONFLIST, conflist=self._request.policy.conflist, notes=self.notes)

    async def close(self) -> None:
        """See AttemptNetwork."""
        async with self._closing:
            await to_the_end(self._detach())

    async def _detach(self) -> None:
        problems: list[str] = []
        for container in reversed(list(self._namespaces)):
            try:
                await self._cni.delete(container, _IFNAME)
                await to_the_end(self._in_pool(partial(unpin, pin_path(self._pins, container))))
            except ForgeyardError as error:
                problems.append(str(error))  # the others' turn comes all the same
            else:
                self._namespaces.pop(container).close()
        if problems:
            raise SandboxError(
                SandboxErrorKind.CLEANUP_FAILED,
                "cni_left",
                f"parts of network {self._request.policy.conflist} are left",
                details="; ".join(problems),
                resolution="`forgeyard gc` tries again",
            )
        self._forget(self)
        self.failed.cancel()

    def _make(self) -> None:
        for container in self._containers:
            self._pin(container, new_namespace(_SYSCTLS))

    def _take(self, container: str, namespace: NetNamespace) -> None:
        """Make a runtime's namespace what one of ours is."""
        self._pin(container, namespace)
        in_namespace(namespace.fd, lambda: set_sysctls(_SYSCTLS))
        inner = Links.at(namespace.fd)
        try:
            inner.run(Up("lo"))
        finally:
            inner.close()

    def _pin(self, container: str, namespace: NetNamespace) -> None:
        try:
            pin(namespace, pin_path(self._pins, container))
        except BaseException:
            namespace.close()
            raise
        self._namespaces[container] = namespace

    async def _fill(self, container: str) -> None:
        (result,) = await to_the_end(self._cni.add(container, str(pin_path(self._pins, container)), _IFNAME))
        self._results[container] = result

    def _settled_members(self) -> dict[str, MemberNetwork]:
        results = [self._results[container] for container in self._containers]
        names = member_names(self._request.members, [self._address(result) for result in results])
        return {
            own.name: MemberNetwork(
                netns=None if self._request.plumbed else str(pin_path(self._pins, container)),
                address=str(own.address),
                hosts=hosts_text(own, names),
                resolv_conf=_resolv_conf(result.dns),
                hostname=own.hostname or own.name,
            )
            for own, container, result in zip(names, self._containers, results, strict=True)
        }

    def _awaited_members(self) -> dict[str, MemberNetwork]:
        """What is known before the plugins were run."""
        return {
            own.name: MemberNetwork(None, "", "", resolv_text(None), own.hostname or own.name)
            for own in self._request.members
        }

    def _address(self, result: CniResult) -> IPv4Address:
        if result.ipv4:
            return result.ipv4[0].ip
        raise SandboxError(
            SandboxErrorKind.NETWORK_SETUP_FAILED,
            "cni_no_address",
            f"network {self._request.policy.conflist} gave a container no IPv4 address",
            resolution="its conflist needs an ipam section that hands out IPv4 addresses",
        )


def container_id(sandbox: str, number: int) -> str:
    """What CNI knows a member by."""
    return f"{OURS}{sandbox}-{number}"


def pin_path(pins: Path, container: str) -> Path:
    """Where this process pins a member's namespace: the name says whose it is."""
    return pins / f"{container}@{os.getpid()}.{own_start_time()}"


def is_dead(path: Path) -> bool:
    """Whether the process that pinned a namespace at `path` is gone. A name that is not ours says nothing."""
    match = _PIN.fullmatch(path.name)
    if match is None:
        return False
    try:
        return start_time(int(match[1])) != int(match[2])
    except ProcessLookupError:
        return True


def _resolv_conf(dns: CniDns) -> str:
    """As the network says. Where it names no server nobody answers: a server of our own choice may not be meant."""
    servers = [text for text in dns.nameservers if is_address(text)]
    if not servers:
        return resolv_text(None)
    lines = [f"nameserver {server}" for server in servers]
    words = {"search": dns.search or ((dns.domain,) if dns.domain else ()), "options": dns.options}
    lines += [f"{key} {' '.join(' '.join(values).split())}" for key, values in words.items() if values]
    return "\n".join(lines) + "\n"
