"""Attempts as the messages of the Container Runtime Interface. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forgeyard_api.cri.ends import course_of, nanoseconds, pod_state
from forgeyard_api.cri.ids import JOB, shown
from forgeyard_api.cri.info import binds, spec_of
from forgeyard_api.cri.messages import cri
from forgeyard_api.cri.pods import Pod, ShownContainer
from forgeyard_api.serve.attempt_types import AttemptState

HOST_ROOTFS: Final = "host-rootfs"
"""The image of a container whose root is made of the host's programs."""
UNKNOWN: Final = "unknown"
DEFAULT_NAMESPACE: Final = "default"
"""Of attempts without a tenant."""

_PREFIX: Final = "dev.forgeyard."


def pod_message(pod: Pod) -> cri.PodSandbox:
    """As a list has it."""
    return cri.PodSandbox(
        id=pod.pod_id,
        metadata=_metadata(pod),
        state=pod_state(pod.view),
        created_at=nanoseconds(pod.view.created_at),
        labels=labels_of(pod),
        annotations=_annotations(pod),
        runtime_handler=pod.view.runtime,
    )


def pod_status(pod: Pod) -> cri.PodSandboxStatus:
    """In full."""
    message = cri.PodSandboxStatus(
        id=pod.pod_id,
        metadata=_metadata(pod),
        state=pod_state(pod.view),
        created_at=nanoseconds(pod.view.created_at),
        labels=labels_of(pod),
        annotations=_annotations(pod),
        runtime_handler=pod.view.runtime,
    )
    job = next((item for item in pod.containers if item.service == JOB), None)
    if job is not None and job.live is not None:
        message.network.ip = job.live.address if job.fresh else ""
        has = {str(entry.get("type")) for entry in spec_of(job).get("linux", {}).get("namespaces", ())}
        options = message.linux.namespaces.options
        # A job and its services share a network, and nothing else.
        options.network = cri.POD if "network" in has else cri.NODE
        options.pid = cri.CONTAINER if "pid" in has else cri.NODE
        options.ipc = cri.CONTAINER if "ipc" in has else cri.NODE
    return message


def container_message(pod: Pod, container: ShownContainer) -> cri.Container:
    """As a list has it."""
    image, reference = _image(pod, container)
    return cri.Container(
        id=container.container_id,
        pod_sandbox_id=pod.pod_id,
        metadata=cri.ContainerMetadata(name=shown(container.name)),
        image=cri.ImageSpec(image=image, user_specified_image=image),
        image_ref=reference,
        image_id=reference,
        state=course_of(pod, container).state,
        created_at=nanoseconds(pod.view.created_at),
        labels=labels_of(pod, container),
        annotations=_annotations(pod),
    )


def container_status(
    pod: Pod, container: ShownContainer, spec: Mapping[str, Any], log_path: str
) -> cri.ContainerStatus:
    """In full. `spec`: its bundle's; empty when nobody saw it."""
    image, reference = _image(pod, container)
    course = course_of(pod, container)
    return cri.ContainerStatus(
        id=container.container_id,
        metadata=cri.ContainerMetadata(name=shown(container.name)),
        state=course.state,
        created_at=nanoseconds(pod.view.created_at),
        started_at=course.started_at,
        finished_at=course.finished_at,
        exit_code=course.exit_code,
        image=cri.ImageSpec(image=image, user_specified_image=image),
        image_ref=reference,
        image_id=reference,
        reason=course.reason,
        message=course.message,
        labels=labels_of(pod, container),
        annotations=_annotations(pod),
        mounts=[
            cri.Mount(container_path=inside, host_path=outside, readonly=read_only)
            for inside, outside, read_only in binds(spec)
        ],
        log_path=log_path,
        resources=cri.ContainerResources(linux=_resources(spec)),
    )


