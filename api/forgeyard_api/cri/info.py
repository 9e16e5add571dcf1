"""What `crictl inspect` shows under `info`: the bundle as it was generated, its digests, limits, mounts and policy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from forgeyard_api.cri.pods import Pod, ShownContainer
from forgeyard_model.errors import ExecutorError, SandboxError

_BIND = ("bind", "rbind")


def spec_of(container: ShownContainer) -> Mapping[str, Any]:
    """The bundle's config.json; empty when it was never seen."""
    if container.live is None or not container.live.bundle.config:
        return {}
    spec: Mapping[str, Any] = json.loads(container.live.bundle.config)
    return spec


def binds(spec: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """What of the host is mounted: the path inside, the path on the host, and whether it is read-only."""
    return [
        (str(mount.get("destination", "")), str(mount.get("source", "")), "ro" in mount.get("options", ()))
        for mount in spec.get("mounts", ())
        if mount.get("type") in _BIND or any(option in _BIND for option in mount.get("options", ()))
    ]


def container_info(pod: Pod, container: ShownContainer, spec: Mapping[str, Any]) -> dict[str, str]:
    """The `info` of a container's status."""
    live, view = container.live, pod.view
    shown: dict[str, Any] = {
        "sandboxID": view.sandbox_id if live is None else live.sandbox_id,
        "pid": 0 if live is None or not container.fresh else live.pid or 0,
        "runtimeType": view.runtime,
        "attempt": _attempt(pod),
    }
    if live is not None:
        shown |= {
            "containerID": live.container_id,
            "digests": {
                "bundle": live.bundle.bundle_digest,
                "plan": live.bundle.plan_digest,
                "rootfs": live.rootfs,
                "image": live.image or "",
            },
            "cgroup": live.cgroup,
            "address": live.address,
            "limits": _limits(spec),
            "policy": policy_of(spec),
            "runtimeSpec": spec,
        }
    return _one(shown)


def pod_info(pod: Pod) -> dict[str, str]:
    """The `info` of a pod's status."""
    job = next(iter(pod.containers), None)
    pid = 0 if job is None or job.live is None or not job.fresh else job.live.pid or 0
    return _one({"pid": pid, "runtimeType": pod.view.runtime, "attempt": _attempt(pod)})


def policy_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the container may, in a few words out of the bundle."""
    process, linux = spec.get("process", {}), spec.get("linux", {})
    namespaces = {entry.get("type"): entry.get("path", "") for entry in linux.get("namespaces", ())}
    return {
        "userNamespace": "user" in namespaces,
        "namespaces": sorted(str(name) for name in namespaces),
        "capabilities": process.get("capabilities", {}).get("bounding", []),
        "noNewPrivileges": process.get("noNewPrivileges", False),
        "seccomp": spec.get("annotations", {}).get("dev.forgeyard.seccomp", ""),
        "rootReadOnly": spec.get("root", {}).get("readonly", False),
        "user": process.get("user", {}),
    }


def _limits(spec: Mapping[str, Any]) -> dict[str, Any]:
    resources = spec.get("linux", {}).get("resources", {})
    return {
        **{name: resources[name] for name in ("memory", "cpu", "pids") if name in resources},
        "rlimits": spec.get("process", {}).get("rlimits", []),
    }


def _attempt(pod: Pod) -> dict[str, Any]:
    view = pod.view
    shown: dict[str, Any] = {
        "id": view.attempt_id,
        "tenant": view.tenant,
        "state": view.state.value,
        "owner": view.owner_uid,
        "queuePosition": view.queue_position,
        "bundleDigest": view.bundle_digest,
        "reserved": dataclasses.asdict(view.reserved),
        "notes": list(view.notes),
    }
    if view.result is not None:
        shown["outcome"] = view.result.outcome.value
        shown["message"] = view.result.message
        shown["provenance"] = dataclasses.asdict(view.result.provenance)
    if view.error is not None:
        error = view.error
        shown["error"] = {"brief": error.brief, "details": error.details, "resolution": error.resolution}
        if isinstance(error, ExecutorError | SandboxError):
            shown["error"] |= {"kind": error.kind.value, "reason": error.reason}
    return shown


def _one(shown: Mapping[str, Any]) -> dict[str, str]:
    """One compact object under one key: some releases of `crictl` splice it into their answer as it is."""
    return {"info": json.dumps(shown, separators=(",", ":"), default=str)}
