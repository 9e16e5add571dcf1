"""A job as JSON, and back: every field of it, as a program has it. The job file is for people; this is for records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from forgeyard_model.job import Job


def job_data(job: Job) -> dict[str, Any]:
    """`job` as mappings, lists and plain values.

    :raises UnicodeDecodeError: for a step's stdin that is no UTF-8, which JSON can't hold.
    """
    found: dict[str, Any] = _data(job)
    return found


def job_from_data(data: Any) -> Job:
    """The reverse.

    :raises ValueError: when `data` is no job.
    """
    from pydantic import TypeAdapter

    job: Job = TypeAdapter(Job).validate_python(data)
    return job


def _data(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _data(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {_data(key): _data(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list, frozenset)):
        return [_data(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value
