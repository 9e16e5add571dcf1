"""YAML with positions, made for input nobody trusts.

The events of the parser become plain data in one pass, each value with the line and column it stands at. Nothing
is recursive in the input's depth, aliases are counted as what they expand to, and no tag makes an object. Plain
scalars follow YAML 1.2's core schema: `yes`, `on`, `012` and `12:30` are strings, as they look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import yaml

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 24
MAX_NODES: Final = 50_000

_INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")
_WORDS: Final[Mapping[str, object]] = MappingProxyType(
    {"": None, "~": None, "null": None, "Null": None, "NULL": None}
    | {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
)
_STANDARD_TAG: Final = "tag:yaml.org,2002:"
# libyaml's scanner is ten times faster, where PyYAML was built with it; both give the same events.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where something stands: line and column, from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Node:
    """A value and where it stands. `keys`: where each key of a mapping stands. `text`: a scalar as written."""

    mark: Mark
    value: Any = None
    text: str = ""
    children: dict[str | int, Node] = field(default_factory=dict)
    keys: dict[str, Mark] = field(default_factory=dict)
    size: int = 1


class YamlProblem(Exception):  # noqa: N818  a finding about the text, turned into a job file problem by the reader
    """The text can't be read. `what` is what stands there, `cure` what to do."""

    def __init__(self, mark: Mark, what: str, cure: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(cure)
        self.mark, self.what, self.cure, self.path = mark, what, cure, path


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been seen. `key`: of a mapping, waiting for its value."""

    node: Node
    name: str | int
    anchor: str | None
    key: str | None = None

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.node.value, dict)


def read_tree(text: str) -> Node:
    """The one document in `text`.

    :raises YamlProblem: syntax, duplicate key, foreign tag, or a bound exceeded.
    """
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlProblem(_mark(mark), "", f"not YAML: {_one_line(error.problem or error.context)}") from error
    except yaml.reader.ReaderError as error:
        raise YamlProblem(
            _position(text, error.position), f"character {error.character!r}", "not allowed in YAML: take it out"
        ) from error
    if builder.root is None:
        raise YamlProblem(Mark(1, 1), "", "the file is empty: `forgeyard job init` writes an example")
    return builder.root


class _Builder:
    """Makes the tree from parser events, with a stack of its own instead of recursion."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self._stack: list[_Open] = []
        self._anchors: dict[str, Node] = {}

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._add(_scalar(event), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._add_alias(event)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open(event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._close()
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise YamlProblem(_mark(event.start_mark), "---", "a second document: a job file holds one")

    def _open(self, event: Any) -> None:
        mark = _mark(event.start_mark)
        mapping = isinstance(event, yaml.MappingStartEvent)
        _check_tag(event.tag, ("map",) if mapping else ("seq",), mark)
        if len(self._stack) >= MAX_DEPTH:
            raise YamlProblem(mark, "", f"nested deeper than {MAX_DEPTH} levels: a job file is flatter than that")
        self._check_key_position(mark)
        self._stack.append(_Open(Node(mark, {} if mapping else []), self._next_name(), event.anchor))

    def _close(self) -> None:
        done = self._stack.pop()
        self._attach(done.node, done.name, done.anchor)

    def _add(self, node: Node, anchor: str | None) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and top.is_mapping and top.key is None:
            self._take_key(top, node)
            return
        self._attach(node, self._next_name(), anchor)

    def _add_alias(self, event: Any) -> None:
        mark = _mark(event.start_mark)
        self._check_key_position(mark)
        target = self._anchors.get(event.anchor)
        if target is None:
            raise YamlProblem(mark, f"*{event.anchor}", "no finished value above has this anchor")
        depth = len(self._stack) + _depth(target)
        if depth > MAX_DEPTH:
            raise YamlProblem(mark, f"*{event.anchor}", f"nests deeper than {MAX_DEPTH} levels")
        self._attach(target, self._next_name(), None)

    def _attach(self, node: Node, name: str | int, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._stack:
            self.root = node
            return
        parent = self._stack[-1]
        # An alias counts with all that it stands for, so that ten short lines can't become millions of values.
        parent.node.size += node.size
        if parent.node.size > MAX_NODES:
            raise YamlProblem(node.mark, "", f"more than {MAX_NODES} values once aliases are written out")
        parent.node.children[name] = node
        if parent.is_mapping:
            parent.node.value[name] = node.value
            parent.key = None
        else:
            parent.node.value.append(node.value)

    def _next_name(self) -> str | int:
        if not self._stack:
            return ""
        top = self._stack[-1]
        return top.key if top.key is not None else len(top.node.children)

    def _take_key(self, top: _Open, node: Node) -> None:
        # A key is a name: `on:` and `8080:` are what they look like, whatever type they would have as values.
        key = node.text
        if key == "<<":
            raise YamlProblem(node.mark, "<<", "merge keys are not read: write the fields out", self._path(key))
        if key in top.node.keys:
            first = top.node.keys[key].line
            raise YamlProblem(node.mark, key, f"stands twice, first in line {first}: keep one", self._path(key))
        top.node.keys[key] = node.mark
        top.key = key

    def _check_key_position(self, mark: Mark) -> None:
        if self._stack and self._stack[-1].is_mapping and self._stack[-1].key is None:
            raise YamlProblem(mark, "", "a key must be a plain word")

    def _path(self, *more: str) -> tuple[str | int, ...]:
        return (*(entry.name for entry in self._stack[1:]), *more)


def _scalar(event: Any) -> Node:
    mark, text = _mark(event.start_mark), event.value
    _check_tag(event.tag, ("str", "int", "float", "bool", "null"), mark)
    plain = event.implicit[0] and event.style in (None, "")
    tagged_string = event.tag in (_STANDARD_TAG + "str", "!")
    return Node(mark, _plain_value(text) if plain and not tagged_string else text, text)


def _plain_value(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    # A limit on digits: Python refuses to read very long integers, and no field takes one.
    if len(text) <= 40:
        if _INT.match(text):
            return int(text)
        if _FLOAT.match(text) and not text.lstrip("+-").isdigit():
            return float(text)
    return text


def _check_tag(tag: str | None, known: tuple[str, ...], mark: Mark) -> None:
    if tag in (None, "!") or (tag is not None and tag.removeprefix(_STANDARD_TAG) in known):
        return
    raise YamlProblem(mark, str(tag), "tags are not read: write the value itself")


def _depth(node: Node) -> int:
    """Levels of `node`, at most MAX_DEPTH + 1, without recursion."""
    level, depth = [node], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        # Shared children are looked at once, or an alias bomb would make this loop the bomb.
        level = list({id(child): child for item in level for child in item.children.values()}.values())
    return depth


def locate(root: Node, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, Node, Mark]]:
    """The steps of `path` that exist below `root`: name, node, and where its key (or itself) stands.

    Parts of the path that name no child are passed over: a validator's own names for the arms of a union.
    """
    node = root
    for part in path:
        child = node.children.get(part)
        if child is None:
            continue
        yield part, child, node.keys.get(part, child.mark) if isinstance(part, str) else child.mark
        node = child


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(1, 1)


def _position(text: str, index: int) -> Mark:
    before = text[:index]
    return Mark(before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
