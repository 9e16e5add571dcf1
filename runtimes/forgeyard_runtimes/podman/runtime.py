"""The adapter for Podman's service: create, start, inspect; the rest of a job's life needs no call until its removal.

Its container is found by the pidfd of PID 1 and its output comes over the shim's FIFOs, so a job lives on when the
service is restarted, and no call waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from forgeyard_host.children import wait_readable
from forgeyard_host.processes import send_signal
from forgeyard_model.capabilities import ExecutorCapabilities
from forgeyard_model.errors import ExecutorError, ForgeyardError, SandboxError, SandboxErrorKind
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
from forgeyard_runtimes.engine_layers import image_removed
from forgeyard_runtimes.labels import DIRECTORY, label_filter, owner_labels, sandbox_of
from forgeyard_runtimes.podman.capabilities import Service, claims, identify, may_be_rootless, refuse_rootless
from forgeyard_runtimes.podman.client import PodmanClient
from forgeyard_runtimes.podman.effective import Inspected, effective, inspected
from forgeyard_runtimes.podman.endpoint import find_endpoint
from forgeyard_runtimes.podman.errors import NotThere, Refused, not_understood, refuse_systemd_manager, unsupported
from forgeyard_runtimes.podman.execs import exec_now
from forgeyard_runtimes.podman.images import PodmanImages, on_image, refuse_storage
from forgeyard_runtimes.podman.mounts import HostMounts
from forgeyard_runtimes.podman.removal import make_pod, remove_container, remove_empty_pod
from forgeyard_runtimes.podman.settings import PodmanSettings, attempt_of, pod_of
from forgeyard_runtimes.podman.sweep import sweep
from forgeyard_runtimes.podman.translate import DECLARED, DECLARED_STRICTER, Around, translate, uncarried
from forgeyard_runtimes.removed import removed_meanwhile

_POD: Final = "pod"
"""File of a bundle's directory, with the name of the pod that it is in."""
_STATUS: Final = {
    "configured": ContainerStatus.CREATED,
    "created": ContainerStatus.CREATED,
    "initialized": ContainerStatus.CREATED,
    "running": ContainerStatus.RUNNING,
    "paused": ContainerStatus.RUNNING,
    "stopping": ContainerStatus.RUNNING,
    "stopped": ContainerStatus.STOPPED,
    "exited": ContainerStatus.STOPPED,
    "removing": ContainerStatus.STOPPED,
}


