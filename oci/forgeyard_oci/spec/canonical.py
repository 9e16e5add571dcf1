"""Canonical JSON and the two digests made from it.

Canonical: keys sorted, no blank between tokens, UTF-8 without escapes beyond JSON's own, one newline at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import ContainerPlan


def canonical_json(value: Any) -> bytes:
    """The canonical bytes of a JSON value.

    :raises InvalidRequest: for a string that a runtime could not take as it is: one with a NUL, or not Unicode.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A NUL shows as this escape. So does the escape itself spelled out in a value, hence the second, exact look.
    if "\\u0000" in text:
        _refuse_unusable(value)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        _refuse_unusable(value)
        raise


def digest(data: bytes) -> str:
    """``sha256:`` and the hash of `data`, as OCI writes digests."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def plan_digest(plan: ContainerPlan) -> str:
    """Digest of what is run, the same for every attempt. Bytes (a step's stdin) enter by their own digest.

    Step arguments that are not Unicode count as well: they are escaped, never dropped.
    """
    text = json.dumps(plan, default=_plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(text.encode("ascii") + b"\n")


def _refuse_unusable(value: Any, path: str = "") -> None:
    """Name the first string below `value` that holds a NUL or a lone surrogate."""
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidRequest(path, value, "holds a NUL byte, which no path or argument can")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise InvalidRequest(path, value, "is not valid UTF-8, and a bundle is JSON; rename it")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_unusable(key, path)
            _refuse_unusable(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_unusable(item, f"{path}[{index}]")


def _plain(value: Any) -> Any:
    """What json can't write by itself: dataclasses by field, bytes by digest, read-only mappings."""
    if isinstance(value, bytes):
        return digest(value)
    if isinstance(value, Mapping):
        return dict(value)
    return {field.name: _number(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _number(value: object) -> object:
    """2.0 as 2: they are equal, so plans that hold them are, and their digests have to be."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
