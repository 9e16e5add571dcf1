from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutionProfile(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_PROFILE_UNSPECIFIED: _ClassVar[ExecutionProfile]
    EXECUTION_PROFILE_DEVELOPMENT: _ClassVar[ExecutionProfile]
    EXECUTION_PROFILE_STANDARD_CI: _ClassVar[ExecutionProfile]
    EXECUTION_PROFILE_RELEASE: _ClassVar[ExecutionProfile]
    EXECUTION_PROFILE_HIGH_ASSURANCE: _ClassVar[ExecutionProfile]

class NetworkMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NETWORK_MODE_UNSPECIFIED: _ClassVar[NetworkMode]
    NETWORK_MODE_DENY: _ClassVar[NetworkMode]
    NETWORK_MODE_FETCH_ONLY: _ClassVar[NetworkMode]
    NETWORK_MODE_RESTRICTED: _ClassVar[NetworkMode]
    NETWORK_MODE_ALLOW: _ClassVar[NetworkMode]
    NETWORK_MODE_HOST: _ClassVar[NetworkMode]
    NETWORK_MODE_CONFLIST: _ClassVar[NetworkMode]

class CacheMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_MODE_UNSPECIFIED: _ClassVar[CacheMode]
    CACHE_MODE_RO: _ClassVar[CacheMode]
    CACHE_MODE_RW: _ClassVar[CacheMode]

class IsolationLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ISOLATION_LEVEL_UNSPECIFIED: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_NONE: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_PROCESS: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_NAMESPACE: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_CONTAINER: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_VIRTUAL_MACHINE: _ClassVar[IsolationLevel]
    ISOLATION_LEVEL_CONFIDENTIAL_VIRTUAL_MACHINE: _ClassVar[IsolationLevel]
EXECUTION_PROFILE_UNSPECIFIED: ExecutionProfile
EXECUTION_PROFILE_DEVELOPMENT: ExecutionProfile
EXECUTION_PROFILE_STANDARD_CI: ExecutionProfile
EXECUTION_PROFILE_RELEASE: ExecutionProfile
EXECUTION_PROFILE_HIGH_ASSURANCE: ExecutionProfile
NETWORK_MODE_UNSPECIFIED: NetworkMode
NETWORK_MODE_DENY: NetworkMode
NETWORK_MODE_FETCH_ONLY: NetworkMode
NETWORK_MODE_RESTRICTED: NetworkMode
NETWORK_MODE_ALLOW: NetworkMode
NETWORK_MODE_HOST: NetworkMode
NETWORK_MODE_CONFLIST: NetworkMode
CACHE_MODE_UNSPECIFIED: CacheMode
CACHE_MODE_RO: CacheMode
CACHE_MODE_RW: CacheMode
ISOLATION_LEVEL_UNSPECIFIED: IsolationLevel
ISOLATION_LEVEL_NONE: IsolationLevel
ISOLATION_LEVEL_PROCESS: IsolationLevel
ISOLATION_LEVEL_NAMESPACE: IsolationLevel
ISOLATION_LEVEL_CONTAINER: IsolationLevel
ISOLATION_LEVEL_VIRTUAL_MACHINE: IsolationLevel
ISOLATION_LEVEL_CONFIDENTIAL_VIRTUAL_MACHINE: IsolationLevel

class StringList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...
