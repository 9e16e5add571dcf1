"""A bundle as containerd's container record: the literal bytes, with what containerd wants to know beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.plan import Bundle, NetworkAttachment
from forgeyard_model.policy import NetworkMode
from forgeyard_runtimes.containerd.messages import RUNC_OPTIONS, SPEC, AnyMessage, any_of, containers, runc
from forgeyard_runtimes.containerd.settings import RUNC, ContainerdSettings
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.labels import owner_labels, sandbox_of


def container_record(ref: ContainerRef, bundle: Bundle, settings: ContainerdSettings) -> containers.Container:
    """What is sent to Containers/Create."""
    labels = owner_labels(settings, sandbox_of(ref.container_id), ref.directory)
    runtime = containers.Container.Runtime(name=settings.handler, options=runtime_options(settings))
    return containers.Container(id=ref.container_id, labels=labels, runtime=runtime, spec=any_of(SPEC, bundle.config))


def runtime_options(settings: ContainerdSettings) -> AnyMessage | None:
    """Settings of the handler; None leaves them to the daemon's configuration."""
    if settings.handler != RUNC:
        return None
    options = runc.Options(binary_name=settings.binary, systemd_cgroup=settings.systemd_cgroup)
    return any_of(RUNC_OPTIONS, options.SerializeToString())


def uncarried(spec: Mapping[str, Any], settings: ContainerdSettings) -> tuple[str, ...]:
    """Fields of a bundle that this way of running it can't honour, by name; a path where the value is the reason."""
    linux, process = spec.get("linux", {}), spec.get("process", {})
    joined = {entry["type"] for entry in linux.get("namespaces", ()) if entry.get("path")}
    found = []
    if process.get("terminal"):
        found.append("process.terminal")
    if not str(spec.get("root", {}).get("path", "")).startswith("/"):
        found.append("root.path (relative)")
    if {"network", "user"} <= joined:
        # runc 1.1 enters the user namespace first, from which no network namespace of the host's may be joined.
        found.append("linux.namespaces.network.path (with a user namespace by path)")
    if (linux.get("cgroupsPath", "").count(":") == 2) != settings.systemd_cgroup and "cgroupsPath" in linux:
        found.append("linux.cgroupsPath (of another cgroup driver)")
    return tuple(found)


def refuse_uncarried(spec: Mapping[str, Any], settings: ContainerdSettings, name: str) -> None:
    """Nothing of a bundle is ever dropped.

    :raises SandboxError: UNSUPPORTED_ISOLATION, naming the fields.
    """
    if fields := uncarried(spec, settings):
        raise SandboxError(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "runtime_cannot_carry",
            f"{name} can't carry {', '.join(fields)}",
            resolution="choose another runtime for this job",
        )


def refuse_inherited_network(spec: Mapping[str, Any], network: NetworkAttachment) -> None:
    """A container without an entry for the network would be in the daemon's own: the host's.

    :raises SandboxError: NETWORK_SETUP_FAILED.
    """
    kinds = {entry["type"] for entry in spec.get("linux", {}).get("namespaces", ())}
    if network.mode is not NetworkMode.HOST and "network" not in kinds:
        raise SandboxError(
            SandboxErrorKind.NETWORK_SETUP_FAILED,
            "network_inherited",
            "the bundle leaves its network to whoever starts the runtime, and here that is the daemon",
            resolution="compile it with a network namespace of its own",
        )


def parsed(bundle: Bundle) -> dict[str, Any]:
    """config.json as a tree."""
    spec: dict[str, Any] = json.loads(bundle.config)
    return spec
