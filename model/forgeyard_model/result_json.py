"""A result as JSON, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgeyard_model.result import ExecutionResult


def result_json(result: ExecutionResult, **more: Any) -> bytes:
    """`result` as one line of JSON: enums as snake_case, profiles as written, times as RFC 3339.

    :param more: further fields of the outermost mapping, which `read_result` passes over.
    """
    # dict: what pydantic serialises; the type's own default is a read-only view of one.
    data = _adapter().dump_python(replace(result, startup=dict(result.startup)), mode="json")
    text = json.dumps({**data, **more}, ensure_ascii=False)
    # A program's name may be bytes that are no UTF-8; the file is UTF-8 all the same.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode() + b"\n"


def read_result(data: bytes) -> ExecutionResult:
    """The reverse of `result_json`.

    :raises ValueError: when `data` is something else.
    """
    result: ExecutionResult = _adapter().validate_json(data)
    return result


def _adapter() -> Any:
    from pydantic import TypeAdapter

    from forgeyard_model.result import ExecutionResult

    return TypeAdapter(ExecutionResult)
