"""The model's types as messages and back, field by field by their names.

A message has the fields of its dataclass; a test holds them together. An absent field takes the dataclass's default,
which is how an older client and a newer server understand one another.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from forgeyard_model.errors import InvalidRequest

T = TypeVar("T")

_UNSPECIFIED: Final = 0
_WORD: Final = re.compile(r"(?<!^)(?=[A-Z])")


class _Codec(NamedTuple):
    """How one field is written into a message and read from it. `read` returns _ABSENT for a default."""

    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


_ABSENT: Final = object()
_KNOWN: Final[dict[Any, dict[str, _Codec]]] = {}
"""By dataclass, made when first used."""


def to_message(value: Any, message: Any) -> Any:
    """Write the dataclass `value` into the empty `message`, and return that."""
    for name, codec in _codecs(type(value)).items():
        found = getattr(value, name)
        if found is not None:
            codec.write(message, found)
    return message


def from_message(kind: type[T], message: Any) -> T:
    """The dataclass `kind` that `message` says.

    :raises InvalidRequest: for an enum value this version does not know, or a value the dataclass refuses.
    """
    found = {name: codec.read(message) for name, codec in _codecs(kind).items()}
    given = {name: value for name, value in found.items() if value is not _ABSENT}
    return _make(kind, given)


def _make(kind: type[T], given: dict[str, Any]) -> T:
    # Step alone takes its arguments as a call would have them.
    argv = given.pop("argv", ()) if kind.__name__ == "Step" else ()
    missing = [item.name for item in fields(kind) if item.init and _required(item) and item.name not in given]  # type: ignore[arg-type]  # dataclasses alone come here
    missing = [] if kind.__name__ == "Step" else missing
    if missing:
        raise InvalidRequest(missing[0], None, f"{kind.__name__} needs it: give it a value")
    return kind(*argv, **given)


def _required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _codecs(kind: Any) -> dict[str, _Codec]:
    if kind not in _KNOWN:
        hints = get_type_hints(kind)
        _KNOWN[kind] = {
            item.name: _codec(item.name, hints[item.name], required=_required(item)) for item in fields(kind)
        }
    return _KNOWN[kind]


def _codec(name: str, hint: Any, *, required: bool) -> _Codec:
    hint, optional = _without_none(hint)
    codec = _codec_of(name, hint, optional=optional, required=required)
    return _Codec(codec.write, partial(_or_none, codec.read)) if required and optional else codec


def _or_none(read: Callable[[Any], Any], message: Any) -> Any:
    """What has no default, and may be None, is None where it is absent."""
    value = read(message)
    return None if value is _ABSENT else value


def _codec_of(name: str, hint: Any, *, optional: bool, required: bool) -> _Codec:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(name, args)
    if origin is tuple and optional:
        return _Codec(partial(_write_strings, name), partial(_read_strings, name))
    if origin in (tuple, frozenset, Sequence):
        return _Codec(partial(_write_many, name, args[0]), partial(_read_many, name, args[0], origin))
    if origin is Mapping:
        return _mapping(name, args[1])
    return _single(name, hint, required=required)


def _single(name: str, hint: Any, *, required: bool) -> _Codec:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Codec(partial(_write_enum, name), partial(_read_enum, name, hint))
    if is_dataclass(hint) or hint is datetime:
        return _Codec(partial(_write_part, name), partial(_read_part, name, hint))
    return _Codec(partial(_write_plain, name), partial(_read_plain, name, required))


def _without_none(hint: Any) -> tuple[Any, bool]:
    args = get_args(hint)
    if get_origin(hint) not in (Union, types.UnionType) or type(None) not in args:
        return hint, False
    rest = tuple(arg for arg in args if arg is not type(None))
    return (rest[0] if len(rest) == 1 else Union[rest]), True  # noqa: UP007  # made of a tuple at run time


# --- single values


def _write_plain(name: str, message: Any, value: Any) -> None:
    setattr(message, name, value)


def _read_plain(name: str, required: bool, message: Any) -> Any:
    """A field with presence that is absent is the default; one without presence is what it is."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.has_presence and not message.HasField(name):
        return _ABSENT
    value = getattr(message, name)
    return value if required or value or field.has_presence else _ABSENT


def _write_enum(name: str, message: Any, value: Enum) -> None:
    setattr(message, name, enum_number(message.DESCRIPTOR.fields_by_name[name].enum_type, value))


