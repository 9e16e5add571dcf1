"""Scalars of the job file: how each is written, checked, and described to an editor.

Each type checks what can be known from the text alone. A refusal carries the cure as its message, since the reader
of the file sees nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.jobfile_support import UNLIMITED
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.units import parse_duration

MAX_STRING: Final = (128 << 10) - 1
"""Bytes. The kernel takes no longer argument or variable (MAX_ARG_STRLEN, with its closing NUL)."""
MAX_SCRIPT: Final = 1 << 20
MAX_NAME: Final = 128
Unlimited = Literal["unlimited"]

_DNS_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")


class Strict(BaseModel):
    """Base of the job file's models: an unknown field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)


def refusal(cure: str) -> PydanticCustomError:
    """A validation error whose whole message is what to write instead."""
    # The cure goes in through the context: a brace in it must not be read as a placeholder.
    return PydanticCustomError("job_file", "{cure}", {"cure": cure})


def _matching(pattern: str, cure: str) -> AfterValidator:
    compiled = re.compile(rf"(?:{pattern})\Z")

    def check(text: str) -> str:
        if not compiled.match(text):
            raise refusal(cure)
        return text

    return AfterValidator(check)


def _encodable(text: str) -> str:
    if "\0" in text:
        raise refusal("holds a NUL byte: take it out")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise refusal("holds half of a surrogate pair: write the character itself") from error
    if size > MAX_SCRIPT:
        raise refusal("is longer than 1 MiB: put it into a file of the source")
    return text


def _argument(text: str) -> str:
    if len(text.encode()) > MAX_STRING:
        raise refusal("is longer than Linux takes (128 KiB): put it into a file of the source")
    return text


def _printable(text: str) -> str:
    if not text.strip() or len(text) > MAX_NAME or any(not char.isprintable() for char in text):
        raise refusal(f"write 1 to {MAX_NAME} characters, none of them a control character")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise refusal("write an absolute path inside the sandbox, without '..'")
    return text


def _workdir(text: str) -> str:
    if not text or ".." in text.split("/"):
        raise refusal("write a path below /work/source, or an absolute one, without '..'")
    return text


def _below(where: str) -> AfterValidator:
    def check(text: str) -> str:
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if text.startswith("/") or not parts or ".." in parts:
            raise refusal(f"write a path relative to {where}, without '..'")
        return "/".join(parts)

    return AfterValidator(check)


def _image(text: str) -> str:
    reference, at, digest = text.partition("@")
    if not reference or any(char.isspace() or not char.isprintable() for char in text):
        raise refusal("write an image reference such as registry.example.org/team/api@sha256:DIGEST")
    if at and not _DIGEST.match(digest):
        raise refusal("after @ write sha256: and 64 hexadecimal digits")
    return text


def _cidr(text: str) -> str:
    try:
        ip_network(text)
    except ValueError as error:
        raise refusal("write a network such as 10.20.0.0/16, with no bits set past the prefix") from error
    return text


def _numeric_user(value: object) -> object:
    # `user: 1000` is how everybody writes it; no other field takes a number for a string.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _limit(name: str, *, unlimited: bool = False) -> PlainValidator:
    """Read a limit by the one parser that API and command line use too, plus ``unlimited`` where that is a choice."""

    def parse(value: Any) -> Any:
        if unlimited and value == UNLIMITED:
            return UNLIMITED
        try:
            return getattr(ResourceLimits.parse(**{name: value}), name)
        except InvalidRequest as error:
            raise refusal(error.cure) from error

    return PlainValidator(_not_null(parse))


def _duration(*, allow_zero: bool = False, unlimited: bool = False) -> PlainValidator:
    def parse(value: Any) -> Any:
        if unlimited and value == UNLIMITED:
            return UNLIMITED
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise refusal("write a duration such as 90s, 15m or 1h30m")
        try:
            return parse_duration(value, field="duration", allow_zero=allow_zero)
        except InvalidRequest as error:
            raise refusal(error.cure) from error

    return PlainValidator(_not_null(parse))


def _not_null(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is None or isinstance(value, (dict, list)):
            raise refusal("write a value, or leave the field out for the profile's default")
        return parse(value)

    return check


def _schema(kind: str | list[str], *examples: object, **more: object) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, "examples": list(examples), **more})


