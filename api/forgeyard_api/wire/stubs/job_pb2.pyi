from forgeyard_api.wire.stubs import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Shell(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHELL_UNSPECIFIED: _ClassVar[Shell]
    SHELL_SH: _ClassVar[Shell]
    SHELL_BASH: _ClassVar[Shell]

class When(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHEN_UNSPECIFIED: _ClassVar[When]
    WHEN_ON_SUCCESS: _ClassVar[When]
    WHEN_ON_FAILURE: _ClassVar[When]
    WHEN_ALWAYS: _ClassVar[When]

class SourceMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_MODE_UNSPECIFIED: _ClassVar[SourceMode]
    SOURCE_MODE_RO: _ClassVar[SourceMode]
    SOURCE_MODE_COW: _ClassVar[SourceMode]
    SOURCE_MODE_RW: _ClassVar[SourceMode]

class CapabilityGrant(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_GRANT_UNSPECIFIED: _ClassVar[CapabilityGrant]
    CAPABILITY_GRANT_NONE: _ClassVar[CapabilityGrant]
    CAPABILITY_GRANT_ROOT_IN_USERNS: _ClassVar[CapabilityGrant]

class Condition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDITION_UNSPECIFIED: _ClassVar[Condition]
    CONDITION_STARTED: _ClassVar[Condition]
    CONDITION_HEALTHY: _ClassVar[Condition]
    CONDITION_COMPLETED_SUCCESSFULLY: _ClassVar[Condition]

class OnExit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_EXIT_UNSPECIFIED: _ClassVar[OnExit]
    ON_EXIT_FAIL: _ClassVar[OnExit]
    ON_EXIT_IGNORE: _ClassVar[OnExit]

class ServiceNetwork(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_NETWORK_UNSPECIFIED: _ClassVar[ServiceNetwork]
    SERVICE_NETWORK_OWN: _ClassVar[ServiceNetwork]
    SERVICE_NETWORK_LOCALHOST: _ClassVar[ServiceNetwork]
SHELL_UNSPECIFIED: Shell
SHELL_SH: Shell
SHELL_BASH: Shell
WHEN_UNSPECIFIED: When
WHEN_ON_SUCCESS: When
WHEN_ON_FAILURE: When
WHEN_ALWAYS: When
SOURCE_MODE_UNSPECIFIED: SourceMode
SOURCE_MODE_RO: SourceMode
SOURCE_MODE_COW: SourceMode
SOURCE_MODE_RW: SourceMode
CAPABILITY_GRANT_UNSPECIFIED: CapabilityGrant
CAPABILITY_GRANT_NONE: CapabilityGrant
CAPABILITY_GRANT_ROOT_IN_USERNS: CapabilityGrant
CONDITION_UNSPECIFIED: Condition
CONDITION_STARTED: Condition
CONDITION_HEALTHY: Condition
CONDITION_COMPLETED_SUCCESSFULLY: Condition
ON_EXIT_UNSPECIFIED: OnExit
ON_EXIT_FAIL: OnExit
ON_EXIT_IGNORE: OnExit
SERVICE_NETWORK_UNSPECIFIED: ServiceNetwork
SERVICE_NETWORK_OWN: ServiceNetwork
SERVICE_NETWORK_LOCALHOST: ServiceNetwork

class Step(_message.Message):
    __slots__ = ("argv", "script", "interpreter", "name", "env", "workdir", "stdin", "continue_on_error", "when", "background", "entrypoint")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARGV_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    INTERPRETER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_ON_ERROR_FIELD_NUMBER: _ClassVar[int]
    WHEN_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    ENTRYPOINT_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[str]
    script: str
    interpreter: Shell
    name: str
    env: _containers.ScalarMap[str, str]
    workdir: str
    stdin: bytes
    continue_on_error: bool
    when: When
    background: bool
    entrypoint: bool
    def __init__(self, argv: _Optional[_Iterable[str]] = ..., script: _Optional[str] = ..., interpreter: _Optional[_Union[Shell, str]] = ..., name: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., workdir: _Optional[str] = ..., stdin: _Optional[bytes] = ..., continue_on_error: _Optional[bool] = ..., when: _Optional[_Union[When, str]] = ..., background: _Optional[bool] = ..., entrypoint: _Optional[bool] = ...) -> None: ...

class ResourceLimits(_message.Message):
    __slots__ = ("cpus", "memory", "disk", "pids", "nofile", "shm", "wall_time")
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    NOFILE_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    cpus: float
    memory: int
    disk: int
    pids: int
    nofile: int
    shm: int
    wall_time: float
    def __init__(self, cpus: _Optional[float] = ..., memory: _Optional[int] = ..., disk: _Optional[int] = ..., pids: _Optional[int] = ..., nofile: _Optional[int] = ..., shm: _Optional[int] = ..., wall_time: _Optional[float] = ...) -> None: ...

class NetworkDestination(_message.Message):
    __slots__ = ("host", "cidr", "ports", "protocols")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CIDR_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOLS_FIELD_NUMBER: _ClassVar[int]
    host: str
    cidr: str
    ports: _containers.RepeatedScalarFieldContainer[int]
    protocols: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, host: _Optional[str] = ..., cidr: _Optional[str] = ..., ports: _Optional[_Iterable[int]] = ..., protocols: _Optional[_Iterable[str]] = ...) -> None: ...

class EgressPolicy(_message.Message):
    __slots__ = ("destinations",)
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    destinations: _containers.RepeatedCompositeFieldContainer[NetworkDestination]
    def __init__(self, destinations: _Optional[_Iterable[_Union[NetworkDestination, _Mapping]]] = ...) -> None: ...

class PublishedPort(_message.Message):
    __slots__ = ("service", "port", "host_port")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOST_PORT_FIELD_NUMBER: _ClassVar[int]
    service: str
    port: int
    host_port: int
    def __init__(self, service: _Optional[str] = ..., port: _Optional[int] = ..., host_port: _Optional[int] = ...) -> None: ...

class NetworkPolicy(_message.Message):
    __slots__ = ("mode", "egress", "audit", "conflist", "publish")
    MODE_FIELD_NUMBER: _ClassVar[int]
    EGRESS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    CONFLIST_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.NetworkMode
    egress: EgressPolicy
    audit: bool
    conflist: str
    publish: _containers.RepeatedCompositeFieldContainer[PublishedPort]
    def __init__(self, mode: _Optional[_Union[_common_pb2.NetworkMode, str]] = ..., egress: _Optional[_Union[EgressPolicy, _Mapping]] = ..., audit: _Optional[bool] = ..., conflist: _Optional[str] = ..., publish: _Optional[_Iterable[_Union[PublishedPort, _Mapping]]] = ...) -> None: ...

class ApprovedHostPath(_message.Message):
    __slots__ = ("source", "destination", "read_only")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    read_only: bool
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., read_only: _Optional[bool] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("path", "optional")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    path: str
    optional: bool
    def __init__(self, path: _Optional[str] = ..., optional: _Optional[bool] = ...) -> None: ...

class Timeouts(_message.Message):
    __slots__ = ("prepare", "grace", "finally_", "services")
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    FINALLY__FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    prepare: float
    grace: float
    finally_: float
    services: float
    def __init__(self, prepare: _Optional[float] = ..., grace: _Optional[float] = ..., finally_: _Optional[float] = ..., services: _Optional[float] = ...) -> None: ...

class CacheRequest(_message.Message):
    __slots__ = ("key", "path", "mode")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    key: str
    path: str
    mode: _common_pb2.CacheMode
    def __init__(self, key: _Optional[str] = ..., path: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.CacheMode, str]] = ...) -> None: ...

class ServiceFile(_message.Message):
    __slots__ = ("source", "destination")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ...) -> None: ...

