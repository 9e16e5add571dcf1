"""The page of docs/ that has every call, message and enum of the API, from the comments of its proto files.

Needs the protobuf compiler of grpcio-tools, as only developers have it: compiled descriptors carry no comments.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_api.wire.build_protos import FOLDER

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        FieldDescriptorProto,
        FileDescriptorProto,
        FileDescriptorSet,
        MethodDescriptorProto,
        ServiceDescriptorProto,
    )

PACKAGE: Final = "forgeyard.executor.v1"
# Numbers of fields in descriptor.proto: a comment is found by the path to what it stands at.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _FILE_SYNTAX = 4, 5, 6, 12
_MESSAGE_FIELD, _SERVICE_METHOD, _ENUM_VALUE = 2, 2, 2
_REPEATED, _MESSAGE = 3, 11
_SCALARS: Final = {1: "double", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}
_INTRO: Final = """\
# API reference

<!-- Made by `python -m forgeyard_api.reference_docs docs` from the proto files: do not edit. -->

The gRPC API of [the server](serve.md), `{package}`. Its proto files are in `api/forgeyard_api/proto`; an
agent's build makes a client of them, as the one in `examples/rust-agent` does. Python programs have
[a client](python-reference.md#forgeyard_apiclient) with the interface of the executor in process.

{about}
"""


def described() -> FileDescriptorSet:
    """The compiled proto files, with their comments.

    :raises RuntimeError: the compiler refused them, and has said so on stderr.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc  # type: ignore[import-untyped]  # has no types; only developers have it

    sources = sorted(str(path) for path in FOLDER.protos.glob("*.proto"))
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "described.binpb")
        paths = [f"-I{FOLDER.root}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
        if protoc.main(["protoc", *paths, "--include_source_info", f"--descriptor_set_out={out}", *sources]) != 0:
            raise RuntimeError("the protobuf compiler refused the proto files")
        return FileDescriptorSet.FromString(out.read_bytes())


class Comments:
    """What a file says at each of its parts."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {tuple(item.path): item.leading_comments for item in file.source_code_info.location}

    def at(self, *path: int) -> str:
        """The comment of that part as plain lines; empty without one."""
        text = self._by_path.get(path, "")
        return "\n".join(line.removeprefix(" ").rstrip() for line in text.splitlines()).strip()


def api_page() -> str:
    """docs/api-reference.md."""
    files = sorted(described().file, key=lambda file: not file.service)
    about = Comments(files[0]).at(_FILE_SYNTAX)
    parts = [_INTRO.format(package=PACKAGE, about=about)]
    for file in files:
        parts += [_service(file, index) for index in range(len(file.service))]
    for title, make in (("Messages", _messages), ("Enums", _enums)):
        parts += [f"## {title}\n", *sorted(part for file in files for part in make(file))]
    return "\n".join(parts).rstrip() + "\n"


def _service(file: FileDescriptorProto, index: int) -> str:
    comments, service = Comments(file), file.service[index]
    lines = [f"## Service {service.name}\n", comments.at(_FILE_SERVICE, index) + "\n"]
    for number, method in enumerate(service.method):
        said = comments.at(_FILE_SERVICE, index, _SERVICE_METHOD, number)
        lines.append(_method(service, method, said))
    return "\n".join(lines)


def _method(service: ServiceDescriptorProto, method: MethodDescriptorProto, said: str) -> str:
    stream = "stream of " if method.server_streaming else ""
    signature = f"{_type_link(method.input_type)} → {stream}{_type_link(method.output_type)}"
    return f"### {service.name}.{method.name}\n\n{signature}\n\n{said}\n"


def _messages(file: FileDescriptorProto) -> Iterator[str]:
    comments = Comments(file)
    for index, message in enumerate(file.message_type):
        said = comments.at(_FILE_MESSAGE, index) or _of_a_call(message.name)
        entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        rows = [
            (
                f"`{field.name}`",
                str(field.number),
                _field_type(field, entries),
                comments.at(_FILE_MESSAGE, index, _MESSAGE_FIELD, number),
            )
            for number, field in enumerate(message.field)
        ]
        yield _part(message.name, said, ("Field", "Number", "Type", ""), rows)


def _of_a_call(name: str) -> str:
    """Messages that a call takes and gives are explained where the call is."""
    call = re.fullmatch(r"(\w+)(Request|Response)", name)
    return "" if call is None else f"What `{call.group(1)}` {'takes' if call.group(2) == 'Request' else 'answers'}."


def _enums(file: FileDescriptorProto) -> Iterator[str]:
    comments = Comments(file)
    for index, enum in enumerate(file.enum_type):
        rows = [
            (f"`{value.name}`", str(value.number), comments.at(_FILE_ENUM, index, _ENUM_VALUE, number))
            for number, value in enumerate(enum.value)
        ]
        yield _part(enum.name, comments.at(_FILE_ENUM, index), ("Value", "Number", ""), rows)


def _part(name: str, said: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"### {name}\n", f"{said}\n"]
    if rows:
        lines += [_row(head), _row(("---",) * len(head)), *map(_row, rows), ""]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _field_type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in entries:
        key, value = entries[name].field
        return f"map of {_field_type(key, {})} to {_field_type(value, {})}"
    shown = _type_link(field.type_name) if field.type_name else _SCALARS[field.type]
    if field.label == _REPEATED:
        return f"repeated {shown}"
    return f"optional {shown}" if field.proto3_optional else shown


def _type_link(full: str) -> str:
    package, _, name = full.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == PACKAGE else name
