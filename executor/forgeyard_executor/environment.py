"""The variables a step sees (CONTRACT.md, Identity, environment). Nothing of the executor's own leaks in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from forgeyard_model.errors import InvalidRequest

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME: Final = "/home/forgeyard"
_DEFAULTS: Final = {"PATH": DEFAULT_PATH, "TZ": "UTC", "LANG": "C.UTF-8", "CI": "true"}

# Kernel bounds (execve(2)): one string, and a quarter of the usual 8 MiB stack for all of them.
STRING_LIMIT: Final = 32 * 4096 - 1
TOTAL_LIMIT: Final = 2 * 1024 * 1024 - 8192
_MOST_NAME: Final = 255
_MOST_PATH: Final = 4000
"""Bytes: PATH_MAX less room for the root that it is mounted below."""


def step_environment(
    image: Mapping[str, str], job: Mapping[str, str], step: Mapping[str, str], *, user: str, toolchains: tuple[str, ...]
) -> dict[str, str]:
    """Merge, later wins: fixed defaults, image, HOME and identity, job, step; toolchains go in front of PATH."""
    merged = {**_DEFAULTS, **image, "HOME": HOME, "USER": user, "LOGNAME": user, **job, **step}
    if toolchains:
        bins = ":".join(f"{path}/bin" for path in toolchains)
        merged["PATH"] = f"{bins}:{merged['PATH']}" if merged.get("PATH") else bins
    return merged


def check_arguments(field: str, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Refuse what execve would refuse, by name and before anything starts.

    :raises InvalidRequest: names the argument or the variable.
    """
    total, longest = 0, ("", 0)
    for index, word in enumerate(argv):
        size = _check_word(f"{field}.argv[{index}]", word)
        total, longest = total + size, max(longest, (f"argv[{index}]", size), key=_size)
    for name, value in env.items():
        if not name or "=" in name:
            raise InvalidRequest(f"{field}.env", name, "write a variable name without '='")
        size = _check_word(f"{field}.env.{name}", f"{name}={value}")
        total, longest = total + size, max(longest, (f"env.{name}", size), key=_size)
    if total > TOTAL_LIMIT:
        cure = f"arguments and environment together may have {TOTAL_LIMIT}; the longest is {longest[0]!r}"
        raise InvalidRequest(field, f"{total} bytes", cure)


def _size(word: tuple[str, int]) -> int:
    return word[1]


def check_text(field: str, text: str) -> None:
    """Refuse what no file name, argument or script can hold. Bytes that are no UTF-8 (surrogateescape) are fine.

    :raises InvalidRequest: names the field.
    """
    if "\0" in text:
        raise InvalidRequest(field, text, "remove the NUL character")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, text, "holds half of a surrogate pair: write the character itself") from error


def check_length(field: str, path: str) -> None:
    """Refuse a path that is longer than Linux takes.

    :raises InvalidRequest: names the field.
    """
    if len(os.fsencode(path)) > _MOST_PATH or any(len(os.fsencode(part)) > _MOST_NAME for part in path.split("/")):
        raise InvalidRequest(field, path, "is longer than Linux takes; choose a shorter path")


def _check_word(field: str, word: str) -> int:
    check_text(field, word)
    size = len(word.encode("utf-8", "surrogateescape")) + 1
    if size > STRING_LIMIT:
        raise InvalidRequest(field, f"{size} bytes", f"the kernel takes {STRING_LIMIT} at most; pass a file instead")
    return size + 8