def _read_enum(name: str, kind: type[Enum], message: Any) -> Any:
    number = getattr(message, name)
    if number == _UNSPECIFIED:
        return _ABSENT
    return enum_value(message.DESCRIPTOR.fields_by_name[name].enum_type, kind, number, name)


def enum_number(descriptor: Any, value: Enum) -> int:
    """The number of a model's enum value: NETWORK_MODE_FETCH_ONLY for NetworkMode("fetch-only")."""
    prefix = _WORD.sub("_", type(value).__name__).upper()
    wire = f"{prefix}_{str(value.value).upper().replace('-', '_')}"
    return int(descriptor.values_by_name[wire].number)


def enum_value(descriptor: Any, kind: type[Enum], number: int, field: str) -> Enum:
    """The model's enum value of a number.

    :raises InvalidRequest: this version knows no such number.
    """
    for value in kind:
        if enum_number(descriptor, value) == number:
            return value
    known = ", ".join(str(value.value) for value in kind)
    raise InvalidRequest(field, str(number), f"this server knows {known}")


def _write_part(name: str, message: Any, value: Any) -> None:
    part = getattr(message, name)
    if isinstance(value, datetime):
        part.FromDatetime(value)
    else:
        part.SetInParent()
        to_message(value, part)


def _read_part(name: str, kind: Any, message: Any) -> Any:
    if not message.HasField(name):
        return _ABSENT
    part = getattr(message, name)
    return part.ToDatetime(tzinfo=UTC) if kind is datetime else from_message(kind, part)


# --- several


def _write_many(name: str, kind: Any, message: Any, values: Any) -> None:
    into = getattr(message, name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        enum = message.DESCRIPTOR.fields_by_name[name].enum_type
        into.extend(sorted(enum_number(enum, value) for value in values))
    elif is_dataclass(kind):
        for value in values:
            to_message(value, into.add())
    else:
        into.extend(values)


def _read_many(name: str, kind: Any, origin: Any, message: Any) -> Any:
    values: Any = getattr(message, name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        enum = message.DESCRIPTOR.fields_by_name[name].enum_type
        values = (enum_value(enum, kind, number, name) for number in values)
    elif is_dataclass(kind):
        values = (from_message(kind, value) for value in values)  # type: ignore[arg-type]  # a dataclass's type
    return frozenset(values) if origin is frozenset else tuple(values)


def _write_strings(name: str, message: Any, values: Sequence[str]) -> None:
    part = getattr(message, name)
    part.SetInParent()
    part.values.extend(values)


def _read_strings(name: str, message: Any) -> Any:
    return tuple(getattr(message, name).values) if message.HasField(name) else _ABSENT


def _mapping(name: str, kind: Any) -> _Codec:
    if kind is float:
        return _Codec(partial(_write_phases, name), partial(_read_phases, name))
    return _Codec(partial(_write_map, name), partial(_read_map, name, kind))


def _write_map(name: str, message: Any, values: Mapping[str, Any]) -> None:
    into = getattr(message, name)
    for key, value in values.items():
        into[key] = enum_number(_map_enum(message, name), value) if isinstance(value, Enum) else value


def _read_map(name: str, kind: Any, message: Any) -> Any:
    found = dict(getattr(message, name))
    if isinstance(kind, type) and issubclass(kind, Enum):
        enum = _map_enum(message, name)
        found = {key: enum_value(enum, kind, number, name) for key, number in found.items()}
    return types.MappingProxyType(found)


def _map_enum(message: Any, name: str) -> Any:
    return message.DESCRIPTOR.fields_by_name[name].message_type.fields_by_name["value"].enum_type


def _write_phases(name: str, message: Any, values: Mapping[str, float]) -> None:
    """In order, which a map of a message would not keep."""
    for key, value in values.items():
        getattr(message, name).add(name=key, seconds=value)


def _read_phases(name: str, message: Any) -> Any:
    return types.MappingProxyType({phase.name: phase.seconds for phase in getattr(message, name)})


def _one_of(name: str, kinds: Sequence[type]) -> _Codec:
    by_field = {_WORD.sub("_", kind.__name__).lower().removesuffix("_probe"): kind for kind in kinds}
    by_kind = {kind: field for field, kind in by_field.items()}

    def write(message: Any, value: Any) -> None:
        _write_part(by_kind[type(value)], message, value)

    def read(message: Any) -> Any:
        field = message.WhichOneof(name)
        return _ABSENT if field is None else _read_part(field, by_field[field], message)

    return _Codec(write, read)
