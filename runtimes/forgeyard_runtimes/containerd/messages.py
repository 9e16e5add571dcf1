"""Message classes of the services that we call, made from protos/descriptors.binpb. Importing this imports protobuf."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_runtimes.proto_messages import MessagePool

if TYPE_CHECKING:
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.empty_pb2 import Empty

    from forgeyard_runtimes.containerd.protos import cgroups_v1_pb2 as cgroups_v1
    from forgeyard_runtimes.containerd.protos import cgroups_v2_pb2 as cgroups_v2
    from forgeyard_runtimes.containerd.protos import containers_pb2 as containers
    from forgeyard_runtimes.containerd.protos import content_pb2 as content
    from forgeyard_runtimes.containerd.protos import diff_pb2 as diff
    from forgeyard_runtimes.containerd.protos import events_pb2 as events
    from forgeyard_runtimes.containerd.protos import images_pb2 as images
    from forgeyard_runtimes.containerd.protos import leases_pb2 as leases
    from forgeyard_runtimes.containerd.protos import namespaces_pb2 as namespaces
    from forgeyard_runtimes.containerd.protos import runc_pb2 as runc
    from forgeyard_runtimes.containerd.protos import snapshots_pb2 as snapshots
    from forgeyard_runtimes.containerd.protos import task_events_pb2 as task_events
    from forgeyard_runtimes.containerd.protos import task_types_pb2 as task_types
    from forgeyard_runtimes.containerd.protos import tasks_pb2 as tasks
    from forgeyard_runtimes.containerd.protos import types_pb2 as types
    from forgeyard_runtimes.containerd.protos import version_pb2 as version
else:
    _POOL = MessagePool(Path(__file__).parent / "protos/descriptors.binpb", "forgeyard_runtimes/containerd/protos")
    cgroups_v1 = _POOL.file("cgroups_v1")
    cgroups_v2 = _POOL.file("cgroups_v2")
    containers = _POOL.file("containers")
    content = _POOL.file("content")
    diff = _POOL.file("diff")
    events = _POOL.file("events")
    images = _POOL.file("images")
    leases = _POOL.file("leases")
    namespaces = _POOL.file("namespaces")
    runc = _POOL.file("runc")
    snapshots = _POOL.file("snapshots")
    task_events = _POOL.file("task_events")
    task_types = _POOL.file("task_types")
    tasks = _POOL.file("tasks")
    types = _POOL.file("types")
    version = _POOL.file("version")
    AnyMessage = _POOL.message("google.protobuf.Any")
    Empty = _POOL.message("google.protobuf.Empty")

__all__ = [
    "PROCESS",
    "RUNC_OPTIONS",
    "SPEC",
    "AnyMessage",
    "Empty",
    "any_of",
    "cgroups_v1",
    "cgroups_v2",
    "containers",
    "content",
    "diff",
    "events",
    "images",
    "leases",
    "namespaces",
    "runc",
    "snapshots",
    "task_events",
    "task_types",
    "tasks",
    "types",
    "version",
]

SPEC: Final = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
PROCESS: Final = "types.containerd.io/opencontainers/runtime-spec/1/Process"
RUNC_OPTIONS: Final = "containerd.runc.v1.Options"


def any_of(type_url: str, value: bytes) -> AnyMessage:
    """An Any as containerd writes it: its type names have no prefix and no slash, which `Any.Pack` would add."""
    return AnyMessage(type_url=type_url, value=value)
