"""The remote procedures that we call: path, and the classes of question and answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from forgeyard_runtimes.containerd.messages import (
    Empty,
    containers,
    content,
    diff,
    events,
    images,
    leases,
    namespaces,
    snapshots,
    tasks,
    version,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

Q = TypeVar("Q", bound="Message")
A = TypeVar("A", bound="Message")


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, A]):
    """One procedure.

    :param service: in full, with its package.
    """

    service: str
    method: str
    question: type[Q]
    answer: type[A]

    @property
    def path(self) -> str:
        """As HTTP/2 has it."""
        return f"/{self.service}/{self.method}"

    @property
    def shown(self) -> str:
        """Such as Tasks/Create."""
        return f"{self.service.rpartition('.')[2]}/{self.method}"


def _call(service: str, method: str, question: type[Q], answer: type[A]) -> Call[Q, A]:
    return Call(f"containerd.services.{service}", method, question, answer)


_TASKS: Final = "tasks.v1.Tasks"
_CONTAINERS: Final = "containers.v1.Containers"
_SNAPSHOTS: Final = "snapshots.v1.Snapshots"
_CONTENT: Final = "content.v1.Content"
_LEASES: Final = "leases.v1.Leases"
_IMAGES: Final = "images.v1.Images"

VERSION: Final = _call("version.v1.Version", "Version", Empty, version.VersionResponse)
NAMESPACE_CREATE: Final = _call(
    "namespaces.v1.Namespaces", "Create", namespaces.CreateNamespaceRequest, namespaces.CreateNamespaceResponse
)
CONTAINER_CREATE: Final = _call(
    _CONTAINERS, "Create", containers.CreateContainerRequest, containers.CreateContainerResponse
)
CONTAINER_GET: Final = _call(_CONTAINERS, "Get", containers.GetContainerRequest, containers.GetContainerResponse)
CONTAINER_LIST: Final = _call(_CONTAINERS, "List", containers.ListContainersRequest, containers.ListContainersResponse)
CONTAINER_DELETE: Final = _call(_CONTAINERS, "Delete", containers.DeleteContainerRequest, Empty)
TASK_CREATE: Final = _call(_TASKS, "Create", tasks.CreateTaskRequest, tasks.CreateTaskResponse)
TASK_START: Final = _call(_TASKS, "Start", tasks.StartRequest, tasks.StartResponse)
TASK_DELETE: Final = _call(_TASKS, "Delete", tasks.DeleteTaskRequest, tasks.DeleteResponse)
PROCESS_DELETE: Final = _call(_TASKS, "DeleteProcess", tasks.DeleteProcessRequest, tasks.DeleteResponse)
TASK_GET: Final = _call(_TASKS, "Get", tasks.GetRequest, tasks.GetResponse)
TASK_LIST: Final = _call(_TASKS, "List", tasks.ListTasksRequest, tasks.ListTasksResponse)
TASK_KILL: Final = _call(_TASKS, "Kill", tasks.KillRequest, Empty)
TASK_EXEC: Final = _call(_TASKS, "Exec", tasks.ExecProcessRequest, Empty)
TASK_METRICS: Final = _call(_TASKS, "Metrics", tasks.MetricsRequest, tasks.MetricsResponse)
TASK_WAIT: Final = _call(_TASKS, "Wait", tasks.WaitRequest, tasks.WaitResponse)
SNAPSHOT_PREPARE: Final = _call(
    _SNAPSHOTS, "Prepare", snapshots.PrepareSnapshotRequest, snapshots.PrepareSnapshotResponse
)
SNAPSHOT_VIEW: Final = _call(_SNAPSHOTS, "View", snapshots.PrepareSnapshotRequest, snapshots.PrepareSnapshotResponse)
SNAPSHOT_COMMIT: Final = _call(_SNAPSHOTS, "Commit", snapshots.CommitSnapshotRequest, Empty)
SNAPSHOT_REMOVE: Final = _call(_SNAPSHOTS, "Remove", snapshots.RemoveSnapshotRequest, Empty)
DIFF_APPLY: Final = _call("diff.v1.Diff", "Apply", diff.ApplyRequest, diff.ApplyResponse)
IMAGE_CREATE: Final = _call(_IMAGES, "Create", images.CreateImageRequest, images.CreateImageResponse)
IMAGE_DELETE: Final = _call(_IMAGES, "Delete", images.DeleteImageRequest, Empty)
IMAGE_LIST: Final = _call(_IMAGES, "List", images.ListImagesRequest, images.ListImagesResponse)
LEASE_CREATE: Final = _call(_LEASES, "Create", leases.CreateRequest, leases.CreateResponse)
LEASE_DELETE: Final = _call(_LEASES, "Delete", leases.DeleteRequest, Empty)
LEASE_LIST: Final = _call(_LEASES, "List", leases.ListRequest, leases.ListResponse)

# Streams: many answers, and many of both.
SNAPSHOT_LIST: Final = _call(_SNAPSHOTS, "List", snapshots.ListSnapshotsRequest, snapshots.ListSnapshotsResponse)
EVENTS: Final = _call("events.v1.Events", "Subscribe", events.SubscribeRequest, events.Envelope)
CONTENT_WRITE: Final = _call(_CONTENT, "Write", content.WriteContentRequest, content.WriteContentResponse)
