import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from forgeyard_api.wire.stubs import capabilities_pb2 as _capabilities_pb2
from forgeyard_api.wire.stubs import job_pb2 as _job_pb2
from forgeyard_api.wire.stubs import result_pb2 as _result_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_STATE_UNSPECIFIED: _ClassVar[AttemptState]
    ATTEMPT_STATE_QUEUED: _ClassVar[AttemptState]
    ATTEMPT_STATE_PREPARING: _ClassVar[AttemptState]
    ATTEMPT_STATE_PREPARED: _ClassVar[AttemptState]
    ATTEMPT_STATE_RUNNING: _ClassVar[AttemptState]
    ATTEMPT_STATE_ENDED: _ClassVar[AttemptState]

class ClientDeath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLIENT_DEATH_UNSPECIFIED: _ClassVar[ClientDeath]
    CLIENT_DEATH_CONTINUE: _ClassVar[ClientDeath]
    CLIENT_DEATH_CANCEL: _ClassVar[ClientDeath]
ATTEMPT_STATE_UNSPECIFIED: AttemptState
ATTEMPT_STATE_QUEUED: AttemptState
ATTEMPT_STATE_PREPARING: AttemptState
ATTEMPT_STATE_PREPARED: AttemptState
ATTEMPT_STATE_RUNNING: AttemptState
ATTEMPT_STATE_ENDED: AttemptState
CLIENT_DEATH_UNSPECIFIED: ClientDeath
CLIENT_DEATH_CONTINUE: ClientDeath
CLIENT_DEATH_CANCEL: ClientDeath

class ErrorDetail(_message.Message):
    __slots__ = ("type", "kind", "reason", "brief", "details", "resolution", "field", "value", "retryable", "failure_class", "sandbox_kind")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_KIND_FIELD_NUMBER: _ClassVar[int]
    type: str
    kind: str
    reason: str
    brief: str
    details: str
    resolution: str
    field: str
    value: str
    retryable: bool
    failure_class: str
    sandbox_kind: str
    def __init__(self, type: _Optional[str] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., brief: _Optional[str] = ..., details: _Optional[str] = ..., resolution: _Optional[str] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., retryable: _Optional[bool] = ..., failure_class: _Optional[str] = ..., sandbox_kind: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("attempt_id", "tenant", "name", "state", "sandbox_id", "runtime", "labels", "created_at", "started_at", "finished_at", "result", "error", "queue_position", "bundle_digest", "notes", "services", "owner_uid")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    tenant: str
    name: str
    state: AttemptState
    sandbox_id: str
    runtime: str
    labels: _containers.ScalarMap[str, str]
    created_at: _timestamp_pb2.Timestamp
    started_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    result: _result_pb2.ExecutionResult
    error: ErrorDetail
    queue_position: int
    bundle_digest: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    services: _containers.RepeatedScalarFieldContainer[str]
    owner_uid: int
    def __init__(self, attempt_id: _Optional[str] = ..., tenant: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[AttemptState, str]] = ..., sandbox_id: _Optional[str] = ..., runtime: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., result: _Optional[_Union[_result_pb2.ExecutionResult, _Mapping]] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., queue_position: _Optional[int] = ..., bundle_digest: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ..., services: _Optional[_Iterable[str]] = ..., owner_uid: _Optional[int] = ...) -> None: ...

class CapabilitiesRequest(_message.Message):
    __slots__ = ("renew", "runtime")
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    renew: bool
    runtime: str
    def __init__(self, renew: _Optional[bool] = ..., runtime: _Optional[str] = ...) -> None: ...

class CapabilitiesResponse(_message.Message):
    __slots__ = ("capabilities", "runtimes", "version", "api_version")
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RUNTIMES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    capabilities: _capabilities_pb2.ExecutorCapabilities
    runtimes: _containers.RepeatedScalarFieldContainer[str]
    version: str
    api_version: str
    def __init__(self, capabilities: _Optional[_Union[_capabilities_pb2.ExecutorCapabilities, _Mapping]] = ..., runtimes: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., api_version: _Optional[str] = ...) -> None: ...

