import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from forgeyard_api.wire.stubs import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_OUTCOME_UNSPECIFIED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_SUCCEEDED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_FAILED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_CANCELLED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_TIMED_OUT: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_OUT_OF_MEMORY: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_RESOURCE_EXCEEDED: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_SANDBOX_VIOLATION: _ClassVar[ExecutionOutcome]
    EXECUTION_OUTCOME_INFRASTRUCTURE_FAILURE: _ClassVar[ExecutionOutcome]

class FailureClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CLASS_UNSPECIFIED: _ClassVar[FailureClass]
    FAILURE_CLASS_NONE: _ClassVar[FailureClass]
    FAILURE_CLASS_WORKLOAD: _ClassVar[FailureClass]
    FAILURE_CLASS_TIMEOUT: _ClassVar[FailureClass]
    FAILURE_CLASS_CANCELLED: _ClassVar[FailureClass]
    FAILURE_CLASS_RESOURCE: _ClassVar[FailureClass]
    FAILURE_CLASS_SECURITY: _ClassVar[FailureClass]
    FAILURE_CLASS_CONFIGURATION: _ClassVar[FailureClass]
    FAILURE_CLASS_INFRASTRUCTURE: _ClassVar[FailureClass]

class EndCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_CAUSE_UNSPECIFIED: _ClassVar[EndCause]
    END_CAUSE_EXITED: _ClassVar[EndCause]
    END_CAUSE_TIMED_OUT: _ClassVar[EndCause]
    END_CAUSE_CANCELLED: _ClassVar[EndCause]
    END_CAUSE_SANDBOX_DIED: _ClassVar[EndCause]
    END_CAUSE_INFRASTRUCTURE: _ClassVar[EndCause]
    END_CAUSE_SERVICE_FAILED: _ClassVar[EndCause]

class CancellationReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCELLATION_REASON_UNSPECIFIED: _ClassVar[CancellationReason]
    CANCELLATION_REASON_USER: _ClassVar[CancellationReason]
    CANCELLATION_REASON_RUN_CANCELLED: _ClassVar[CancellationReason]
    CANCELLATION_REASON_SUPERSEDED: _ClassVar[CancellationReason]
    CANCELLATION_REASON_FAIL_FAST: _ClassVar[CancellationReason]
    CANCELLATION_REASON_LEASE_EXPIRED: _ClassVar[CancellationReason]
    CANCELLATION_REASON_RUNNER_DRAIN: _ClassVar[CancellationReason]
    CANCELLATION_REASON_SHUTDOWN: _ClassVar[CancellationReason]

class ServiceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_STATE_UNSPECIFIED: _ClassVar[ServiceState]
    SERVICE_STATE_READY: _ClassVar[ServiceState]
    SERVICE_STATE_COMPLETED: _ClassVar[ServiceState]
    SERVICE_STATE_UNPROVEN: _ClassVar[ServiceState]
    SERVICE_STATE_FAILED: _ClassVar[ServiceState]
    SERVICE_STATE_DIED: _ClassVar[ServiceState]
    SERVICE_STATE_STOPPED: _ClassVar[ServiceState]
    SERVICE_STATE_NOT_STARTED: _ClassVar[ServiceState]

class DestinationVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DESTINATION_VERDICT_UNSPECIFIED: _ClassVar[DestinationVerdict]
    DESTINATION_VERDICT_ALLOWED: _ClassVar[DestinationVerdict]
    DESTINATION_VERDICT_REFUSED: _ClassVar[DestinationVerdict]
