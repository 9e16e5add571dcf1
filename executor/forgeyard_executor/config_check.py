"""Checks the values of one layer against the schema, and words what is wrong as a cure."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from forgeyard_executor.config_toml import ConfigProblem, InvalidConfig, Key
from forgeyard_model.config_file import ConfigFile

ProblemAt = Callable[[Key, str, str], ConfigProblem]
_CURES: Final = {
    "missing": "add it",
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "string_type": "write a string, in quotes",
    "model_type": "write a table of keys",
    "model_attributes_type": "write a table of keys",
    "dict_type": "write a table of keys",
    "tuple_type": "write a list in brackets",
}


def check_values(values: Mapping[str, Any], problem: ProblemAt) -> ConfigFile:
    """The layer that `values` make.

    :raises InvalidConfig: with every problem, placed by `problem`.
    """
    try:
        return ConfigFile.model_validate(values)
    except ValidationError as error:
        found = []
        for item in error.errors(include_url=False):
            key = tuple(item["loc"])
            value = "" if item["type"] == "missing" else _shown(item["input"])
            found.append(problem(key, value, _cure(item, key)))
        raise InvalidConfig(found) from error


def _cure(item: Any, key: Key) -> str:
    kind = item["type"]
    if kind == "job_file":
        return str(item["ctx"]["cure"])
    if kind == "extra_forbidden":
        return _unknown_key(str(key[-1]), key[:-1])
    if kind in ("enum", "literal_error"):
        return "write " + str(item["ctx"]["expected"]).replace("'", "").removeprefix("none, ")
    return _CURES.get(kind) or str(item["msg"]).replace("Input should be", "must be")


def _unknown_key(name: str, parent: Key) -> str:
    model: Any = ConfigFile
    for part in parent:
        if isinstance(part, str):
            model = _inner(model.model_fields[part].annotation)
    known = list(model.model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(known)}"


def _inner(annotation: Any) -> Any:
    """The model inside ``tuple[X, ...] | None`` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner, typing.get_args(annotation))), None)


def _shown(value: object) -> str:
    """On one line, bounded; tables and lists say nothing here."""
    if isinstance(value, (dict, list, tuple, BaseModel)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
