"""Reads a job file from disk: every error at its line and column, all of them at once.

job.yaml:7:12 resources.memory: '0': must be more than 0; …
"""

from __future__ import annotations

import difflib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from forgeyard_api.yaml_tree import MAX_BYTES, Mark, Node, YamlProblem, locate, read_tree
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.jobfile import JobFile

MISSING: Final = "(missing)"
_MAX_SHOWN: Final = 60
_CURES: Final = {
    "missing": "add it",
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "model_type": "write a mapping of fields",
    "model_attributes_type": "write a mapping of fields",
    "dict_type": "write a mapping of names to values",
    "mapping_type": "write a mapping of names to values",
    "tuple_type": "write a list",
    "too_short": "needs at least one item",
    "too_long": "holds too many items",
    "string_too_short": "can't be empty",
}


@dataclass(frozen=True, slots=True, order=True)
class JobFileProblem:
    """One finding, as the user reads it."""

    line: int
    column: int
    field: str
    value: str
    cure: str

    def text(self, file: str) -> str:
        """``file:line:col field: value: cure``, without the parts there are none of."""
        parts = [part for part in (self.field, self.value, self.cure) if part]
        return f"{file}:{self.line}:{self.column} " + ": ".join(parts)


class InvalidJobFile(InvalidRequest):
    """A job file that can't be used. `problems` sorted by position; nothing was started."""

    def __init__(self, file: str, problems: list[JobFileProblem]) -> None:
        self.file = file
        self.problems = tuple(sorted(set(problems)))
        first = self.problems[0]
        super().__init__(first.field or file, first.value, first.cure)

    def __str__(self) -> str:
        return "\n".join(problem.text(self.file) for problem in self.problems)


@dataclass(frozen=True, slots=True)
class LoadedJobFile:
    """A valid job file. `shown`: its name in messages. `base`: the directory its relative paths start at."""

    file: JobFile
    tree: Node
    shown: str
    base: str

    def refuse(self, error: InvalidRequest) -> InvalidJobFile:
        """`error` about one of this file's fields, at its place in the file."""
        path = tuple(error.field.split("."))
        mark, field = _place(self.tree, path, at_key=False)
        return InvalidJobFile(
            self.shown, [JobFileProblem(mark.line, mark.column, field or error.field, repr(error.value), error.cure)]
        )


def load_job_file(path: Path) -> LoadedJobFile:
    """Read and check the job file at `path`.

    :raises InvalidRequest: when there is no such file, or it can't be read as one.
    :raises InvalidJobFile: with every problem in it.
    """
    shown, tree = str(path), read_document(path)
    return LoadedJobFile(parse_tree(tree, shown), tree, shown, str(path.absolute().parent))


def read_document(path: Path) -> Node:
    """The YAML document at `path`, whatever it is about.

    :raises InvalidRequest: when there is no such file, or it is no text. :raises InvalidJobFile: no YAML.
    """
    shown = str(path)
    text = _read(path, shown)
    try:
        return read_tree(text)
    except YamlProblem as problem:
        raise InvalidJobFile(shown, [_from_yaml(problem)]) from problem


def parse_tree(tree: Node, shown: str) -> JobFile:
    """The model of an already read document.

    :raises InvalidJobFile: with every problem in it.
    """
    try:
        return JobFile.model_validate(tree.value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_from_pydantic(tree, item) for item in found if not _follows_from_another(item, found)]
        raise InvalidJobFile(shown, problems) from error