EXECUTION_OUTCOME_UNSPECIFIED: ExecutionOutcome
EXECUTION_OUTCOME_SUCCEEDED: ExecutionOutcome
EXECUTION_OUTCOME_FAILED: ExecutionOutcome
EXECUTION_OUTCOME_CANCELLED: ExecutionOutcome
EXECUTION_OUTCOME_TIMED_OUT: ExecutionOutcome
EXECUTION_OUTCOME_OUT_OF_MEMORY: ExecutionOutcome
EXECUTION_OUTCOME_RESOURCE_EXCEEDED: ExecutionOutcome
EXECUTION_OUTCOME_SANDBOX_VIOLATION: ExecutionOutcome
EXECUTION_OUTCOME_INFRASTRUCTURE_FAILURE: ExecutionOutcome
FAILURE_CLASS_UNSPECIFIED: FailureClass
FAILURE_CLASS_NONE: FailureClass
FAILURE_CLASS_WORKLOAD: FailureClass
FAILURE_CLASS_TIMEOUT: FailureClass
FAILURE_CLASS_CANCELLED: FailureClass
FAILURE_CLASS_RESOURCE: FailureClass
FAILURE_CLASS_SECURITY: FailureClass
FAILURE_CLASS_CONFIGURATION: FailureClass
FAILURE_CLASS_INFRASTRUCTURE: FailureClass
END_CAUSE_UNSPECIFIED: EndCause
END_CAUSE_EXITED: EndCause
END_CAUSE_TIMED_OUT: EndCause
END_CAUSE_CANCELLED: EndCause
END_CAUSE_SANDBOX_DIED: EndCause
END_CAUSE_INFRASTRUCTURE: EndCause
END_CAUSE_SERVICE_FAILED: EndCause
CANCELLATION_REASON_UNSPECIFIED: CancellationReason
CANCELLATION_REASON_USER: CancellationReason
CANCELLATION_REASON_RUN_CANCELLED: CancellationReason
CANCELLATION_REASON_SUPERSEDED: CancellationReason
CANCELLATION_REASON_FAIL_FAST: CancellationReason
CANCELLATION_REASON_LEASE_EXPIRED: CancellationReason
CANCELLATION_REASON_RUNNER_DRAIN: CancellationReason
CANCELLATION_REASON_SHUTDOWN: CancellationReason
SERVICE_STATE_UNSPECIFIED: ServiceState
SERVICE_STATE_READY: ServiceState
SERVICE_STATE_COMPLETED: ServiceState
SERVICE_STATE_UNPROVEN: ServiceState
SERVICE_STATE_FAILED: ServiceState
SERVICE_STATE_DIED: ServiceState
SERVICE_STATE_STOPPED: ServiceState
SERVICE_STATE_NOT_STARTED: ServiceState
DESTINATION_VERDICT_UNSPECIFIED: DestinationVerdict
DESTINATION_VERDICT_ALLOWED: DestinationVerdict
DESTINATION_VERDICT_REFUSED: DestinationVerdict

