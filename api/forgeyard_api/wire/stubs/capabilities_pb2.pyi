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

class ExecutorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_KIND_UNSPECIFIED: _ClassVar[ExecutorKind]
    EXECUTOR_KIND_PROCESS: _ClassVar[ExecutorKind]
    EXECUTOR_KIND_CONTAINER: _ClassVar[ExecutorKind]
    EXECUTOR_KIND_VIRTUAL_MACHINE: _ClassVar[ExecutorKind]
    EXECUTOR_KIND_CONFIDENTIAL: _ClassVar[ExecutorKind]

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_USER_NAMESPACE: _ClassVar[Feature]
    FEATURE_MOUNT_NAMESPACE: _ClassVar[Feature]
    FEATURE_PID_NAMESPACE: _ClassVar[Feature]
    FEATURE_NETWORK_NAMESPACE: _ClassVar[Feature]
    FEATURE_CGROUP_NAMESPACE: _ClassVar[Feature]
    FEATURE_SECCOMP: _ClassVar[Feature]
    FEATURE_NO_NEW_PRIVS: _ClassVar[Feature]
    FEATURE_CAPABILITY_DROP: _ClassVar[Feature]
    FEATURE_KILL_TREE: _ClassVar[Feature]
    FEATURE_CPU_LIMIT: _ClassVar[Feature]
    FEATURE_MEMORY_LIMIT: _ClassVar[Feature]
    FEATURE_SWAP_LIMIT: _ClassVar[Feature]
    FEATURE_PIDS_LIMIT: _ClassVar[Feature]
    FEATURE_DISK_LIMIT: _ClassVar[Feature]
    FEATURE_READ_ONLY_BIND: _ClassVar[Feature]
    FEATURE_TMPFS: _ClassVar[Feature]
    FEATURE_OVERLAY: _ClassVar[Feature]
    FEATURE_IDMAPPED_MOUNT: _ClassVar[Feature]
    FEATURE_REFLINK: _ClassVar[Feature]
    FEATURE_QUOTA: _ClassVar[Feature]
    FEATURE_OOM_EVIDENCE: _ClassVar[Feature]
    FEATURE_NETWORK_DENY: _ClassVar[Feature]
    FEATURE_NETWORK_EGRESS: _ClassVar[Feature]
EXECUTOR_KIND_UNSPECIFIED: ExecutorKind
EXECUTOR_KIND_PROCESS: ExecutorKind
EXECUTOR_KIND_CONTAINER: ExecutorKind
EXECUTOR_KIND_VIRTUAL_MACHINE: ExecutorKind
EXECUTOR_KIND_CONFIDENTIAL: ExecutorKind
FEATURE_UNSPECIFIED: Feature
FEATURE_USER_NAMESPACE: Feature
FEATURE_MOUNT_NAMESPACE: Feature
FEATURE_PID_NAMESPACE: Feature
FEATURE_NETWORK_NAMESPACE: Feature
FEATURE_CGROUP_NAMESPACE: Feature
FEATURE_SECCOMP: Feature
FEATURE_NO_NEW_PRIVS: Feature
FEATURE_CAPABILITY_DROP: Feature
FEATURE_KILL_TREE: Feature
FEATURE_CPU_LIMIT: Feature
FEATURE_MEMORY_LIMIT: Feature
FEATURE_SWAP_LIMIT: Feature
FEATURE_PIDS_LIMIT: Feature
FEATURE_DISK_LIMIT: Feature
FEATURE_READ_ONLY_BIND: Feature
FEATURE_TMPFS: Feature
FEATURE_OVERLAY: Feature
FEATURE_IDMAPPED_MOUNT: Feature
FEATURE_REFLINK: Feature
FEATURE_QUOTA: Feature
FEATURE_OOM_EVIDENCE: Feature
FEATURE_NETWORK_DENY: Feature
FEATURE_NETWORK_EGRESS: Feature

class ResourceControls(_message.Message):
    __slots__ = ("cpu", "memory", "pids", "disk")
    CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    cpu: bool
    memory: bool
    pids: bool
    disk: bool
    def __init__(self, cpu: _Optional[bool] = ..., memory: _Optional[bool] = ..., pids: _Optional[bool] = ..., disk: _Optional[bool] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("feature", "works", "by", "details", "cure", "seen")
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    CURE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    feature: Feature
    works: bool
    by: str
    details: str
    cure: str
    seen: bool
    def __init__(self, feature: _Optional[_Union[Feature, str]] = ..., works: _Optional[bool] = ..., by: _Optional[str] = ..., details: _Optional[str] = ..., cure: _Optional[str] = ..., seen: _Optional[bool] = ...) -> None: ...

class ExecutorCapabilities(_message.Message):
    __slots__ = ("runtime", "isolation_levels", "network_modes", "resource_controls", "user_namespace", "seccomp", "kinds", "cgroup", "controllers", "probes", "probed_at", "rootfs")
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_LEVELS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_MODES_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_CONTROLS_FIELD_NUMBER: _ClassVar[int]
    USER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    CGROUP_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    PROBED_AT_FIELD_NUMBER: _ClassVar[int]
    ROOTFS_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    isolation_levels: _containers.RepeatedScalarFieldContainer[_common_pb2.IsolationLevel]
    network_modes: _containers.RepeatedScalarFieldContainer[_common_pb2.NetworkMode]
    resource_controls: ResourceControls
    user_namespace: bool
    seccomp: bool
    kinds: _containers.RepeatedScalarFieldContainer[ExecutorKind]
    cgroup: str
    controllers: _containers.RepeatedScalarFieldContainer[str]
    probes: _containers.RepeatedCompositeFieldContainer[Probe]
    probed_at: _timestamp_pb2.Timestamp
    rootfs: str
    def __init__(self, runtime: _Optional[str] = ..., isolation_levels: _Optional[_Iterable[_Union[_common_pb2.IsolationLevel, str]]] = ..., network_modes: _Optional[_Iterable[_Union[_common_pb2.NetworkMode, str]]] = ..., resource_controls: _Optional[_Union[ResourceControls, _Mapping]] = ..., user_namespace: _Optional[bool] = ..., seccomp: _Optional[bool] = ..., kinds: _Optional[_Iterable[_Union[ExecutorKind, str]]] = ..., cgroup: _Optional[str] = ..., controllers: _Optional[_Iterable[str]] = ..., probes: _Optional[_Iterable[_Union[Probe, _Mapping]]] = ..., probed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rootfs: _Optional[str] = ...) -> None: ...