class Tmpfs(_message.Message):
    __slots__ = ("path", "size", "mode")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    mode: int
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ..., mode: _Optional[int] = ...) -> None: ...

class ExecProbe(_message.Message):
    __slots__ = ("argv",)
    ARGV_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, argv: _Optional[_Iterable[str]] = ...) -> None: ...

class TcpProbe(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class HttpProbe(_message.Message):
    __slots__ = ("port", "path", "statuses")
    PORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    port: int
    path: str
    statuses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, port: _Optional[int] = ..., path: _Optional[str] = ..., statuses: _Optional[_Iterable[int]] = ...) -> None: ...

class LogProbe(_message.Message):
    __slots__ = ("text", "regex")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    text: str
    regex: bool
    def __init__(self, text: _Optional[str] = ..., regex: _Optional[bool] = ...) -> None: ...

class HealthCheck(_message.Message):
    __slots__ = ("exec", "tcp", "http", "log", "interval", "timeout", "retries", "start_period")
    EXEC_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    START_PERIOD_FIELD_NUMBER: _ClassVar[int]
    exec: ExecProbe
    tcp: TcpProbe
    http: HttpProbe
    log: LogProbe
    interval: float
    timeout: float
    retries: int
    start_period: float
    def __init__(self, exec: _Optional[_Union[ExecProbe, _Mapping]] = ..., tcp: _Optional[_Union[TcpProbe, _Mapping]] = ..., http: _Optional[_Union[HttpProbe, _Mapping]] = ..., log: _Optional[_Union[LogProbe, _Mapping]] = ..., interval: _Optional[float] = ..., timeout: _Optional[float] = ..., retries: _Optional[int] = ..., start_period: _Optional[float] = ...) -> None: ...

