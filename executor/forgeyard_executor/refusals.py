"""What `prepare` and `start` raise for what went wrong around them."""

from __future__ import annotations

import errno

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.request import ExecutionRequest


def prepare_timeout(request: ExecutionRequest, *, pulling: bool) -> ExecutorError:
    """`prepare_timeout` expired. `pulling`: while an image was fetched."""
    doing = f"while the image {request.spec.image} was fetched" if pulling and request.spec.image else ""
    return ExecutorError(
        ExecutorErrorKind.TIMEOUT,
        "prepare_timeout",
        f"prepare_timeout of {request.timeouts.prepare:g}s expired",
        details=doing,
        resolution="pull it first with `forgeyard image pull`, or give more time with prepare_timeout" if doing else "",
    )


def state_io(error: OSError) -> ExecutorError:
    """The state directory could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ExecutorError(
        ExecutorErrorKind.IO_FAILED,
        "no_space" if full else "state_directory",
        "the state directory can't be written",
        details=str(error),
        resolution="free space in its file system, or name another with --state-dir",
    )
