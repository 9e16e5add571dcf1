"""Reads one config.toml, with the line of every key, which the standard library's reader does not tell."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import InvalidRequest

MAX_BYTES: Final = 256 << 10
_AT_LINE: Final = re.compile(r"(.*) \(at line (\d+), column \d+\)\Z", re.DOTALL)
# Strings and comments as a whole, so that brackets and line ends in them do not count.
_TOKEN: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""+|"(?:\\.|[^"\\\n])*"'
    r"|'''.*?'''+|'[^'\n]*'"
    r"|#[^\n]*|[\[\]{}\n]|[^\"'#\[\]{}\n]+",
    re.DOTALL,
)
Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class ConfigProblem:
    """One finding. `line` 0: the place has no lines (an environment variable, a flag)."""

    file: str
    line: int
    key: str
    value: str
    cure: str

    def text(self) -> str:
        """``file:line key: value: cure``, without the parts there are none of."""
        place = f"{self.file}:{self.line} " if self.line else f"{self.file}: "
        return place + ": ".join(part for part in (self.key, self.value, self.cure) if part)


class InvalidConfig(InvalidRequest):
    """A configuration that can't be used. `problems` sorted by place; nothing was started."""

    def __init__(self, problems: list[ConfigProblem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        first = self.problems[0]
        super().__init__(first.key or first.file, first.value, first.cure)

    def __str__(self) -> str:
        return "\n".join(problem.text() for problem in self.problems)


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A parsed file. `lines`: the line of each key path; one inside an array is at its statement's first line."""

    shown: str
    values: Mapping[str, Any]
    lines: Mapping[Key, int]

    def line(self, key: Key) -> int:
        """The line of `key`, or of the nearest thing around it that has one."""
        while key:
            if key in self.lines:
                return self.lines[key]
            key = key[:-1]
        return 1


def read_toml(path: Path, *, trusted: bool) -> TomlFile | None:
    """The file at `path`; None when there is none.

    :param trusted: it decides for others: only its owner, root or this user, may be able to write it.
    :raises InvalidConfig: when it can't be read as TOML, or others could have written it.
    """
    shown = str(path)
    try:
        with path.open("rb") as file:
            info = path.stat()
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(shown, f"can't be read: {getattr(error, 'strerror', None) or error}") from error
    if info.st_mode & (0o022 if trusted else 0o002):
        raise _unreadable(shown, f"others may write it: chmod go-w {shown}")
    if trusted and info.st_uid != 0:
        raise _unreadable(shown, f"belongs to uid {info.st_uid}: chown root {shown}")
    return parse_toml(data, shown)


def parse_toml(data: bytes, shown: str) -> TomlFile:
    """Parse the bytes of a file called `shown`.

    :raises InvalidConfig: at the line that is no TOML.
    """
    if len(data) > MAX_BYTES:
        raise _unreadable(shown, f"is larger than {MAX_BYTES >> 10} KiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(shown, "not UTF-8: save the file as UTF-8", line) from error
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise _unreadable(shown, "is nested too deeply") from error
    except ValueError as error:
        match = _AT_LINE.match(str(error))
        what, line = (match[1], int(match[2])) if match else (str(error), text.rstrip().count("\n") + 1)
        raise _unreadable(shown, f"is no TOML: {what[:1].lower()}{what[1:]}", line) from error
    return TomlFile(shown, values, dict(_lines(text)))


def _unreadable(shown: str, cure: str, line: int = 0) -> InvalidConfig:
    return InvalidConfig([ConfigProblem(shown, line, "", "", cure)])


def _lines(text: str) -> Iterator[tuple[Key, int]]:
    """Each key's path and line. A statement is the least number of lines that is TOML by itself."""
    table: Key = ()
    counts: dict[Key, int] = {}
    for first, statement in _statements(text):
        if statement.lstrip().startswith("["):
            table = _header(tomllib.loads(statement), counts)
            yield table, first
            if table[-1:] == (0,):
                yield table[:-1], first
        else:
            for key in _paths(tomllib.loads(statement)):
                yield (*table, *key), first


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """First line and text of each statement of what is known to be TOML."""
    line, first, depth, parts = 1, 1, 0, list[str]()
    for piece in _TOKEN.findall(text.replace("\r\n", "\n")):
        if piece == "\n" and depth == 0:
            yield first, "".join(parts)
            first, parts = line + 1, []
        else:
            parts.append(piece)
        depth += (piece in "[{") - (piece in "]}") if len(piece) == 1 else 0
        line += piece.count("\n")
    yield first, "".join(parts)


def _header(parsed: Mapping[str, Any], counts: dict[Key, int]) -> Key:
    """The path of ``[a.b]``, or of the next item of ``[[a.b]]``."""
    path: Key = ()
    node: Any = parsed
    while node:
        if isinstance(node, list):
            counts[path] = counts.get(path, -1) + 1
            return (*path, counts[path])
        name = next(iter(node))
        path, node = (*path, name), node[name]
        if path in counts and not isinstance(node, list):
            # [a.b] after [[a]] is about the last item of a.
            path = (*path, counts[path])
    return path


def _paths(value: Any, path: Key = ()) -> Iterator[Key]:
    if path:
        yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _paths(item, (*path, name))
