from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Options(_message.Message):
    __slots__ = ("binary_name", "root", "systemd_cgroup")
    BINARY_NAME_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SYSTEMD_CGROUP_FIELD_NUMBER: _ClassVar[int]
    binary_name: str
    root: str
    systemd_cgroup: bool
    def __init__(self, binary_name: _Optional[str] = ..., root: _Optional[str] = ..., systemd_cgroup: _Optional[bool] = ...) -> None: ...
