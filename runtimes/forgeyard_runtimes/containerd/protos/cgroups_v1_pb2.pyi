from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Metrics(_message.Message):
    __slots__ = ("pids", "cpu", "memory", "memory_oom_control")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_OOM_CONTROL_FIELD_NUMBER: _ClassVar[int]
    pids: PidsStat
    cpu: CPUStat
    memory: MemoryStat
    memory_oom_control: MemoryOomControl
    def __init__(self, pids: _Optional[_Union[PidsStat, _Mapping]] = ..., cpu: _Optional[_Union[CPUStat, _Mapping]] = ..., memory: _Optional[_Union[MemoryStat, _Mapping]] = ..., memory_oom_control: _Optional[_Union[MemoryOomControl, _Mapping]] = ...) -> None: ...

class PidsStat(_message.Message):
    __slots__ = ("current", "limit")
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    current: int
    limit: int
    def __init__(self, current: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class CPUStat(_message.Message):
    __slots__ = ("usage", "throttling")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    THROTTLING_FIELD_NUMBER: _ClassVar[int]
    usage: CPUUsage
    throttling: Throttle
    def __init__(self, usage: _Optional[_Union[CPUUsage, _Mapping]] = ..., throttling: _Optional[_Union[Throttle, _Mapping]] = ...) -> None: ...

class CPUUsage(_message.Message):
    __slots__ = ("total", "kernel", "user")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    total: int
    kernel: int
    user: int
    def __init__(self, total: _Optional[int] = ..., kernel: _Optional[int] = ..., user: _Optional[int] = ...) -> None: ...

class Throttle(_message.Message):
    __slots__ = ("periods", "throttled_periods", "throttled_time")
    PERIODS_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_PERIODS_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_TIME_FIELD_NUMBER: _ClassVar[int]
    periods: int
    throttled_periods: int
    throttled_time: int
    def __init__(self, periods: _Optional[int] = ..., throttled_periods: _Optional[int] = ..., throttled_time: _Optional[int] = ...) -> None: ...

class MemoryStat(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: MemoryEntry
    def __init__(self, usage: _Optional[_Union[MemoryEntry, _Mapping]] = ...) -> None: ...

class MemoryEntry(_message.Message):
    __slots__ = ("limit", "usage", "max", "failcnt")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    FAILCNT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    usage: int
    max: int
    failcnt: int
    def __init__(self, limit: _Optional[int] = ..., usage: _Optional[int] = ..., max: _Optional[int] = ..., failcnt: _Optional[int] = ...) -> None: ...

class MemoryOomControl(_message.Message):
    __slots__ = ("oom_kill_disable", "under_oom", "oom_kill")
    OOM_KILL_DISABLE_FIELD_NUMBER: _ClassVar[int]
    UNDER_OOM_FIELD_NUMBER: _ClassVar[int]
    OOM_KILL_FIELD_NUMBER: _ClassVar[int]
    oom_kill_disable: int
    under_oom: int
    oom_kill: int
    def __init__(self, oom_kill_disable: _Optional[int] = ..., under_oom: _Optional[int] = ..., oom_kill: _Optional[int] = ...) -> None: ...
