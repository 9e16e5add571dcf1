"""The adapter for a Docker daemon on this machine: the same bundle, on our own root, in a container of Docker's.

The container's own image is a skeleton (skeleton.py); all of the bundle's root and mounts is bound on it (staging.py).
Docker makes no network: the container's namespace is new and empty, and whoever plans one plumbs it at the gate.
"""

from __future__ import annotations

import asyncio
import json
import platform
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from docker import APIClient
from docker.errors import NotFound

from forgeyard_host.children import wait_readable
from forgeyard_host.failures import cleanup_failed, describe
from forgeyard_host.hostnames import set_hostname
from forgeyard_host.processes import send_signal
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.plan import Bundle, EngineImage, NetworkAttachment, RootfsPlan
from forgeyard_runtimes.contract import (
    Carrier,
    ContainerRef,
    ContainerState,
    ContainerStatus,
    NetworkJoin,
    NetworkShare,
    Stdio,
    SweepReport,
)
from forgeyard_runtimes.docker.capabilities import docker_capabilities, maps_ids, refuse_unfit
from forgeyard_runtimes.docker.client import DockerClient, DockerSettings, create_container, load_image
from forgeyard_runtimes.docker.containers import (
    check_here,
    failed_start,
    not_applied,
    refuse_fields,
    remove_container,
    start_container,
)
from forgeyard_runtimes.docker.differences import DECLARED_STRICTER, DECLARED_WEAKER, NO_FORWARDING
from forgeyard_runtimes.docker.effective import read_effective
from forgeyard_runtimes.docker.endpoint import environment, find_endpoint
from forgeyard_runtimes.docker.engine_socket import is_engine_socket
from forgeyard_runtimes.docker.errors import NotThere
from forgeyard_runtimes.docker.images import DockerImages, refuse_storage, volumes_to_cover
from forgeyard_runtimes.docker.process import exec_request, run_exec
from forgeyard_runtimes.docker.readback import in_bundle_terms, sharing_in_bundle_terms
from forgeyard_runtimes.docker.skeleton import SkeletonImage, build_image
from forgeyard_runtimes.docker.staging import Staged, stage, unstage
from forgeyard_runtimes.docker.sweep import name_of, sweep
from forgeyard_runtimes.docker.translate import carries, create_request
from forgeyard_runtimes.labels import DIRECTORY, label_filter, owner_labels, sandbox_of
from forgeyard_runtimes.removed import removed_meanwhile
from forgeyard_runtimes.shielding import shielded

_STATUS: Final = {
    "created": ContainerStatus.CREATED,
    "running": ContainerStatus.RUNNING,
    "paused": ContainerStatus.RUNNING,
    "restarting": ContainerStatus.RUNNING,
    "removing": ContainerStatus.STOPPED,
    "exited": ContainerStatus.STOPPED,
    "dead": ContainerStatus.STOPPED,
}


@dataclass(slots=True)
class _Live:
    """A container of this adapter's: Docker's id, what it was made of, and its PID 1 once started.

    :param shares: the container whose network namespace it has.
    """

    docker_id: str
    spec: Mapping[str, Any]
    staged: Staged
    shares: _Live | None = None
    pid: int = 0


