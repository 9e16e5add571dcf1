"""How options become one spec: each gives the fields it owns, and no two may own the same one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from forgeyard_model.errors import SandboxError, SandboxErrorKind

Fields: TypeAlias = Mapping[str, Any]
"""What one option writes: a path such as ``linux/resources/pids`` to the JSON value that stands there.

The value is owned whole: nobody else may write at, above or below its path.
"""


def compose(options: Iterable[Fields]) -> dict[str, Any]:
    """Put the fields of `options` together. Their order does not matter.

    :raises SandboxError: INTERNAL, ``field_written_twice``, when two options claim one field or one inside another's.
    """
    spec: dict[str, Any] = {}
    owned: set[str] = set()
    for fields in options:
        for path, value in fields.items():
            _place(spec, owned, path, value)
            owned.add(path)
    return spec


def _place(spec: dict[str, Any], owned: set[str], path: str, value: Any) -> None:
    *above, name = path.split("/")
    node, walked = spec, ""
    for part in above:
        walked = f"{walked}/{part}" if walked else part
        if walked in owned:
            raise _conflict(path, walked)
        node = node.setdefault(part, {})
    if name in node:
        raise _conflict(path, path)
    node[name] = value


def _conflict(path: str, owner: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.INTERNAL,
        "field_written_twice",
        "two options of the bundle compiler write the same field",
        details=f"{path}, owned as {owner}",
        resolution="give the field to one of them",
    )
