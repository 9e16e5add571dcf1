"""Our errors on their way out of the process that reads images, which may say anything once it is taken over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    ForgeyardError,
    SandboxError,
    SandboxErrorKind,
)

_LONGEST: Final = 2000
_REASON: Final = re.compile(r"[a-z][a-z_]{0,39}")
_SANDBOX_KINDS: Final = frozenset({SandboxErrorKind.INVALID_FILESYSTEM_PLAN, SandboxErrorKind.PRIVILEGE_DROP_FAILED})
_EXECUTOR_KINDS: Final = frozenset({ExecutorErrorKind.UNSUPPORTED, ExecutorErrorKind.IO_FAILED})


def pack_error(error: SandboxError | ExecutorError) -> dict[str, str]:
    """An error as a message."""
    return {
        "class": "sandbox" if isinstance(error, SandboxError) else "executor",
        "kind": error.kind.value,
        "reason": error.reason,
        "brief": error.brief,
        "details": error.details,
        "resolution": error.resolution,
    }


def unpack_error(message: Mapping[str, Any]) -> ForgeyardError | None:
    """The error that `message` is; None when it is none that may come from there."""
    reason, word = message.get("reason"), message.get("kind")
    if not isinstance(reason, str) or not _REASON.fullmatch(reason) or not isinstance(word, str):
        return None
    brief, details, cure = (_line(message.get(name)) for name in ("brief", "details", "resolution"))
    try:
        if message.get("class") == "sandbox" and (kind := SandboxErrorKind(word)) in _SANDBOX_KINDS:
            return SandboxError(kind, reason, brief, details=details, resolution=cure)
        if message.get("class") == "executor" and (what := ExecutorErrorKind(word)) in _EXECUTOR_KINDS:
            return ExecutorError(what, reason, brief, details=details, resolution=cure)
    except ValueError:
        return None
    return None


def _line(text: object) -> str:
    """Short, and without what a terminal would obey."""
    cut = text[:_LONGEST] if isinstance(text, str) else ""
    return "".join(character if character.isprintable() else "?" for character in cut)


def lost(reason: str, brief: str, *, details: str = "", resolution: str = "") -> SandboxError:
    """The reading process failed as a whole: of this attempt only, and a new one is started for the next."""
    return SandboxError(SandboxErrorKind.INTERNAL, reason, brief, details=details, resolution=resolution)


def out_of_memory(limit: int) -> SandboxError:
    """An image that can't be read within the bound."""
    return SandboxError(
        SandboxErrorKind.INVALID_FILESYSTEM_PLAN,
        "image_reader_memory",
        f"the image takes more than {limit >> 20} MiB of memory to read",
        resolution="rebuild the image with fewer files or smaller documents",
    )