_SIZE_PATTERN: Final = r"^(unlimited|[0-9]+(\.[0-9]+)?\s*([kKmMgGtTpP]([iI]?[bB]|[iI])?|[bB])?)$"
_DURATION_PATTERN: Final = r"^(unlimited|([0-9]+h)?([0-9]+m)?([0-9]+(\.[0-9]+)?s)?([0-9]+ms)?)$"


def _size_schema() -> WithJsonSchema:
    return _schema(["string", "integer"], "512MiB", "2g", pattern=_SIZE_PATTERN, exclusiveMinimum=0)


def _duration_schema() -> WithJsonSchema:
    return _schema("string", "90s", "15m", "1h30m", pattern=_DURATION_PATTERN, minLength=1)


Text = Annotated[str, AfterValidator(_encodable)]
Argument = Annotated[Text, AfterValidator(_argument)]
Name = Annotated[Text, AfterValidator(_printable), Field(min_length=1, max_length=MAX_NAME)]
Count = Annotated[StrictInt, Field(ge=1, le=4_000_000)]
Port = Annotated[StrictInt, Field(ge=1, le=65535)]
Flag = StrictBool
VariableName = Annotated[
    Argument, _matching(r"[^=\s\x00-\x1f\x7f]+", "write a variable's name: no '=', spaces or control characters")
]
Environment = Mapping[VariableName, Argument]

SandboxPath = Annotated[Argument, AfterValidator(_absolute)]
Workdir = Annotated[Argument, AfterValidator(_workdir)]
OutputPath = Annotated[Argument, _below("/work/output")]
SourcePath = Annotated[Argument, _below("the source")]
HostPath = Annotated[Argument, _matching(r"(?s:.+)", "write a path; a relative one starts at the job file's directory")]

ImageReference = Annotated[Argument, AfterValidator(_image)]
Platform = Annotated[
    str,
    _matching(r"linux/[a-z0-9]+(?:/[a-z0-9]+)?", "write linux/ARCHITECTURE, such as linux/amd64 or linux/arm64/v8"),
    _schema("string", "linux/amd64", pattern="^linux/[a-z0-9]+(/[a-z0-9]+)?$"),
]
User = Annotated[
    str,
    BeforeValidator(_numeric_user),
    _matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?", "write NAME, UID or UID:GID"),
    _schema(["string", "integer"], "forgeyard", 1000, "1000:1000", minimum=0),
]
ToolchainName = Annotated[
    str, _matching(r"[a-z0-9][a-z0-9._+-]{0,63}", "write lower-case letters, digits and . _ + - (at most 64)")
]
SecretName = Annotated[
    str, _matching(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}", "write letters, digits and _ . - (at most 128)")
]
ServiceName = Annotated[
    str,
    _matching(rf"(?!localhost\Z){_DNS_LABEL}", "write a host name: lower-case letters, digits and -, not localhost"),
]
HostPattern = Annotated[
    str,
    _matching(
        # The last label needs a letter, or 10.0.0.1 would pass for a name and match nothing.
        rf"(?:\*\.)?(?:{_DNS_LABEL}\.)*(?=[a-z0-9-]*[a-z]){_DNS_LABEL}",
        "write a host name such as pypi.example.org or *.example.org; for an address use cidr",
    ),
]
Cidr = Annotated[str, AfterValidator(_cidr)]
CdiDevice = Annotated[
    str,
    _matching(
        r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9_-]*=[A-Za-z0-9][A-Za-z0-9_.:-]*",
        "write a CDI name: vendor.com/class=name",
    ),
]

Cpus = Annotated[float | Unlimited, _limit("cpus", unlimited=True), _schema(["number", "string"], 2, 0.5, minimum=0.01)]
Memory = Annotated[int | Unlimited, _limit("memory", unlimited=True), _size_schema()]
Disk = Annotated[int | Unlimited, _limit("disk", unlimited=True), _size_schema()]
Shm = Annotated[int, _limit("shm"), _size_schema()]
Pids = Annotated[int | Unlimited, _limit("pids", unlimited=True), _schema(["integer", "string"], 512, minimum=4)]
Nofile = Annotated[int, _limit("nofile"), _schema("integer", 4096, minimum=16)]
WallTime = Annotated[float | Unlimited, _duration(unlimited=True), _duration_schema()]
Duration = Annotated[float, _duration(), _duration_schema()]
DurationOrZero = Annotated[float, _duration(allow_zero=True), _duration_schema()]
Size = Annotated[int, _limit("shm"), _size_schema()]