def stats_message(pod: Pod, container: ShownContainer) -> cri.ContainerStats:
    """What it uses at this moment; nothing of one that does not run, or whose runtime does not answer."""
    message = cri.ContainerStats(
        attributes=cri.ContainerAttributes(
            id=container.container_id,
            metadata=cri.ContainerMetadata(name=shown(container.name)),
            labels=labels_of(pod, container),
            annotations=_annotations(pod),
        )
    )
    usage = container.live.usage if container.live is not None and container.fresh else None
    if usage is None or pod.view.state is AttemptState.ENDED:
        return message
    at = nanoseconds(usage.at)
    if usage.cpu_nanoseconds is not None:
        message.cpu.timestamp = at
        message.cpu.usage_core_nano_seconds.value = usage.cpu_nanoseconds
    if usage.memory_bytes is not None:
        message.memory.timestamp = at
        message.memory.working_set_bytes.value = usage.memory_bytes
        message.memory.usage_bytes.value = usage.memory_bytes
    if usage.disk_bytes is not None:
        message.writable_layer.timestamp = at
        message.writable_layer.used_bytes.value = usage.disk_bytes
    return message


def labels_of(pod: Pod, container: ShownContainer | None = None) -> dict[str, str]:
    """A caller's own labels, and those by which `crictl` names a container's pod; these can't be overridden."""
    labels = {
        **pod.view.labels,
        "io.kubernetes.pod.name": shown(pod.view.attempt_id),
        "io.kubernetes.pod.namespace": _namespace(pod),
        "io.kubernetes.pod.uid": pod.view.sandbox_id or pod.pod_id,
    }
    if container is not None:
        labels["io.kubernetes.container.name"] = shown(container.name)
        labels[f"{_PREFIX}role"] = "service" if container.service else "job"
    return labels


def _annotations(pod: Pod) -> dict[str, str]:
    view = pod.view
    return {
        f"{_PREFIX}attempt": view.attempt_id,
        f"{_PREFIX}tenant": view.tenant,
        f"{_PREFIX}state": view.state.value,
        f"{_PREFIX}sandbox": view.sandbox_id,
        f"{_PREFIX}owner": str(view.owner_uid),
    }


def _metadata(pod: Pod) -> cri.PodSandboxMetadata:
    return cri.PodSandboxMetadata(
        name=shown(pod.view.attempt_id), uid=pod.view.sandbox_id or pod.pod_id, namespace=_namespace(pod)
    )


def _namespace(pod: Pod) -> str:
    return shown(pod.view.tenant) or DEFAULT_NAMESPACE


def _image(pod: Pod, container: ShownContainer) -> tuple[str, str]:
    """What a container's root is made of, by name and by digest. Both have to be said of every container."""
    if container.live is not None:
        return container.live.image or HOST_ROOTFS, container.live.rootfs or UNKNOWN
    result = pod.view.result
    if result is None:
        return UNKNOWN, UNKNOWN
    if not container.service:
        image = result.provenance.image
        return HOST_ROOTFS if image is None else image.pinned, result.provenance.rootfs or UNKNOWN
    service = next((item for item in result.services if item.name == container.service), None)
    if service is None:
        return UNKNOWN, UNKNOWN
    return service.image or HOST_ROOTFS, service.identity or UNKNOWN


def _resources(spec: Mapping[str, Any]) -> cri.LinuxContainerResources:
    resources = spec.get("linux", {}).get("resources", {})
    memory, cpu = resources.get("memory", {}), resources.get("cpu", {})
    message = cri.LinuxContainerResources(
        cpu_period=cpu.get("period", 0),
        cpu_quota=cpu.get("quota", 0),
        cpu_shares=cpu.get("shares", 0),
        memory_limit_in_bytes=memory.get("limit", 0),
        memory_swap_limit_in_bytes=memory.get("swap", 0),
    )
    if "pids" in resources:
        message.unified["pids.max"] = str(resources["pids"].get("limit", 0))
    return message
