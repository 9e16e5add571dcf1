"""`--result`: the whole result as JSON, or what kept the job from having one. Written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import ExecutorError, ForgeyardError, InvalidRequest, SandboxError

STDOUT: Final = "-"


def error_json(error: ForgeyardError, exit_code: int) -> bytes:
    """In the place of a result when none exists: the job was refused, or never started."""
    found: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, (SandboxError, ExecutorError)):
        found |= {"kind": error.kind.value, "reason": error.reason}
    if isinstance(error, InvalidRequest):
        found |= {"field": error.field, "value": error.value}
    found |= {"brief": error.brief, "details": error.details, "resolution": error.resolution}
    found["failure_class"] = error.failure_class.value
    return json.dumps({"error": found, "exit_code": exit_code}).encode() + b"\n"


def check_target(target: str) -> None:
    """Before the job runs: there is a directory to write the result into.

    :raises InvalidRequest: when there is none.
    """
    path = Path(target)
    try:
        writable = not path.is_dir() and os.access(path.absolute().parent, os.W_OK)
        usable = target == STDOUT or (writable and "\0" not in target)
    except OSError:  # a name that is too long
        usable = False
    if not usable:
        raise InvalidRequest("--result", target, "name a file in a directory that can be written to")


def check_absent_or_empty(flag: str, path: Path) -> None:
    """Before the job runs: `path` is no file, and no directory with something in it.

    :raises InvalidRequest: names the flag.
    """
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise InvalidRequest(flag, path, f"can't be used: {error.strerror}") from error
    if used:
        raise InvalidRequest(flag, path, "is not an empty directory: name an absent or empty one")


def write_result(target: Path, data: bytes) -> None:
    """Put `data` at `target`: a reader finds the whole of it or what was there before.

    :raises OSError: when it can't be written; nothing half-written stays.
    """
    if target.exists() and not target.is_file():
        # /dev/stderr, /dev/fd/3 or a FIFO: there is nothing to rename over.
        with target.open("wb") as special:
            special.write(data)
        return
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def _umask() -> int:
    # There is no call that only reads it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
