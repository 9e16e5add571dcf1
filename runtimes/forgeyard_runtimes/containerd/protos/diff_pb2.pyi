from forgeyard_runtimes.containerd.protos import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyRequest(_message.Message):
    __slots__ = ("diff", "mounts")
    DIFF_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    diff: _types_pb2.Descriptor
    mounts: _containers.RepeatedCompositeFieldContainer[_types_pb2.Mount]
    def __init__(self, diff: _Optional[_Union[_types_pb2.Descriptor, _Mapping]] = ..., mounts: _Optional[_Iterable[_Union[_types_pb2.Mount, _Mapping]]] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("applied",)
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    applied: _types_pb2.Descriptor
    def __init__(self, applied: _Optional[_Union[_types_pb2.Descriptor, _Mapping]] = ...) -> None: ...
