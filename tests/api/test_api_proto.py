"""The API's proto files: every part explained, names as they should be, and nothing that version 1 promised is gone.

tests/api/executor_v1.binpb is what was promised. `python tests/api/test_api_proto.py` adds to it what is new; what is
gone from the proto files stays in it, and fails here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from forgeyard_api.reference_proto import PACKAGE, Comments, described
from forgeyard_api.wire.build_protos import FOLDER
from forgeyard_runtimes.proto_build import DESCRIPTORS

PROMISED = Path(__file__).with_name("executor_v1.binpb")
NOW = FileDescriptorSet.FromString((FOLDER.kept / DESCRIPTORS).read_bytes())
CAMEL, SNAKE = re.compile(r"[A-Z][A-Za-z0-9]*"), re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*_?")
REPEATED = FieldDescriptorProto.LABEL_REPEATED


def ours(found: FileDescriptorSet) -> list[FileDescriptorProto]:
    """The API's own files."""
    return [file for file in found.file if file.package == PACKAGE]


def messages(found: FileDescriptorSet) -> dict[str, DescriptorProto]:
    """By name."""
    return {message.name: message for file in ours(found) for message in file.message_type}


def fields(found: FileDescriptorSet) -> dict[tuple[str, int], tuple[Any, ...]]:
    """What a field's number means in each message: its name, and everything that changes its bytes or its JSON."""
    return {
        (name, field.number): (
            field.name,
            field.type,
            field.type_name,
            field.label == REPEATED,
            field.proto3_optional,
            message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
        )
        for name, message in messages(found).items()
        for field in message.field
    }


def maps(found: FileDescriptorSet) -> dict[str, tuple[Any, ...]]:
    """Keys and values of maps, which are messages inside messages."""
    return {
        f"{name}.{entry.name}": tuple((field.number, field.type, field.type_name) for field in entry.field)
        for name, message in messages(found).items()
        for entry in message.nested_type
    }


def values(found: FileDescriptorSet) -> dict[tuple[str, int], str]:
    """What an enum's number means."""
    enums = [enum for file in ours(found) for enum in file.enum_type]
    return {(enum.name, value.number): value.name for enum in enums for value in enum.value}


