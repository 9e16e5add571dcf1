"""ENTRYPOINT, CMD and a command line made into one. Apart from the config's schema, which a warm job does not load."""

from __future__ import annotations

from forgeyard_model.errors import InvalidRequest


def image_argv(
    entrypoint_override: tuple[str, ...] | None,
    image_entrypoint: tuple[str, ...],
    image_cmd: tuple[str, ...],
    args: tuple[str, ...],
) -> tuple[str, ...]:
    """The argument vector of a step that runs an image's program; the table is in image_config's docstring.

    :param entrypoint_override: None keeps the image's; () and ("",) clear it.
    :raises InvalidRequest: when nothing is left to run.
    """
    if entrypoint_override is None:
        argv = image_entrypoint + (args or image_cmd)
    else:
        argv = (() if entrypoint_override == ("",) else entrypoint_override) + args
    if not argv or not argv[0]:
        raise InvalidRequest(
            "command", " ".join(argv), "the image has nothing to run for this: name a program after --"
        )
    return argv
