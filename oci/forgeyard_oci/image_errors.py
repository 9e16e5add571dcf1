"""How image trouble becomes one of our errors: the image's fault, our limits, or the host's disk."""

from __future__ import annotations

import errno
import os

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# What the kernel says about a name or a value it was given, as opposed to a disk that fails.
_ENTRY_FAULTS = frozenset(
    {
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EINVAL,
        errno.EILSEQ,
        errno.E2BIG,
        errno.ERANGE,
        errno.EMLINK,
    }
)


def refused(reason: str, brief: str, *, details: str = "", resolution: str = "") -> SandboxError:
    """An image that breaks a rule. Retrying the same image can't help."""
    return SandboxError(SandboxErrorKind.INVALID_FILESYSTEM_PLAN, reason, brief, details=details, resolution=resolution)


def refused_entry(name: str, reason: str, why: str, *, resolution: str = "") -> SandboxError:
    """A layer entry that breaks a rule, named; repr keeps control characters of hostile names out of messages."""
    shown = name if len(name) <= 200 else name[:197] + "..."
    return refused(reason, f"layer entry {shown!r} {why}", resolution=resolution)


def unsupported(reason: str, brief: str, *, details: str = "", resolution: str = "") -> ExecutorError:
    """Something real that this executor does not do (yet)."""
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, details=details, resolution=resolution)


def registry_blocked(name: str, prefix: str, origin: str) -> SandboxError:
    """A registry or a part of one that this host's registries.conf forbids."""
    return refused(
        "registry_blocked",
        f"images of {prefix} are blocked on this host",
        details=f"{name}, by {origin}",
        resolution="use an image from elsewhere, or have the block removed there",
    )


def host_failure(error: OSError, doing: str, path: str) -> ExecutorError:
    """A system call that failed for the host's reasons: a full disk is named as that."""
    if error.errno in _NO_SPACE:
        return ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "no_space",
            f"no space left while {doing}",
            details=path,
            resolution="free space on that filesystem, or move the state directory, and run again",
        )
    text = os.strerror(error.errno) if error.errno is not None else str(error)
    return ExecutorError(ExecutorErrorKind.IO_FAILED, "image_io", f"failed {doing}", details=f"{path}: {text}")


def entry_failure(error: OSError, name: str, root: str) -> SandboxError | ExecutorError:
    """A system call that failed on one layer entry: the entry's fault or the host's."""
    if error.errno in _ENTRY_FAULTS:
        return refused_entry(name, "bad_entry", f"can't be made: {os.strerror(error.errno or 0)}")
    return host_failure(error, f"unpacking layer entry {name[:200]!r}", root)
