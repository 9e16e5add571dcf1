"""Steps made ready to run: argument vectors, environments, directories. Pure."""

from __future__ import annotations

import errno
import os
import posixpath
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forgeyard_executor.environment import check_arguments, check_text, step_environment
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import Step, When
from forgeyard_model.plan import RootfsPlan
from forgeyard_model.request import ExecutionRequest
from forgeyard_oci.image_argv import image_argv

SOURCE_DIR: Final = "/work/source"
BUILD_DIR: Final = "/work/build"


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """A step with nothing left to look up. A script's path is appended to `argv` when it is written."""

    step: Step
    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    stop_signal: int = signal.SIGTERM


def default_workdir(request: ExecutionRequest, rootfs: RootfsPlan) -> str:
    """The job's, else the source, else the image's own for a job without a source, else /work/build."""
    base = SOURCE_DIR if request.workspace.source is not None else (rootfs.workdir or BUILD_DIR)
    return _join("workdir", base, request.spec.workdir)


def resolve_step(request: ExecutionRequest, rootfs: RootfsPlan, step: Step, *, index: int, user: str) -> ResolvedStep:
    """What step number `index` executes.

    :raises InvalidRequest: for an argument or variable the kernel would refuse, or nothing to run.
    """
    field = f"steps[{index}]"
    if step.script is not None:
        argv = step.interpreter.argv
        _check_script(field, step.script)
    elif step.entrypoint:
        argv = image_argv(request.spec.entrypoint, rootfs.entrypoint, rootfs.cmd, step.argv)
    else:
        argv = step.argv
    toolchains = tuple(path.destination for path in request.sandbox.filesystem.toolchains)
    env = step_environment(rootfs.env, request.environment.variables, step.env, user=user, toolchains=toolchains)
    check_arguments(field, argv, env)
    workdir = _join(f"{field}.workdir", default_workdir(request, rootfs), step.workdir)
    # The image's signal is for what the image starts; other programs know TERM.
    stop_signal = rootfs.stop_signal if step.entrypoint else signal.SIGTERM
    return ResolvedStep(step, argv, env, workdir, stop_signal)


def should_run(step: Step, *, failed: bool) -> bool:
    """Whether `step` runs, given whether an unmasked step has failed before it."""
    return {When.ALWAYS: True, When.ON_SUCCESS: not failed, When.ON_FAILURE: failed}[step.when]


def _check_script(field: str, script: str) -> None:
    check_text(f"{field}.run", script)


def _join(field: str, base: str, path: str | None) -> str:
    if path is None:
        return base
    check_text(field, path)
    if ".." in path.split("/"):
        raise InvalidRequest(
            field, path, "write an absolute path in the sandbox, or one below the source, without '..'"
        )
    return posixpath.normpath(posixpath.join(base, path))


NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


def exec_failure(resolved: ResolvedStep, stage: str, error: int) -> tuple[int, str]:
    """Exit code and words for a step that could not be executed, as shells have them: 127 not found, else 126.

    :param stage: what failed: "chdir", "stdin" or "exec". error: an errno.
    """
    text = os.strerror(error)
    if stage == "chdir":
        return NOT_EXECUTABLE, f"working directory {resolved.workdir}: {text}"
    if stage != "exec":
        return NOT_EXECUTABLE, f"{stage}: {text}"
    program = resolved.argv[0]
    if error != errno.ENOENT:
        hint = " (no #! line, or for another architecture)" if error == errno.ENOEXEC else ""
        return NOT_EXECUTABLE, f"{program}: {text}{hint}"
    where = "" if "/" in program else f" in PATH {resolved.env.get('PATH', '')}"
    return NOT_FOUND, f"{program}: not found{where}"
