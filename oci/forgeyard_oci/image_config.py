"""What an image's config says about running it, and the one table that merges it with a request.

======================  =======================  =====================================
request                 entry point              arguments
======================  =======================  =====================================
nothing                 the image's ENTRYPOINT   the image's CMD
arguments               the image's ENTRYPOINT   the request's; CMD is dropped
``--entrypoint X``      X                        the request's, or none; CMD is dropped
``--entrypoint ""``     none                     the request's; CMD is dropped
======================  =======================  =====================================

Absent, null and empty mean the same in an image. Job-file steps never go through ENTRYPOINT.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import refused
from forgeyard_oci.image_manifest import ConfigFile, ExecutionConfig


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The checked part of a config. `user` is still text: it is looked up in the image's own files.

    workdir: absolute, "" when the image names none. stop_signal: as the image has it, "" for none.
    """

    user: str
    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    stop_signal: str = ""

    @classmethod
    def read(cls, file: ConfigFile) -> ImageConfig:
        """Check a config.

        :raises SandboxError: names the entry that is wrong.
        """
        config = file.config or ExecutionConfig()
        for name, words in (("Entrypoint", config.entrypoint), ("Cmd", config.cmd), ("User", (config.user,))):
            _no_nul(name, words)
        return cls(
            user=config.user,
            env=MappingProxyType(_environment(config.env)),
            entrypoint=config.entrypoint if any(config.entrypoint) else (),
            cmd=config.cmd,
            workdir=_workdir(config.working_dir),
            stop_signal=config.stop_signal,
        )


def _no_nul(name: str, words: Sequence[str]) -> None:
    for word in words:
        if "\0" in word:
            raise refused("bad_config", f"image config: {name} holds a NUL byte", details=repr(word[:80]))


def _environment(entries: Sequence[str]) -> dict[str, str]:
    _no_nul("Env", entries)
    env = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise refused("bad_config", f"image config: Env entry {entry[:80]!r} is not NAME=VALUE")
        env[name] = value
    return env


def _workdir(path: str) -> str:
    _no_nul("WorkingDir", (path,))
    # As docker has it: relative to the root, which `..` never leaves. normpath keeps a leading "//", POSIX's own case.
    return "/" + posixpath.normpath(f"/{path}").lstrip("/") if path else ""


def image_argv(
    entrypoint_override: tuple[str, ...] | None,
    image_entrypoint: tuple[str, ...],
    image_cmd: tuple[str, ...],
    args: tuple[str, ...],
) -> tuple[str, ...]:
    """The argument vector of a step that runs an image's program; the table is in the module's docstring.

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