class DockerRuntime:
    """One Docker daemon. Use `find`, and `close` at the end.

    :ivar network_join: "plumbed": the container has a new namespace, reached as /proc/<pid>/ns/net from the gate on.
    :ivar declared_weaker: fields that a comparison of the bundle with `effective_spec` finds weaker, and why is said.
    """

    network_join: ClassVar[NetworkJoin] = "plumbed"
    network_share: ClassVar[NetworkShare] = "container"
    joins_user_namespace: ClassVar[bool] = False
    literal: ClassVar[bool] = False
    declared_weaker: ClassVar[frozenset[str]] = DECLARED_WEAKER
    declared_stricter: ClassVar[frozenset[str]] = frozenset(DECLARED_STRICTER)

    def __init__(self, client: DockerClient, version: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        self._client = client
        self._settings = client.settings
        self._version = str(version["Version"]).partition("+")[0]
        self._info = info
        self._live: dict[str, _Live] = {}
        self._skeletons: set[str] = set()
        self.images = None if self._settings.own_rootfs else DockerImages(client, self._version)

    @classmethod
    async def find(cls, settings: DockerSettings | None = None) -> DockerRuntime:
        """Connect to the daemon that `settings` or the environment names, and look whether jobs can run on it.

        :raises ExecutorError: LOST (not there, no permission), TIMEOUT (it hangs), UNSUPPORTED (too old, rootless,
            another cgroup driver, not on this machine).
        """
        settings = settings or DockerSettings()
        client = DockerClient(find_endpoint(settings.host, settings.context, environment()), settings)
        try:
            await client.connect()
            version, info = await client.ask(lambda api: (api.version(), api.info()), "ask its version")
            refuse_unfit(info)
            if not settings.own_rootfs:
                refuse_storage(info)
        except BaseException:
            await client.close()
            raise
        return cls(client, version, info)

    @property
    def name(self) -> str:
        """Name and version, such as ``docker 20.10.24``."""
        return f"docker {self._version}"

    @property
    def address(self) -> str:
        """Where the daemon listens."""
        return self._client.endpoint.host

    def capabilities(self) -> ExecutorCapabilities:
        """What containers of this daemon enforce: no user namespace of an attempt's own."""
        return replace(docker_capabilities(self.name, self._info), rootfs="own" if self.images is None else "image")

    def carries(self, bundle: Bundle) -> tuple[str, ...]:
        """Names of the fields of `bundle` that Docker can't carry; `create` refuses a bundle that has any."""
        return self._uncarried(json.loads(bundle.config))

    def _uncarried(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        return (*carries(spec), *self._engine_sockets(spec))

    def _engine_sockets(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        known = [self._client.endpoint.socket] if self._client.endpoint.socket else []
        return tuple(
            f"mounts.{mount['destination']}.source"
            for mount in spec["mounts"]
            if mount["type"] == "bind" and is_engine_socket(mount["source"], known)
        )

    def cgroup(self, ref: ContainerRef) -> str | None:
        """Path of the container's own group below each hierarchy's root; None before `create`.

        It lies in the group that the bundle's cgroupsPath names, and its name is Docker's id.
        """
        live = self._live.get(ref.container_id)
        return None if live is None else f"{live.spec['linux']['cgroupsPath']}/{live.docker_id}"

    async def create(
        self, ref: ContainerRef, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment, stdio: Stdio
    ) -> None:
        """Stage the mounts and create the container. A failure leaves nothing, here or at the daemon.

        :raises SandboxError: UNSUPPORTED_ISOLATION naming the fields that can't be carried; mount failures.
        :raises ExecutorError: what the daemon said.
        """
        if stdio.carrier is not Carrier.FIFO:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED, "runtime_carrier", f"docker has no carrier {stdio.carrier}"
            )
        spec: dict[str, Any] = json.loads(bundle.config)
        refuse_fields(self._uncarried(spec))
        try:
            shares = self._shared(network)
            work = self._client.change(
                lambda api: self._create(api, ref, spec, shares, rootfs.engine), "create a container"
            )
            self._live[ref.container_id] = await shielded(work)
        except BaseException:
            await shielded(self._discard(ref))
            raise

    def _shared(self, network: NetworkAttachment) -> _Live | None:
        if network.of is None:
            return None
        found = self._live.get(network.of)
        if found is None or not found.pid:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "docker_netns",
                f"container {network.of} does not run, to share its network",
            )
        return found

    def _create(
        self,
        api: APIClient,
        ref: ContainerRef,
        spec: dict[str, Any],
        shares: _Live | None,
        engine: EngineImage | None,
    ) -> _Live:
        """Blocking."""
        staged = stage(spec, _staging(ref), volumes_to_cover(spec, engine))
        labels = owner_labels(self._settings, sandbox_of(ref.container_id), ref.directory)
        of = None if shares is None else shares.docker_id

        def request(image: str) -> dict[str, Any]:
            return create_request(spec, staged, image, labels, userns_host=maps_ids(self._info), network_of=of)

        if self.images is not None and engine is not None:
            answer = self.images.create(api, request(engine.identity), ref.container_id, engine)
        else:
            answer = self._create_on_skeleton(api, request, ref.container_id, staged)
        warnings = [said for said in answer.get("Warnings") or () if shares is None or said != NO_FORWARDING]
        if warnings:
            raise not_applied("; ".join(warnings))
        return _Live(answer["Id"], spec, staged, shares)

    def _create_on_skeleton(
        self, api: APIClient, request: Callable[[str], dict[str, Any]], name: str, staged: Staged
    ) -> dict[str, Any]:
        image = build_image(staged.skeleton, self._settings.state, platform.machine())
        self._have_image(api, image)
        try:
            return create_container(api, request(image.identity), name)
        except NotFound:
            # Somebody removed it since: it is made once more.
            self._skeletons.discard(image.identity)
            self._have_image(api, image)
            return create_container(api, request(image.identity), name)

    def _have_image(self, api: APIClient, image: SkeletonImage) -> None:
        if image.identity in self._skeletons:
            return
        load_image(api, image.identity, image.archive)
        self._skeletons.add(image.identity)

    async def start(self, ref: ContainerRef, *, netns: str | None = None) -> int:
        """Start PID 1 and return its host pid.

        :param netns: must be None: Docker joins no namespace by path, see `network_join`.
        :raises ExecutorError, SandboxError: the container is removed again.
        """
        live = self._live.get(ref.container_id)
        if netns is not None or live is None:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED, "docker_netns", "Docker can't join a network namespace by its path"
            )
        try:
            live.pid = await shielded(
                self._client.change(lambda api: start_container(api, live.docker_id), "start the container")
            )
            check_here(live.pid, live.docker_id)
            if live.shares is not None:
                # Docker takes no name for it: it is to have the other one's.
                await asyncio.to_thread(set_hostname, live.pid, str(live.spec["hostname"]))
        except BaseException as error:
            await shielded(self._discard(ref))
            if isinstance(error, ExecutorError) and error.reason == "docker_refused":
                raise failed_start(error) from error
            raise
        return live.pid

    async def _discard(self, ref: ContainerRef) -> None:
        """After a failure, which is the error that counts; a sweep finds what the daemon would not remove."""
        try:
            await self.remove(ref)
        except ForgeyardError:
            return

    async def exec(self, ref: ContainerRef, process: bytes, *, deadline: float) -> int:
        """Run one more process from a compiled process.json; its exit code, once Docker knows it.

        :raises SandboxError: UNSUPPORTED_ISOLATION for a process with other rights than PID 1's.
        :raises ExecutorError: SPAWN_FAILED when it could not be started, TIMEOUT (it is then killed), LOST.
        """
        live = self._live.get(ref.container_id)
        first = await self._first_process(ref) if live is None else live.spec["process"]
        request = exec_request(json.loads(process), first)
        return await run_exec(self._client, ref.container_id, request, deadline)

    async def _first_process(self, ref: ContainerRef) -> Mapping[str, Any]:
        """PID 1's `process` of a container that another executor process made."""
        found = await self._client.ask(lambda api: api.inspect_container(ref.container_id), "look at the container")
        process: Mapping[str, Any] = read_effective(int(found["State"]["Pid"]), found["Id"])["process"]
        return process

    async def wait(self, pidfd: int) -> None:
        """Until PID 1 is dead."""
        await wait_readable(pidfd)

    async def kill(self, ref: ContainerRef, pidfd: int) -> None:
        """SIGKILL PID 1 by its pidfd, past the daemon; already dead is what was wanted."""
        send_signal(pidfd, signal.SIGKILL)

    async def remove(self, ref: ContainerRef) -> None:
        """Remove the container with its anonymous volumes, and its staged mounts. Repeating it is no error.

        :raises SandboxError: CLEANUP_FAILED.
        """
        problems = []
        try:
            await shielded(
                self._client.change(lambda api: remove_container(api, ref.container_id), "remove the container")
            )
        except ForgeyardError as error:
            problems.append(str(error))
        try:
            unstage(_staging(ref))
        except OSError as error:
            problems.append(describe(error))
        if problems:
            raise cleanup_failed(f"container {ref.container_id} is left at Docker", problems)
        self._live.pop(ref.container_id, None)

    async def state(self, ref: ContainerRef) -> ContainerState:
        """What the daemon says of it."""
        try:
            found = await self._client.ask(lambda api: api.inspect_container(ref.container_id), "look at the container")
        except NotThere:
            return ContainerState(ref.container_id, ContainerStatus.ABSENT)
        status = _STATUS.get(found["State"]["Status"], ContainerStatus.STOPPED)
        return ContainerState(ref.container_id, status, int(found["State"]["Pid"] or 0))

    async def list(self, directories: tuple[Path, ...]) -> tuple[ContainerState, ...]:
        """The containers of the attempts in `directories`, also those that another executor process made."""
        wanted = {str(directory) for directory in directories}
        entries = await self._client.ask(
            lambda api: api.containers(all=True, filters=label_filter(self._settings)), "list the containers"
        )
        names = [name_of(entry) for entry in entries if entry["Labels"].get(DIRECTORY) in wanted]
        return tuple([await self.state(ContainerRef(name, Path())) for name in sorted(names)])

    def effective_spec(self, ref: ContainerRef) -> Mapping[str, Any]:
        """The spec that Docker's runtime runs, with mount flags from the kernel, in the terms of the bundle.

        :raises ExecutorError: LOST when it can't be read, or the container is not one that was started here.
        """
        live = self._live.get(ref.container_id)
        if live is None or not live.pid:
            raise ExecutorError(
                ExecutorErrorKind.LOST, "effective_spec", "the container was not started by this executor"
            )
        found = read_effective(live.pid, live.docker_id)
        if live.shares is not None:
            found = sharing_in_bundle_terms(found, live.pid, live.shares.pid)
        return in_bundle_terms(found, live.spec, live.staged)

    async def loss(self, ref: ContainerRef) -> ForgeyardError | None:
        """Whoever removes a container takes it along.

        :raises ForgeyardError: the daemon does not say. One that ends kills its containers first.
        """
        return await removed_meanwhile(self.name, lambda: self.state(ref))

    async def sweep(self, alive: Callable[[str], bool]) -> SweepReport:
        """Remove what dead executors left at the daemon. See `sweep.sweep`."""
        report = await sweep(self._client, alive)
        self._skeletons.clear()
        return report

    async def close(self) -> None:
        """Disconnect. Containers live on."""
        await self._client.close()


def _staging(ref: ContainerRef) -> Path:
    return ref.directory / f"docker-{ref.container_id}"
