"""The flags on how a job comes by its image, as the executor takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forgeyard_api.cli_flags import JobArguments
from forgeyard_api.main import as_usage
from forgeyard_model.errors import InvalidRequest

if TYPE_CHECKING:
    from forgeyard_executor.images import ImageOptions
    from forgeyard_oci.registry.budget import Progress


def image_options(arguments: JobArguments, progress: Progress | None) -> ImageOptions:
    """What ``--pull``, ``--lock`` and ``--locked`` ask for.

    :raises UnusableInput: for a flag, or a lock file, that can't be used as written.
    """
    from forgeyard_executor.images import ImageOptions, pull_policy

    flags = arguments.flags
    with as_usage():
        try:
            policy = pull_policy(flags.pull)
        except InvalidRequest as error:
            raise InvalidRequest("--pull", error.value, error.cure) from error
        if flags.frozen and flags.lock is None:
            raise InvalidRequest("--locked", "", "goes with --lock FILE")
        lock = None if flags.lock is None else flags.lock.absolute()
        if lock is not None:
            from forgeyard_executor.image_lock import ImageLock

            ImageLock.read(lock)  # before anything is started for the job: it may be damaged
    return ImageOptions(policy, progress, lock, flags.frozen)
