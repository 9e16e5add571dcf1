"""Message classes of the services that we call, made from protos/descriptors.binpb. Importing this imports protobuf."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import any_pb2, empty_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

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
    _POOL = DescriptorPool()
    _PREFIX = "forgeyard_runtimes/containerd/protos"

    def _fill() -> None:
        """Every file after those that it imports: a pool of our own, so that no other client's names meet ours."""
        for known in (any_pb2, empty_pb2, timestamp_pb2):
            _POOL.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        ours = FileDescriptorSet.FromString((Path(__file__).parent / "protos/descriptors.binpb").read_bytes())
        for file in ours.file:
            _POOL.Add(file)

    def _file(name: str) -> SimpleNamespace:
        """The messages and enum values of one proto file, by their names."""
        file = _POOL.FindFileByName(f"{_PREFIX}/{name}.proto")
        found: dict[str, Any] = {}
        for message, descriptor in file.message_types_by_name.items():
            found[message] = GetMessageClass(descriptor)
        for enum in file.enum_types_by_name.values():
            found |= {value.name: value.number for value in enum.values}
        return SimpleNamespace(**found)

    _fill()
    cgroups_v1 = _file("cgroups_v1")
    cgroups_v2 = _file("cgroups_v2")
    containers = _file("containers")
    content = _file("content")
    diff = _file("diff")
    events = _file("events")
    images = _file("images")
    leases = _file("leases")
    namespaces = _file("namespaces")
    runc = _file("runc")
    snapshots = _file("snapshots")
    task_events = _file("task_events")
    task_types = _file("task_types")
    tasks = _file("tasks")
    types = _file("types")
    version = _file("version")
    AnyMessage = GetMessageClass(_POOL.FindMessageTypeByName("google.protobuf.Any"))
    Empty = GetMessageClass(_POOL.FindMessageTypeByName("google.protobuf.Empty"))

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
