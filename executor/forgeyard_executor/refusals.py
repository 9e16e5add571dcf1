"""What `prepare` and `start` raise for what went wrong around them."""

from __future__ import annotations

import errno

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_model.plan import Bundle
from forgeyard_model.request import ExecutionRequest
from forgeyard_runtimes.contract import ContainerRuntime


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


def refuse_uncarried(runtime: ContainerRuntime, bundle: Bundle) -> None:
    """Nothing of a bundle is dropped: what a runtime has no place for is refused while nothing is at it. May block.

    :raises SandboxError: UNSUPPORTED_ISOLATION, naming the fields.
    """
    if fields := runtime.carries(bundle):
        raise SandboxError(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "runtime_cannot_carry",
            f"{runtime.name} can't carry {', '.join(fields)}",
            resolution="use another runtime, such as --runtime runc, or ask for less",
        )