class PodmanRuntime:
    """One Podman service. Use `find`, and `close` at the end.

    :ivar network_join: by path; with a new user namespace runc joins the network's first.
    :ivar declared_weaker: what a comparison of the bundle with `effective_spec` may find, see translate.
    """

    network_join: ClassVar[NetworkJoin] = "path"
    network_share: ClassVar[NetworkShare] = "made"
    joins_user_namespace: ClassVar[bool] = False
    literal: ClassVar[bool] = False
    declared_weaker: ClassVar[frozenset[str]] = DECLARED
    declared_stricter: ClassVar[frozenset[str]] = frozenset(DECLARED_STRICTER)

    def __init__(self, client: PodmanClient, service: Service, settings: PodmanSettings) -> None:
        self._client = client
        self._service = service
        self._settings = settings
        self.images = None if settings.own_rootfs else PodmanImages(client, settings)
        self._found: dict[str, Inspected] = {}
        self._hybrid = not Path("/sys/fs/cgroup/cgroup.controllers").exists()

    @classmethod
    async def find(cls, settings: PodmanSettings) -> PodmanRuntime:
        """Connect to the service and ask its version.

        :raises ExecutorError: UNSUPPORTED when it is not there, may not be used, is rootless, too old or too new, or
            podman-py is not installed; TIMEOUT when it does not answer.
        """
        endpoint = find_endpoint(settings.url, os.environ, os.geteuid())
        client = await PodmanClient.connect(endpoint.path, settings.deadlines)
        try:
            if may_be_rootless(client.peer):
                refuse_rootless(await client.call("GET", "info"), client.peer, endpoint)
            service = identify(await client.call("GET", "version"), client.peer)
            if not settings.own_rootfs:
                await refuse_storage(client)
        except BaseException:
            client.close()
            raise
        return cls(client, service, settings)

    @property
    def name(self) -> str:
        """Name and version, and the OCI runtime behind it."""
        return f"podman {self._service.version} ({self._service.runtime})"

    @property
    def address(self) -> str:
        """Where the daemon listens."""
        return f"unix://{self._client.path}"

    def carries(self, bundle: Bundle) -> tuple[str, ...]:
        """The fields of the bundle that a container here would not have, by their names in config.json."""
        return self._uncarried(json.loads(bundle.config))

    async def create(
        self, ref: ContainerRef, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment, stdio: Stdio
    ) -> None:
        """Make the container, and its pod when it is in a network made for it.

        :raises ExecutorError: UNSUPPORTED, naming the fields that are not carried.
        """
        spec = json.loads(bundle.config)
        self._refuse(spec, stdio)
        pod = pod_of(network, ref) if self._settings.pods else None
        around = await asyncio.to_thread(self._lay_down, ref, bundle.config, spec, pod)
        try:
            if pod is not None:
                await make_pod(self._client, pod, owner_labels(self._settings, attempt_of(network, ref)))
            body = translate(spec, around)
            if self.images is not None and rootfs.engine is not None:
                body = await asyncio.to_thread(on_image, body, rootfs.engine, spec)
            await self._create(ref, body, rootfs.engine)
        except Refused as error:
            await self._undo(ref)
            refuse_systemd_manager(error)
            raise _not_made("runtime_create", "Podman could not create the container", error.details) from error
        except ForgeyardError:
            await self._undo(ref)
            raise

    async def _create(self, ref: ContainerRef, body: dict[str, Any], image: EngineImage | None) -> None:
        try:
            await self._client.call("POST", "containers/create", body=body)
        except (NotThere, Refused) as error:
            # Podman has no code of its own for a missing image.
            if self.images is not None and image is not None and not await self.images.has(image):
                raise image_removed("podman", image.identity) from error
            raise
        if self.images is not None and image is not None:
            await self.images.check(ref.container_id, image)

    async def start(self, ref: ContainerRef, *, netns: str | None = None) -> int:
        """Start PID 1. It is in its network by the path in its bundle.

        :raises SandboxError: NAMESPACE_FAILED, with the OCI runtime's own words.
        """
        try:
            await self._client.call("POST", f"containers/{ref.container_id}/start")
            found = await self._inspect(ref)
        except (Refused, NotThere) as error:
            await self._undo(ref)
            raise _not_made("runtime_start", "Podman could not start the container", error.details) from error
        except ExecutorError:
            await self._undo(ref)
            raise
        if found.pid <= 0:
            await self._undo(ref)
            raise _not_made("runtime_start", "the container ended at once", f"it is {found.status}")
        self._found[ref.container_id] = found
        return found.pid

    async def exec(self, ref: ContainerRef, process: bytes, *, deadline: float) -> int:
        """Run a compiled process.json in the container; its exit code. Output is not kept."""
        init = _intended(ref)["process"]
        return await self._client.run(lambda: exec_now(self._client, ref.container_id, init, process, deadline))

    async def wait(self, pidfd: int) -> None:
        """Until PID 1 is dead."""
        await wait_readable(pidfd)

    async def kill(self, ref: ContainerRef, pidfd: int) -> None:
        """SIGKILL PID 1 by its pidfd; already dead is what was wanted."""
        send_signal(pidfd, signal.SIGKILL)

    async def remove(self, ref: ContainerRef) -> None:
        """Remove the container with its anonymous volumes, and its pod when it was the last in it.

        :raises SandboxError: CLEANUP_FAILED, when it is still there.
        """
        self._found.pop(ref.container_id, None)
        await remove_container(self._client, ref.container_id)
        pod = self._pod_of(ref)
        if pod is not None:
            await remove_empty_pod(self._client, pod)

    async def state(self, ref: ContainerRef) -> ContainerState:
        """What Podman knows."""
        try:
            found = await self._inspect(ref)
        except NotThere:
            return ContainerState(ref.container_id, ContainerStatus.ABSENT)
        return ContainerState(ref.container_id, _status(found.status), found.pid)

    async def list(self, directories: tuple[Path, ...]) -> tuple[ContainerState, ...]:
        """The containers of the attempts in `directories`."""
        wanted = {str(directory) for directory in directories}
        entries = await self._client.call(
            "GET", "containers/json", query={"all": "true", "filters": json.dumps(label_filter(self._settings))}
        )
        return tuple(
            ContainerState(entry["Names"][0], _status(entry["State"]), int(entry["Pid"]))
            for entry in entries or ()
            if entry["Labels"].get(DIRECTORY) in wanted
        )

    def effective_spec(self, ref: ContainerRef) -> Mapping[str, Any]:
        """The config.json that Podman gave its OCI runtime, with what PID 1's mounts show."""
        return effective(self._look(ref), _intended(ref))

    def cgroup(self, ref: ContainerRef) -> str:
        """The container's own group, below each hierarchy's root: Podman names it by its id."""
        return self._look(ref).cgroup

    def capabilities(self) -> ExecutorCapabilities:
        """What bundles on this service enforce; the executor verifies each at the gate of every job."""
        return replace(claims(self._service), rootfs="own" if self.images is None else "image")

    async def loss(self, ref: ContainerRef) -> ForgeyardError | None:
        """No daemon holds a container, but whoever removes it takes it along.

        :raises ForgeyardError: the service does not say.
        """
        return await removed_meanwhile(self.name, lambda: self.state(ref))

    async def sweep(self, alive: Callable[[str], bool]) -> SweepReport:
        """Remove what this state directory's sandboxes that are not `alive` left behind."""
        return await sweep(self._client, self._settings, alive)

    async def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _refuse(self, spec: Mapping[str, Any], stdio: Stdio) -> None:
        if stdio.carrier is not Carrier.FIFO:
            raise unsupported("runtime_carrier", f"Podman has no carrier {stdio.carrier}", "use runc")
        missing = self._uncarried(spec)
        if missing:
            raise unsupported(
                "runtime_carries",
                "Podman can't carry everything that the job's bundle says",
                "use the runtime runc, or leave out what needs these",
                details=", ".join(missing),
            )

    def _uncarried(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        return uncarried(spec, HostMounts.read())

    def _lay_down(self, ref: ContainerRef, config: bytes, spec: Mapping[str, Any], pod: str | None) -> Around:
        ref.bundle.mkdir(mode=0o700, exist_ok=True)
        (ref.bundle / "config.json").write_bytes(config)
        if pod is not None:
            (ref.bundle / _POD).write_text(pod)
        seccomp = ref.bundle / "seccomp.json"
        seccomp.write_bytes(json.dumps(spec["linux"].get("seccomp", {})).encode())
        labels = owner_labels(self._settings, sandbox_of(ref.container_id), ref.directory)
        inherited = self._service.inherited
        return Around(ref.container_id, str(seccomp), labels, pod, inherited, hybrid_cgroups=self._hybrid)

    def _pod_of(self, ref: ContainerRef) -> str | None:
        try:
            return (ref.bundle / _POD).read_text()
        except FileNotFoundError:
            return None  # none, or nothing was laid down; what there is has its labels, and the sweep finds it

    async def _undo(self, ref: ContainerRef) -> None:
        """After a failure, of which it may not be known how far it went."""
        try:
            await self.remove(ref)
        except ForgeyardError:
            return  # the failure itself is what matters; the label lets the sweep find what is left

    async def _inspect(self, ref: ContainerRef) -> Inspected:
        return inspected(await self._client.call("GET", f"containers/{ref.container_id}/json"))

    def _look(self, ref: ContainerRef) -> Inspected:
        found = self._found.get(ref.container_id)
        if found is None:
            found = inspected(self._client.call_now("GET", f"containers/{ref.container_id}/json"))
        return found


def _intended(ref: ContainerRef) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = json.loads((ref.bundle / "config.json").read_bytes())
    return spec


def _status(word: str) -> ContainerStatus:
    try:
        return _STATUS[word]
    except KeyError as error:
        raise not_understood("state", word) from error


def _not_made(reason: str, brief: str, details: str) -> SandboxError:
    return SandboxError(SandboxErrorKind.NAMESPACE_FAILED, reason, brief, details=details)