class WatchCapabilitiesRequest(_message.Message):
    __slots__ = ("runtime",)
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    def __init__(self, runtime: _Optional[str] = ...) -> None: ...

class WatchCapabilitiesResponse(_message.Message):
    __slots__ = ("capabilities",)
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    capabilities: _capabilities_pb2.ExecutorCapabilities
    def __init__(self, capabilities: _Optional[_Union[_capabilities_pb2.ExecutorCapabilities, _Mapping]] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("attempt_id", "tenant", "labels", "job", "source", "output", "deadline", "trusted", "runtime", "pull", "on_client_death", "lease", "start", "priority")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ON_CLIENT_DEATH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    tenant: str
    labels: _containers.ScalarMap[str, str]
    job: _job_pb2.Job
    source: str
    output: str
    deadline: _timestamp_pb2.Timestamp
    trusted: bool
    runtime: str
    pull: str
    on_client_death: ClientDeath
    lease: _duration_pb2.Duration
    start: bool
    priority: int
    def __init__(self, attempt_id: _Optional[str] = ..., tenant: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., job: _Optional[_Union[_job_pb2.Job, _Mapping]] = ..., source: _Optional[str] = ..., output: _Optional[str] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., trusted: _Optional[bool] = ..., runtime: _Optional[str] = ..., pull: _Optional[str] = ..., on_client_death: _Optional[_Union[ClientDeath, str]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., start: _Optional[bool] = ..., priority: _Optional[int] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class ExecRequest(_message.Message):
    __slots__ = ("attempt_id", "step")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    step: _job_pb2.Step
    def __init__(self, attempt_id: _Optional[str] = ..., step: _Optional[_Union[_job_pb2.Step, _Mapping]] = ...) -> None: ...

class ExecResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: _result_pb2.StepResult
    def __init__(self, result: _Optional[_Union[_result_pb2.StepResult, _Mapping]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("attempt_id", "until")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    until: AttemptState
    def __init__(self, attempt_id: _Optional[str] = ..., until: _Optional[_Union[AttemptState, str]] = ...) -> None: ...

class WaitResponse(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("attempt_id", "reason", "kill")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    reason: _result_pb2.CancellationReason
    kill: bool
    def __init__(self, attempt_id: _Optional[str] = ..., reason: _Optional[_Union[_result_pb2.CancellationReason, str]] = ..., kill: _Optional[bool] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("attempt_id", "lease")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    lease: _duration_pb2.Duration
    def __init__(self, attempt_id: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("expires_at",)
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class OutputMark(_message.Message):
    __slots__ = ("stdout", "stderr")
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    stdout: int
    stderr: int
    def __init__(self, stdout: _Optional[int] = ..., stderr: _Optional[int] = ...) -> None: ...

class OutputRequest(_message.Message):
    __slots__ = ("attempt_id", "service", "after", "no_follow")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NO_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    service: str
    after: OutputMark
    no_follow: bool
    def __init__(self, attempt_id: _Optional[str] = ..., service: _Optional[str] = ..., after: _Optional[_Union[OutputMark, _Mapping]] = ..., no_follow: _Optional[bool] = ...) -> None: ...

class OutputResponse(_message.Message):
    __slots__ = ("stream", "data", "time", "dropped_before", "mark")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    stream: str
    data: bytes
    time: _timestamp_pb2.Timestamp
    dropped_before: int
    mark: OutputMark
    def __init__(self, stream: _Optional[str] = ..., data: _Optional[bytes] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., dropped_before: _Optional[int] = ..., mark: _Optional[_Union[OutputMark, _Mapping]] = ...) -> None: ...

class ListSandboxesRequest(_message.Message):
    __slots__ = ("states", "labels", "tenant")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[AttemptState]
    labels: _containers.ScalarMap[str, str]
    tenant: str
    def __init__(self, states: _Optional[_Iterable[_Union[AttemptState, str]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListSandboxesResponse(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    def __init__(self, attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("name", "container_id", "sandbox_id", "state", "pid", "started_at", "bundle", "bundle_digest", "rootfs", "image", "address", "cgroup", "usage", "plan_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROOTFS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CGROUP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    container_id: str
    sandbox_id: str
    state: str
    pid: int
    started_at: _timestamp_pb2.Timestamp
    bundle: bytes
    bundle_digest: str
    rootfs: str
    image: str
    address: str
    cgroup: str
    usage: ContainerUsage
    plan_digest: str
    def __init__(self, name: _Optional[str] = ..., container_id: _Optional[str] = ..., sandbox_id: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., bundle: _Optional[bytes] = ..., bundle_digest: _Optional[str] = ..., rootfs: _Optional[str] = ..., image: _Optional[str] = ..., address: _Optional[str] = ..., cgroup: _Optional[str] = ..., usage: _Optional[_Union[ContainerUsage, _Mapping]] = ..., plan_digest: _Optional[str] = ...) -> None: ...

class ContainerUsage(_message.Message):
    __slots__ = ("at", "cpu_nanoseconds", "memory_bytes", "pids", "disk_bytes")
    AT_FIELD_NUMBER: _ClassVar[int]
    CPU_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    cpu_nanoseconds: int
    memory_bytes: int
    pids: int
    disk_bytes: int
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cpu_nanoseconds: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., pids: _Optional[int] = ..., disk_bytes: _Optional[int] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("attempt", "containers")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ...) -> None: ...

class CleanupRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class CleanupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("time", "attempt_id", "kind", "message")
    TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    attempt_id: str
    kind: str
    message: str
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt_id: _Optional[str] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DoctorRequest(_message.Message):
    __slots__ = ("runtime",)
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    def __init__(self, runtime: _Optional[str] = ...) -> None: ...

class DoctorCheck(_message.Message):
    __slots__ = ("name", "works", "details", "cure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    CURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    works: bool
    details: str
    cure: str
    def __init__(self, name: _Optional[str] = ..., works: _Optional[bool] = ..., details: _Optional[str] = ..., cure: _Optional[str] = ...) -> None: ...

class DoctorResponse(_message.Message):
    __slots__ = ("checks",)
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    checks: _containers.RepeatedCompositeFieldContainer[DoctorCheck]
    def __init__(self, checks: _Optional[_Iterable[_Union[DoctorCheck, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("drain",)
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    def __init__(self, drain: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "running", "queued")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    running: int
    queued: int
    def __init__(self, draining: _Optional[bool] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("reference", "platform", "pull")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    reference: str
    platform: str
    pull: str
    def __init__(self, reference: _Optional[str] = ..., platform: _Optional[str] = ..., pull: _Optional[str] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("layer", "done_bytes", "total_bytes", "stage", "image")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    layer: str
    done_bytes: int
    total_bytes: int
    stage: str
    image: Image
    def __init__(self, layer: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., stage: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("pinned", "names", "id", "size_bytes", "platform", "in_use")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    pinned: str
    names: _containers.RepeatedScalarFieldContainer[str]
    id: str
    size_bytes: int
    platform: str
    in_use: bool
    def __init__(self, pinned: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., platform: _Optional[str] = ..., in_use: _Optional[bool] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("reference", "platform")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    reference: str
    platform: str
    def __init__(self, reference: _Optional[str] = ..., platform: _Optional[str] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: str
    def __init__(self, pinned: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("images",)
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class PruneRequest(_message.Message):
    __slots__ = ("unused_for", "keep_bytes")
    UNUSED_FOR_FIELD_NUMBER: _ClassVar[int]
    KEEP_BYTES_FIELD_NUMBER: _ClassVar[int]
    unused_for: _duration_pb2.Duration
    keep_bytes: int
    def __init__(self, unused_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keep_bytes: _Optional[int] = ...) -> None: ...

class PruneResponse(_message.Message):
    __slots__ = ("removed", "freed_bytes")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedScalarFieldContainer[str]
    freed_bytes: int
    def __init__(self, removed: _Optional[_Iterable[str]] = ..., freed_bytes: _Optional[int] = ...) -> None: ...