class Phase(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProcessExit(_message.Message):
    __slots__ = ("raw", "code", "signal", "core_dumped")
    RAW_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    CORE_DUMPED_FIELD_NUMBER: _ClassVar[int]
    raw: int
    code: int
    signal: int
    core_dumped: bool
    def __init__(self, raw: _Optional[int] = ..., code: _Optional[int] = ..., signal: _Optional[int] = ..., core_dumped: _Optional[bool] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("name", "exit", "started_at", "duration", "skipped", "masked", "error", "exec_code", "leftovers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXEC_CODE_FIELD_NUMBER: _ClassVar[int]
    LEFTOVERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    exit: ProcessExit
    started_at: _timestamp_pb2.Timestamp
    duration: float
    skipped: bool
    masked: bool
    error: str
    exec_code: int
    leftovers: int
    def __init__(self, name: _Optional[str] = ..., exit: _Optional[_Union[ProcessExit, _Mapping]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., duration: _Optional[float] = ..., skipped: _Optional[bool] = ..., masked: _Optional[bool] = ..., error: _Optional[str] = ..., exec_code: _Optional[int] = ..., leftovers: _Optional[int] = ...) -> None: ...

class MemoryEvidence(_message.Message):
    __slots__ = ("limit", "peak", "oom_kills", "tmpfs")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    OOM_KILLS_FIELD_NUMBER: _ClassVar[int]
    TMPFS_FIELD_NUMBER: _ClassVar[int]
    limit: int
    peak: int
    oom_kills: int
    tmpfs: int
    def __init__(self, limit: _Optional[int] = ..., peak: _Optional[int] = ..., oom_kills: _Optional[int] = ..., tmpfs: _Optional[int] = ...) -> None: ...

class PidsEvidence(_message.Message):
    __slots__ = ("limit", "peak", "refused")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    limit: int
    peak: int
    refused: int
    def __init__(self, limit: _Optional[int] = ..., peak: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class DiskEvidence(_message.Message):
    __slots__ = ("limit", "peak", "full", "out_of_files", "watched")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_FILES_FIELD_NUMBER: _ClassVar[int]
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    limit: int
    peak: int
    full: bool
    out_of_files: bool
    watched: bool
    def __init__(self, limit: _Optional[int] = ..., peak: _Optional[int] = ..., full: _Optional[bool] = ..., out_of_files: _Optional[bool] = ..., watched: _Optional[bool] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("memory", "pids", "disk")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    memory: MemoryEvidence
    pids: PidsEvidence
    disk: DiskEvidence
    def __init__(self, memory: _Optional[_Union[MemoryEvidence, _Mapping]] = ..., pids: _Optional[_Union[PidsEvidence, _Mapping]] = ..., disk: _Optional[_Union[DiskEvidence, _Mapping]] = ...) -> None: ...

class ResourceUsage(_message.Message):
    __slots__ = ("cpu_time", "peak_memory", "disk_written", "io_read", "io_written")
    CPU_TIME_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    IO_READ_FIELD_NUMBER: _ClassVar[int]
    IO_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    cpu_time: float
    peak_memory: int
    disk_written: int
    io_read: int
    io_written: int
    def __init__(self, cpu_time: _Optional[float] = ..., peak_memory: _Optional[int] = ..., disk_written: _Optional[int] = ..., io_read: _Optional[int] = ..., io_written: _Optional[int] = ...) -> None: ...

class OutputSummary(_message.Message):
    __slots__ = ("stdout_bytes", "stderr_bytes", "log_truncated", "dropped_bytes", "spool_error")
    STDOUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STDERR_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPOOL_ERROR_FIELD_NUMBER: _ClassVar[int]
    stdout_bytes: int
    stderr_bytes: int
    log_truncated: bool
    dropped_bytes: int
    spool_error: str
    def __init__(self, stdout_bytes: _Optional[int] = ..., stderr_bytes: _Optional[int] = ..., log_truncated: _Optional[bool] = ..., dropped_bytes: _Optional[int] = ..., spool_error: _Optional[str] = ...) -> None: ...

class CollectedOutput(_message.Message):
    __slots__ = ("path", "files", "bytes", "missing", "optional", "skipped")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    path: str
    files: int
    bytes: int
    missing: bool
    optional: bool
    skipped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, path: _Optional[str] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., missing: _Optional[bool] = ..., optional: _Optional[bool] = ..., skipped: _Optional[_Iterable[str]] = ...) -> None: ...

class ImageUsed(_message.Message):
    __slots__ = ("asked", "pinned", "platform", "source")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    asked: str
    pinned: str
    platform: str
    source: str
    def __init__(self, asked: _Optional[str] = ..., pinned: _Optional[str] = ..., platform: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("profile", "isolation", "user_namespace", "network", "seccomp", "runtime", "rootfs", "plan_digest", "bundle_digest", "impure", "uid_base", "image", "stricter", "engine_image")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    USER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    ROOTFS_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IMPURE_FIELD_NUMBER: _ClassVar[int]
    UID_BASE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    STRICTER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IMAGE_FIELD_NUMBER: _ClassVar[int]
    profile: _common_pb2.ExecutionProfile
    isolation: _common_pb2.IsolationLevel
    user_namespace: bool
    network: _common_pb2.NetworkMode
    seccomp: str
    runtime: str
    rootfs: str
    plan_digest: str
    bundle_digest: str
    impure: _containers.RepeatedScalarFieldContainer[str]
    uid_base: int
    image: ImageUsed
    stricter: _containers.RepeatedScalarFieldContainer[str]
    engine_image: str
    def __init__(self, profile: _Optional[_Union[_common_pb2.ExecutionProfile, str]] = ..., isolation: _Optional[_Union[_common_pb2.IsolationLevel, str]] = ..., user_namespace: _Optional[bool] = ..., network: _Optional[_Union[_common_pb2.NetworkMode, str]] = ..., seccomp: _Optional[str] = ..., runtime: _Optional[str] = ..., rootfs: _Optional[str] = ..., plan_digest: _Optional[str] = ..., bundle_digest: _Optional[str] = ..., impure: _Optional[_Iterable[str]] = ..., uid_base: _Optional[int] = ..., image: _Optional[_Union[ImageUsed, _Mapping]] = ..., stricter: _Optional[_Iterable[str]] = ..., engine_image: _Optional[str] = ...) -> None: ...

class CacheReport(_message.Message):
    __slots__ = ("key", "path", "mode", "hit", "saved", "why", "bytes", "notes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    key: str
    path: str
    mode: _common_pb2.CacheMode
    hit: bool
    saved: bool
    why: str
    bytes: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., path: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.CacheMode, str]] = ..., hit: _Optional[bool] = ..., saved: _Optional[bool] = ..., why: _Optional[str] = ..., bytes: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ServiceResult(_message.Message):
    __slots__ = ("name", "state", "image", "identity", "readiness", "ports_open", "ports_shut", "ready_after", "exit", "oom", "log_tail", "last_probe", "message", "address", "evidence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    PORTS_OPEN_FIELD_NUMBER: _ClassVar[int]
    PORTS_SHUT_FIELD_NUMBER: _ClassVar[int]
    READY_AFTER_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    OOM_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    LAST_PROBE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ServiceState
    image: str
    identity: str
    readiness: str
    ports_open: _containers.RepeatedScalarFieldContainer[int]
    ports_shut: _containers.RepeatedScalarFieldContainer[int]
    ready_after: float
    exit: ProcessExit
    oom: bool
    log_tail: _containers.RepeatedScalarFieldContainer[str]
    last_probe: str
    message: str
    address: str
    evidence: Evidence
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ServiceState, str]] = ..., image: _Optional[str] = ..., identity: _Optional[str] = ..., readiness: _Optional[str] = ..., ports_open: _Optional[_Iterable[int]] = ..., ports_shut: _Optional[_Iterable[int]] = ..., ready_after: _Optional[float] = ..., exit: _Optional[_Union[ProcessExit, _Mapping]] = ..., oom: _Optional[bool] = ..., log_tail: _Optional[_Iterable[str]] = ..., last_probe: _Optional[str] = ..., message: _Optional[str] = ..., address: _Optional[str] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ...) -> None: ...

class DestinationRecord(_message.Message):
    __slots__ = ("name", "address", "port", "protocol", "verdict", "count", "bytes_sent", "bytes_received", "names")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    port: int
    protocol: str
    verdict: DestinationVerdict
    count: int
    bytes_sent: int
    bytes_received: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., port: _Optional[int] = ..., protocol: _Optional[str] = ..., verdict: _Optional[_Union[DestinationVerdict, str]] = ..., count: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class NameRecord(_message.Message):
    __slots__ = ("name", "type", "verdict", "addresses", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    verdict: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    count: int
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., verdict: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ...) -> None: ...

class FetchRecord(_message.Message):
    __slots__ = ("host", "port", "address", "verdict", "reason", "count", "bytes_sent", "bytes_received")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    address: str
    verdict: str
    reason: str
    count: int
    bytes_sent: int
    bytes_received: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., address: _Optional[str] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ...) -> None: ...

class NetworkEvidence(_message.Message):
    __slots__ = ("mode", "backend", "conflist", "audit", "destinations", "dns", "fetches", "truncated", "notes")
    MODE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    CONFLIST_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    DNS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.NetworkMode
    backend: str
    conflist: str
    audit: bool
    destinations: _containers.RepeatedCompositeFieldContainer[DestinationRecord]
    dns: _containers.RepeatedCompositeFieldContainer[NameRecord]
    fetches: _containers.RepeatedCompositeFieldContainer[FetchRecord]
    truncated: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mode: _Optional[_Union[_common_pb2.NetworkMode, str]] = ..., backend: _Optional[str] = ..., conflist: _Optional[str] = ..., audit: _Optional[bool] = ..., destinations: _Optional[_Iterable[_Union[DestinationRecord, _Mapping]]] = ..., dns: _Optional[_Iterable[_Union[NameRecord, _Mapping]]] = ..., fetches: _Optional[_Iterable[_Union[FetchRecord, _Mapping]]] = ..., truncated: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecutionResult(_message.Message):
    __slots__ = ("sandbox_id", "attempt_id", "name", "outcome", "failure_class", "exit_code", "message", "end_cause", "cancellation", "exit", "steps", "started_at", "finished_at", "evidence", "usage", "output", "outputs", "provenance", "startup", "notes", "caches", "services", "network")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    END_CAUSE_FIELD_NUMBER: _ClassVar[int]
    CANCELLATION_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    attempt_id: str
    name: str
    outcome: ExecutionOutcome
    failure_class: FailureClass
    exit_code: int
    message: str
    end_cause: EndCause
    cancellation: CancellationReason
    exit: ProcessExit
    steps: _containers.RepeatedCompositeFieldContainer[StepResult]
    started_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    evidence: Evidence
    usage: ResourceUsage
    output: OutputSummary
    outputs: _containers.RepeatedCompositeFieldContainer[CollectedOutput]
    provenance: Provenance
    startup: _containers.RepeatedCompositeFieldContainer[Phase]
    notes: _containers.RepeatedScalarFieldContainer[str]
    caches: _containers.RepeatedCompositeFieldContainer[CacheReport]
    services: _containers.RepeatedCompositeFieldContainer[ServiceResult]
    network: NetworkEvidence
    def __init__(self, sandbox_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., name: _Optional[str] = ..., outcome: _Optional[_Union[ExecutionOutcome, str]] = ..., failure_class: _Optional[_Union[FailureClass, str]] = ..., exit_code: _Optional[int] = ..., message: _Optional[str] = ..., end_cause: _Optional[_Union[EndCause, str]] = ..., cancellation: _Optional[_Union[CancellationReason, str]] = ..., exit: _Optional[_Union[ProcessExit, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., usage: _Optional[_Union[ResourceUsage, _Mapping]] = ..., output: _Optional[_Union[OutputSummary, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[CollectedOutput, _Mapping]]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., startup: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., caches: _Optional[_Iterable[_Union[CacheReport, _Mapping]]] = ..., services: _Optional[_Iterable[_Union[ServiceResult, _Mapping]]] = ..., network: _Optional[_Union[NetworkEvidence, _Mapping]] = ...) -> None: ...