def calls(found: FileDescriptorSet) -> dict[str, tuple[Any, ...]]:
    """What each call takes and gives."""
    return {
        f"{service.name}.{method.name}": (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for file in ours(found)
        for service in file.service
        for method in service.method
    }


def broken(before: FileDescriptorSet, after: FileDescriptorSet) -> list[str]:
    """What a client made from `before` would miss in `after`."""
    lost = []
    for part in (fields, maps, values, calls):
        had, has = part(before), part(after)
        lost += [f"{key}: {what} is now {has.get(key)}" for key, what in had.items() if has.get(key) != what]
    return lost


def unexplained(file: FileDescriptorProto) -> Iterator[str]:
    """Parts of a file without a comment. What a call takes and gives is explained where the call is."""
    comments = Comments(file)
    for index, service in enumerate(file.service):
        parts = [((6, index), service.name)]
        parts += [((6, index, 2, number), method.name) for number, method in enumerate(service.method)]
        yield from (f"{service.name} {name}" for path, name in parts if not comments.at(*path))
    for index, message in enumerate(file.message_type):
        if not comments.at(4, index) and not message.name.endswith(("Request", "Response")):
            yield message.name
        for number, field in enumerate(message.field):
            if not comments.at(4, index, 2, number):
                yield f"{message.name}.{field.name}"
    yield from (enum.name for index, enum in enumerate(file.enum_type) if not comments.at(5, index))


def test_every_part_has_a_comment() -> None:
    """Files, services, calls, messages, fields and enums say what they are: the reference is made of it."""
    found = ours(described())
    assert len(found) == 5
    assert [name for file in found for name in unexplained(file)] == []
    assert [file.name for file in found if not Comments(file).at(12)] == []


def test_a_missing_comment_is_seen() -> None:
    """The search is not blind: without its comments a file has nothing explained."""
    file = FileDescriptorProto.FromString(ours(described())[0].SerializeToString())
    file.ClearField("source_code_info")
    assert len(list(unexplained(file))) > len(file.message_type)


def test_names_are_as_they_should_be() -> None:
    """snake_case for fields, CamelCase for types; values carry their enum's name, and the first is UNSPECIFIED."""
    bad = []
    for name, message in messages(NOW).items():
        bad += [name] if not CAMEL.fullmatch(name) else []
        bad += [f"{name}.{field.name}" for field in message.field if not SNAKE.fullmatch(field.name)]
    for file in ours(NOW):
        for enum in file.enum_type:
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
            bad += [value.name for value in enum.value if not value.name.startswith(prefix)]
            bad += [] if (enum.value[0].number, enum.value[0].name) == (0, f"{prefix}UNSPECIFIED") else [enum.name]
    assert bad == []


def test_calls_have_messages_of_their_own() -> None:
    """Each takes NAMERequest and gives NAMEResponse, which no other call has: either can grow alone."""
    for name, (takes, gives, sends, _) in calls(NOW).items():
        method = name.partition(".")[2]
        assert (takes, gives) == (f".{PACKAGE}.{method}Request", f".{PACKAGE}.{method}Response")
        assert not sends
    used = [message for takes, gives, *_ in calls(NOW).values() for message in (takes, gives)]
    assert len(used) == len(set(used)) > 30


def test_numbers_are_used_once_and_fit() -> None:
    """No field's number or name twice in a message, none that was reserved, none in protobuf's own range."""
    for name, message in messages(NOW).items():
        numbers, names = [field.number for field in message.field], [field.name for field in message.field]
        assert len(set(numbers)) == len(numbers), name
        assert len(set(names)) == len(names), name
        assert not {number for span in message.reserved_range for number in range(span.start, span.end)} & {*numbers}
        assert not set(message.reserved_name) & {*names}
        assert all(0 < number < 19000 for number in numbers)


def test_version_1_keeps_its_promises() -> None:
    """No field, value or call of what was promised is gone, renumbered, renamed or of another type."""
    promised = FileDescriptorSet.FromString(PROMISED.read_bytes())
    assert len(fields(promised)) > 300
    assert broken(promised, NOW) == []


def test_what_is_new_is_promised() -> None:
    """The promise has all of today's API: after an addition run `python tests/api/test_api_proto.py`."""
    promised = FileDescriptorSet.FromString(PROMISED.read_bytes())
    for part in (fields, maps, values, calls):
        assert sorted(map(str, part(NOW).keys() - part(promised).keys())) == []


@pytest.mark.parametrize("change", ["gone", "renumbered", "retyped", "renamed", "optional", "value", "call"])
def test_each_break_is_seen(change: str) -> None:
    """Whatever would break a client is found by the comparison."""
    after = FileDescriptorSet.FromString(NOW.SerializeToString())
    field = messages(after)["Attempt"].field[0]
    match change:
        case "gone":
            del messages(after)["Attempt"].field[0]
        case "renumbered":
            field.number = 99
        case "retyped":
            field.type = FieldDescriptorProto.TYPE_BYTES
        case "renamed":
            field.name = "name_of_attempt"
        case "optional":
            field.proto3_optional = True
        case "value":
            next(enum for file in ours(after) for enum in file.enum_type if enum.name == "AttemptState").value[
                1
            ].number = 9
        case "call":
            next(file for file in ours(after) if file.service).service[0].method[0].server_streaming = True
    assert broken(NOW, after) != []
    assert broken(NOW, NOW) == []


if __name__ == "__main__":
    lost = broken(FileDescriptorSet.FromString(PROMISED.read_bytes()), NOW) if PROMISED.exists() else []
    if lost:
        sys.exit("\n".join(["version 1 promised:", *lost]))
    PROMISED.write_bytes(NOW.SerializeToString())