def _read(path: Path, shown: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest("job file", shown, f"can't be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise InvalidRequest("job file", shown, "is larger than 1 MiB: put scripts into files of the source")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        cure = "not UTF-8: save the file as UTF-8"
        raise InvalidJobFile(
            shown, [JobFileProblem(line, column, "", f"byte 0x{data[error.start]:02x}", cure)]
        ) from error


def _from_yaml(problem: YamlProblem) -> JobFileProblem:
    field = _dotted(problem.path)
    what = "" if field.endswith(problem.what) else problem.what
    return JobFileProblem(problem.mark.line, problem.mark.column, field, what and repr(what), problem.cure)


def _follows_from_another(item: Any, found: list[Any]) -> bool:
    """A list is "too short" also when its only item was refused: that is said already."""
    loc = item["loc"]
    return item["type"] == "too_short" and any(len(o["loc"]) > len(loc) and o["loc"][: len(loc)] == loc for o in found)


def _from_pydantic(tree: Node, item: Any) -> JobFileProblem:
    kind, loc = item["type"], tuple(item["loc"])
    is_key = bool(loc) and loc[-1] == "[key]"
    loc = loc[:-1] if is_key else loc
    mark, field = _place(tree, loc, at_key=is_key or kind == "extra_forbidden")
    if kind == "missing":
        name = str(loc[-1])
        return JobFileProblem(
            mark.line,
            mark.column,
            f"{field}.{name}".lstrip("."),
            MISSING,
            "write version: 1" if name == "version" else "add it",
        )
    value = repr(str(loc[-1])) if is_key else _shown(item["input"])
    return JobFileProblem(mark.line, mark.column, field, value, _cure(item, loc, tree))


def _cure(item: Any, loc: tuple[str | int, ...], tree: Node) -> str:
    kind = item["type"]
    if kind == "job_file":
        return str(item["ctx"]["cure"])
    if kind == "extra_forbidden":
        return _unknown_field(str(loc[-1]), _model_at(loc[:-1]))
    if kind == "string_type":
        return _string_cure(tree, loc)
    if kind in ("literal_error", "enum"):
        expected = str(item["ctx"]["expected"]).replace("'", "")
        return "write version: 1, the format this program reads" if loc == ("version",) else f"write {expected}"
    # What is left are bounds of numbers, which pydantic words well enough ("Input should be less than …").
    return _CURES.get(kind) or str(item["msg"]).replace("Input should be", "must be")


def _string_cure(tree: Node, loc: tuple[str | int, ...]) -> str:
    node = [tree, *(step[1] for step in locate(tree, loc))][-1]
    if node.children or isinstance(node.value, (dict, list)):
        return "write a string"
    return f'write it in quotes: "{node.text}"' if node.text else 'write a string; "" for an empty one'


def _unknown_field(name: str, model: type[BaseModel] | None) -> str:
    if model is None:
        return "unknown field: take it out"
    names = [info.alias or key for key, info in model.model_fields.items()]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"unknown field; did you mean {near[0]}?"
    for parent in ("resources", "source"):
        part = _model_at((parent,)) if parent in names else None
        if part is not None and name in part.model_fields:
            return f"unknown field; did you mean {parent}.{name}?"
    return f"unknown field; known here: {', '.join(names)}"


def _model_at(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The model whose fields stand at `path`, following annotations; None when it is not a model."""
    here: Any = JobFile
    for part in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            names = {info.alias or key: info.annotation for key, info in here.model_fields.items()}
            if part not in names:
                continue
            here = names[str(part)]
        here = _inner(here)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _inner(annotation: Any) -> Any:
    """The model inside ``tuple[X, ...]``, ``dict[K, X]``, ``X | None`` or ``Annotated[X, …]``."""
    arguments = typing.get_args(annotation)
    if not arguments:
        return annotation
    for argument in reversed(arguments):
        found = _inner(argument)
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def _place(tree: Node, loc: tuple[str | int, ...], *, at_key: bool) -> tuple[Mark, str]:
    """Where `loc` stands, as far as it exists, and its dotted name."""
    mark, names = tree.mark, []
    for name, node, key in locate(tree, loc):
        mark = node.mark
        names.append(name)
        last = key
    if at_key and names:
        mark = last
    return mark, _dotted(tuple(names))


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isprintable() and part else repr(part)
            text += f".{shown[:_MAX_SHOWN]}" if text else shown[:_MAX_SHOWN]
    return text


def _shown(value: object) -> str:
    """A value on one line, bounded; what a mapping or list holds says nothing here."""
    if isinstance(value, (BaseModel, dict)):
        return ""
    if isinstance(value, (list, tuple)):
        return "" if value else "[]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "...")
