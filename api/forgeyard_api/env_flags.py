"""Variables from the command line: `-e K=V`, `-e K`, and `--env-file`, read as docker reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from forgeyard_model.errors import InvalidRequest


def read_environment(
    files: Iterable[Path], pairs: Iterable[str], *, caller: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of `files`, then of `pairs`; later wins. A name alone copies the caller's, or nothing if unset.

    :raises InvalidRequest: names the flag, or the file and line, that can't be read.
    """
    found: dict[str, str] = {}
    for path in files:
        for number, line in enumerate(_lines(path), start=1):
            text = line.lstrip()
            if text and not text.startswith("#"):
                _take(found, text, caller, field=f"{path}:{number}")
    for pair in pairs:
        _take(found, pair, caller, field="--env")
    return found


def _take(found: dict[str, str], text: str, caller: Mapping[str, str], *, field: str) -> None:
    name, equals, value = text.partition("=")
    if not name or any(char.isspace() or not char.isprintable() for char in name):
        raise InvalidRequest(field, text, "write NAME=VALUE, or NAME to copy yours")
    if equals:
        found[name] = value
    elif name in caller:
        found[name] = caller[name]


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest("--env-file", path, f"can't be read: {error.strerror}") from error
    if b"\0" in data:
        raise InvalidRequest("--env-file", path, "holds a NUL byte: take it out")
    # surrogateescape: a value may hold any bytes, and goes to the job as it is. Only \n and \r\n end a line.
    text = data.decode("utf-8-sig", "surrogateescape")
    return [line.removesuffix("\r") for line in text.split("\n")]
