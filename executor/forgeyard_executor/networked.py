"""An attempt's own network, and what its containers have of it: namespaces, files, variables, addresses."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_executor.environment import HOME
from forgeyard_executor.member import Member
from forgeyard_executor.planning import Planned
from forgeyard_executor.plumbing import Plumbing
from forgeyard_executor.steps import ResolvedStep
from forgeyard_host.files import open_beneath
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.identity import SandboxId
from forgeyard_model.network import NetworkEvidence
from forgeyard_model.plan import JobUser, NetworkAttachment
from forgeyard_model.policy import NetworkMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.services import ServiceNetwork, ServiceSpec

if TYPE_CHECKING:
    from forgeyard_networks.attempt_network import AttemptNetwork, MemberNetwork, NetworkMember
    from forgeyard_networks.manager import NetworkManager
    from forgeyard_runtimes.contract import NetworkJoin, NetworkShare

JOB: Final = "job"
_LOOPBACK: Final = "127.0.0.1"


def is_networked(request: ExecutionRequest) -> bool:
    """Whether a network has to be made. Loopback alone and the host's own network need none."""
    return bool(request.spec.services) or request.network.mode not in (NetworkMode.DENY, NetworkMode.HOST)


def job_name(services: tuple[ServiceSpec, ...]) -> str:
    """What the job is called on its network; no service's name."""
    taken = {name for service in services for name in service.names}
    return next(name for name in (JOB, *(f"{JOB}-{number}" for number in range(2, 99))) if name not in taken)


def network_members(sandbox: SandboxId, request: ExecutionRequest) -> tuple[NetworkMember, ...]:
    """The containers of an attempt by their names, the job first."""
    from forgeyard_networks.attempt_network import NetworkMember

    services = request.spec.services
    # Others find a service in the job's namespace where the job is.
    shared = tuple(name for item in services if item.network is ServiceNetwork.LOCALHOST for name in item.names)
    own = (item for item in services if item.network is ServiceNetwork.OWN)
    job = NetworkMember(job_name(services), sandbox.hostname, shared)
    return (job, *(NetworkMember(item.name, item.name, item.aliases) for item in own))


def is_plumbed(request: ExecutionRequest, join: NetworkJoin, share: NetworkShare) -> bool:
    """Whether the namespaces of `request` are the runtime's to make, and connected at the gate."""
    shared = any(item.network is ServiceNetwork.LOCALHOST for item in request.spec.services)
    return join == "plumbed" and not (shared and share == "made")


async def attach(
    manager: NetworkManager, sandbox: SandboxId, request: ExecutionRequest, *, plumbed: bool = False
) -> Networked:
    """A network for `request`.

    :param plumbed: its members' namespaces are the runtime's to make.
    :raises ForgeyardError: it can't be made, or not enforced.
    """
    from forgeyard_networks.attempt_network import NetworkRequest

    members = network_members(sandbox, request)
    network = await manager.attach(NetworkRequest(sandbox.value, request.network, members, plumbed=plumbed))
    return Networked(network, members[0].name, request, sandbox)


