"""What this version can run, and where relative host paths start. No pydantic: the command line uses it as well."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

UNLIMITED: Final = "unlimited"


def unsupported(field: str, brief: str, resolution: str) -> ExecutorError:
    """A refusal that names the field as the user wrote it; `reason` is ``FIELD_unsupported``, for programs."""
    reason = field.lstrip("-").replace(".", "_").replace("-", "_") + "_unsupported"
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, f"{field}: {brief}", resolution=resolution)


def refuse_unlimited(field: str, value: object) -> None:
    """Refuse ``unlimited``: every limit is enforced in this version.

    :raises ExecutorError: UNSUPPORTED.
    """
    if value == UNLIMITED:
        raise unsupported(field, "unlimited is not supported in this version", "write a large value")


def resolve(path: str, *, base: str) -> str:
    """`path` with a relative one put below `base`; nothing on the host is looked at."""
    return str(PurePosixPath(base, path))


def resolve_image(reference: str, *, base: str) -> str:
    """An image reference whose ``oci:PATH``, if it is one, no longer depends on a working directory."""
    if not reference.startswith("oci:"):
        return reference
    path, at, digest = reference.removeprefix("oci:").partition("@")
    return f"oci:{resolve(path, base=base)}{at}{digest}"
