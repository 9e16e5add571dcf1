"""From an errno to the error a caller can act on."""

from __future__ import annotations

from forgeyard_model.errors import SandboxError, SandboxErrorKind


def mount_failed(what: str, error: OSError) -> SandboxError:
    """A mount that the kernel refused. `what`: a short clause such as "bind /src"."""
    return SandboxError(
        SandboxErrorKind.MOUNT_FAILED,
        "mount_refused",
        f"cannot {what}",
        details=describe(error),
        resolution="mounting needs CAP_SYS_ADMIN and Linux 5.12 or newer",
    )


def bad_plan(reason: str, brief: str, *, details: str = "", resolution: str = "") -> SandboxError:
    """A request whose facts do not hold on this host."""
    return SandboxError(SandboxErrorKind.INVALID_FILESYSTEM_PLAN, reason, brief, details=details, resolution=resolution)


def cleanup_failed(brief: str, problems: list[str]) -> SandboxError:
    """What is left after everything else was undone."""
    return SandboxError(
        SandboxErrorKind.CLEANUP_FAILED,
        "leftovers",
        brief,
        details="; ".join(problems),
        resolution="`forgeyard gc` tries again",
    )


def describe(error: OSError) -> str:
    """`error` in one line, with its path where it has one."""
    where = f" at {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