@dataclass(frozen=True, slots=True)
class Networked:
    """The network of one attempt, for its job and its services.

    :param sandbox: the job's.
    """

    network: AttemptNetwork
    job: str
    request: ExecutionRequest
    sandbox: SandboxId
    plumbing: Plumbing = field(default_factory=Plumbing)

    @property
    def notes(self) -> tuple[str, ...]:
        """Worth a reader's time."""
        return self.network.notes

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when a part of it died."""
        return self.network.failed

    def member(self, service: ServiceSpec | None = None) -> MemberNetwork:
        """What the job's container is given, or that of `service`."""
        if service is None or service.network is ServiceNetwork.LOCALHOST:
            return self.network.members[self.job]
        return self.network.members[service.name]

    def attachment(self, service: ServiceSpec | None = None) -> NetworkAttachment:
        """The namespace of the job's container, or of that of `service`."""
        netns = self.member(service).netns
        of = self.sandbox.container if self._joins_job(service) else None
        return NetworkAttachment(self.request.network.mode, netns, of, self.sandbox.value)

    def plumb(self, service: ServiceSpec | None = None) -> Callable[[int], Awaitable[None]] | None:
        """What connects the job's container, or that of `service`, once it is there; None where nothing has to."""
        if self.member(service).netns is not None:
            return None
        if service is not None and self._joins_job(service):
            return partial(self._joined, service.name)
        return partial(self._plumbed, None if service is None else service.name)

    def _joins_job(self, service: ServiceSpec | None) -> bool:
        """Whether it shares a namespace that the job's container brings along."""
        shared = service is not None and service.network is ServiceNetwork.LOCALHOST
        return shared and self.member(service).netns is None

    async def _plumbed(self, service: str | None, pid: int) -> None:
        before = self.network.settled
        await self.network.plumb(service or self.job, pid)
        if self.network.settled and not before:
            self.plumbing.settle()
        if service is None:
            self.plumbing.connected(pid)

    async def _joined(self, service: str, pid: int) -> None:
        self.plumbing.check_joined(service, pid)

    async def may_launch(self, service: ServiceSpec) -> None:
        """Wait until there is what its container joins."""
        if self._joins_job(service):
            await self.plumbing.job_connected.wait()

    async def may_run(self) -> None:
        """Wait until every container has its names and its addresses."""
        if not self.network.settled:
            await self.plumbing.settled.wait()

    def files(self, service: ServiceSpec | None = None) -> Mapping[str, str]:
        """Texts of its /etc, by the names that planning has for them."""
        member = self.member(service)
        hosts, hostname = member.hosts, member.hostname
        if service is not None and service.network is ServiceNetwork.LOCALHOST:
            hostname = service.name
        return {"hosts": hosts, "resolv.conf": member.resolv_conf, "hostname": f"{hostname}\n"}

    def address(self, service: ServiceSpec) -> str:
        """Where the job reaches it."""
        return _LOOPBACK if service.network is ServiceNetwork.LOCALHOST else self.member(service).address

    async def connect(
        self, service: ServiceSpec, port: int, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a port of `service`, for a probe.

        :raises OSError: refused, unreachable, or TimeoutError.
        """
        return await self.network.connect(self.address(service), port, seconds)

    def for_step(self, resolved: ResolvedStep) -> ResolvedStep:
        """`resolved` with the network's variables, unless the job or the step sets them itself."""
        given = self.request.environment.variables.keys() | resolved.step.env.keys()
        own = {name: value for name, value in self.member().environment.items() if name not in given}
        return replace(resolved, env={**resolved.env, **own}) if own else resolved

    def for_job(self, planned: Planned) -> Planned:
        """`planned` with the network's variables in its steps."""
        return replace(planned, steps=tuple(map(self.for_step, planned.steps)))

    def for_service(self, service: ServiceSpec, planned: Planned) -> Planned:
        """`planned`, of `service`, with the network's variables in its program's environment."""
        own = {name: value for name, value in self.member(service).environment.items() if name not in service.env}
        return replace(planned, steps=tuple(replace(step, env={**step.env, **own}) for step in planned.steps))

    def put_home_files(self, job: Member) -> None:
        """Put files of the network's into the job's HOME, before anything runs there. Blocking."""
        files = self.member().home_files
        if files:
            home = Path(job.placed.sources["home"])
            put_files(home, files, job.blueprint.planned.plan.user, job.uid_base)

    def covered(self, planned: Planned) -> Iterator[str]:
        """Notes on files of the network's that a mount of the job's own hides."""
        places = tuple(mount.destination for mount in planned.plan.mounts if mount.destination.startswith(f"{HOME}/"))
        for path in self.member().home_files:
            if any(f"{HOME}/{path}".startswith(f"{place}/") for place in places):
                yield f"~/{path} with the proxy's address lies under a mount of the job's own: set the proxy there"

    async def evidence(self) -> NetworkEvidence:
        """What it let through and refused so far."""
        return await self.network.evidence()

    async def close(self) -> list[str]:
        """Drop it. What could not be undone, a line each."""
        try:
            await self.network.close()
        except ForgeyardError as error:
            return [str(error)]
        return []


def put_files(top: Path, files: Mapping[str, str], user: JobUser, base: int) -> None:
    """Write `files` below the job's own directory `top`, as the job's; one that is there stays.

    Nothing runs in it yet, but its directories may be a cache's: no link is followed.
    """
    owner = base + user.uid, base + user.gid
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, text in files.items():
            _put_file(directory, path, text, owner)
    finally:
        os.close(directory)


def _put_file(top: int, path: str, text: str, owner: tuple[int, int]) -> None:
    *parents, name = path.split("/")
    directory = os.dup(top)
    try:
        for parent in parents:
            above, directory = directory, _directory_in(directory, parent, owner)
            os.close(above)
        fd = open_beneath(directory, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ELOOP, errno.ENOTDIR):
            return
        raise
    finally:
        os.close(directory)
    try:
        os.write(fd, text.encode())
        os.fchown(fd, *owner)
    finally:
        os.close(fd)


def _directory_in(above: int, name: str, owner: tuple[int, int]) -> int:
    """The directory `name`, made if nothing is there. Opened one by one: making a path would follow links in it."""
    made = True
    try:
        os.mkdir(name, 0o755, dir_fd=above)
    except FileExistsError:
        made = False
    fd = open_beneath(above, name, os.O_RDONLY | os.O_DIRECTORY)
    if made:
        os.fchown(fd, *owner)
    return fd
