"""Message classes made from checked-in descriptors, in a pool of their own. Importing this imports protobuf."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import any_pb2, duration_pb2, empty_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_WELL_KNOWN = (any_pb2, duration_pb2, empty_pb2, timestamp_pb2)


class MessagePool:
    """The messages of one set of descriptors.

    :param descriptors: the file that `proto_build` wrote.
    :param prefix: path of the proto files, as their descriptors name them.
    """

    def __init__(self, descriptors: Path, prefix: str) -> None:
        self._pool = DescriptorPool()
        self._prefix = prefix
        for known in _WELL_KNOWN:
            self._pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        files = {file.name: file for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file}
        while files:
            self._add(next(iter(files)), files)

    def _add(self, name: str, files: dict[str, Any]) -> None:
        """A file after those that it imports, which the pool wants to have first."""
        file = files.pop(name)
        for needed in file.dependency:
            if needed in files:
                self._add(needed, files)
        self._pool.Add(file)

    def file(self, name: str) -> SimpleNamespace:
        """The messages and enum values of one proto file, by their names."""
        file = self._pool.FindFileByName(f"{self._prefix}/{name}.proto")
        found: dict[str, Any] = {}
        for message, descriptor in file.message_types_by_name.items():
            found[message] = GetMessageClass(descriptor)
        for enum in file.enum_types_by_name.values():
            found |= {value.name: value.number for value in enum.values}
        return SimpleNamespace(**found)

    def message(self, full_name: str) -> Any:
        """The class of a message, by its name with its package."""
        return GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def service(self, full_name: str) -> Any:
        """The descriptor of a service."""
        return self._pool.FindServiceByName(full_name)