class ServiceSpec(_message.Message):
    __slots__ = ("name", "image", "argv", "aliases", "platform", "entrypoint", "command", "env", "user", "workdir", "files", "tmpfs", "volumes", "limits", "health", "depends_on", "oneshot", "on_exit", "network")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class DependsOnEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Condition
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Condition, str]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    ENTRYPOINT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    TMPFS_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    DEPENDS_ON_FIELD_NUMBER: _ClassVar[int]
    ONESHOT_FIELD_NUMBER: _ClassVar[int]
    ON_EXIT_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    name: str
    image: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    platform: str
    entrypoint: _common_pb2.StringList
    command: _common_pb2.StringList
    env: _containers.ScalarMap[str, str]
    user: str
    workdir: str
    files: _containers.RepeatedCompositeFieldContainer[ServiceFile]
    tmpfs: _containers.RepeatedCompositeFieldContainer[Tmpfs]
    volumes: _containers.RepeatedScalarFieldContainer[str]
    limits: ResourceLimits
    health: HealthCheck
    depends_on: _containers.ScalarMap[str, Condition]
    oneshot: bool
    on_exit: OnExit
    network: ServiceNetwork
    def __init__(self, name: _Optional[str] = ..., image: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., aliases: _Optional[_Iterable[str]] = ..., platform: _Optional[str] = ..., entrypoint: _Optional[_Union[_common_pb2.StringList, _Mapping]] = ..., command: _Optional[_Union[_common_pb2.StringList, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., user: _Optional[str] = ..., workdir: _Optional[str] = ..., files: _Optional[_Iterable[_Union[ServiceFile, _Mapping]]] = ..., tmpfs: _Optional[_Iterable[_Union[Tmpfs, _Mapping]]] = ..., volumes: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[ResourceLimits, _Mapping]] = ..., health: _Optional[_Union[HealthCheck, _Mapping]] = ..., depends_on: _Optional[_Mapping[str, Condition]] = ..., oneshot: _Optional[bool] = ..., on_exit: _Optional[_Union[OnExit, str]] = ..., network: _Optional[_Union[ServiceNetwork, str]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("steps", "rootfs", "image", "name", "profile", "limits", "network", "env", "user", "workdir", "source_mode", "toolchains", "host_paths", "outputs", "capabilities", "timeouts", "merge_output", "output_cap", "platform", "entrypoint", "caches", "services")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROOTFS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MODE_FIELD_NUMBER: _ClassVar[int]
    TOOLCHAINS_FIELD_NUMBER: _ClassVar[int]
    HOST_PATHS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    MERGE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CAP_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    ENTRYPOINT_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    rootfs: str
    image: str
    name: str
    profile: _common_pb2.ExecutionProfile
    limits: ResourceLimits
    network: NetworkPolicy
    env: _containers.ScalarMap[str, str]
    user: str
    workdir: str
    source_mode: SourceMode
    toolchains: _containers.RepeatedCompositeFieldContainer[ApprovedHostPath]
    host_paths: _containers.RepeatedCompositeFieldContainer[ApprovedHostPath]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    capabilities: CapabilityGrant
    timeouts: Timeouts
    merge_output: bool
    output_cap: int
    platform: str
    entrypoint: _common_pb2.StringList
    caches: _containers.RepeatedCompositeFieldContainer[CacheRequest]
    services: _containers.RepeatedCompositeFieldContainer[ServiceSpec]
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., rootfs: _Optional[str] = ..., image: _Optional[str] = ..., name: _Optional[str] = ..., profile: _Optional[_Union[_common_pb2.ExecutionProfile, str]] = ..., limits: _Optional[_Union[ResourceLimits, _Mapping]] = ..., network: _Optional[_Union[NetworkPolicy, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., user: _Optional[str] = ..., workdir: _Optional[str] = ..., source_mode: _Optional[_Union[SourceMode, str]] = ..., toolchains: _Optional[_Iterable[_Union[ApprovedHostPath, _Mapping]]] = ..., host_paths: _Optional[_Iterable[_Union[ApprovedHostPath, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., capabilities: _Optional[_Union[CapabilityGrant, str]] = ..., timeouts: _Optional[_Union[Timeouts, _Mapping]] = ..., merge_output: _Optional[bool] = ..., output_cap: _Optional[int] = ..., platform: _Optional[str] = ..., entrypoint: _Optional[_Union[_common_pb2.StringList, _Mapping]] = ..., caches: _Optional[_Iterable[_Union[CacheRequest, _Mapping]]] = ..., services: _Optional[_Iterable[_Union[ServiceSpec, _Mapping]]] = ...) -> None: ...
